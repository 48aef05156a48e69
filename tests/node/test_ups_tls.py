"""STARTTLS: only with a certificate that proves the host, and never back to plain text."""

from __future__ import annotations

import shutil
import ssl
import subprocess

import pytest

from powerguard.core.types import Comm
from powerguard.node.ups_client import CheckedClient
from powerguard.node.ups_exchange import Refused, Unreadable
from powerguard.sim.upsd import HEALTHY, SimUpsd

pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates: not installed")


def certificate(folder, name: str, alternative: str) -> tuple[str, str]:
    """A self-signed certificate: (certificate, key)."""
    cert, key = folder / f"{name}.pem", folder / f"{name}.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-keyout", key,
         "-out", cert, "-days", "30", "-subj", f"/CN={name}", "-addext", f"subjectAltName={alternative}"],
        check=True, capture_output=True,
    )  # fmt: skip
    return str(cert), str(key)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    """One for this host, and one for another."""
    folder = tmp_path_factory.mktemp("tls")
    return certificate(folder, "localhost", "DNS:localhost,IP:127.0.0.1"), certificate(
        folder, "other", "DNS:other.example"
    )


def serving(pair: tuple[str, str]) -> SimUpsd:
    """A server with that certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*pair)
    server = SimUpsd(tls=context)
    server.replace("demo", HEALTHY)
    return server


def trusting(*certs: str) -> ssl.SSLContext:
    """Verifies certificate and host name against *certs* only."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    for cert in certs:
        context.load_verify_locations(cert)
    return context


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_the_right_certificate(certificates, host):
    """Everything works encrypted, LOGIN too."""
    (mine, _other) = certificates
    with serving(mine) as server, CheckedClient(
        host, server.port, "secondary", "secondarypw", tls=trusting(mine[0])
    ) as client:  # fmt: skip
        assert client.tls.startswith("TLSv1.")
        client.login("demo")
        assert client.list_vars("demo") == dict(HEALTHY)
        assert server.asked[0] == "STARTTLS"


def test_a_certificate_of_nobody_we_know(certificates):
    """An unknown issuer is refused, and no password was sent."""
    mine, other = certificates
    with serving(mine) as server:
        with pytest.raises(Refused, match="certificate") as caught:
            CheckedClient("localhost", server.port, "secondary", "secondarypw", tls=trusting(other[0]))
        assert (caught.value.code, caught.value.comm) == ("CERTIFICATE", Comm.REFUSED)
        assert list(server.asked) == ["STARTTLS"]


def test_a_certificate_of_another_host(certificates):
    """A trusted certificate for another name is refused."""
    _mine, other = certificates
    with serving(other) as server, pytest.raises(Refused, match="certificate"):
        CheckedClient("localhost", server.port, tls=trusting(other[0]))


def test_a_server_without_tls(upsd, certificates):
    """Where TLS is asked for, plain text is never the way out."""
    with pytest.raises(Refused, match="feature not configured") as caught:
        CheckedClient(upsd.host, upsd.port, "secondary", "secondarypw", tls=trusting(certificates[0][0]))
    assert caught.value.comm is Comm.REFUSED
    assert list(upsd.asked) == ["STARTTLS"]


def test_a_server_that_says_ok_and_nothing_more(upsd, certificates):
    """A handshake that never comes is bounded."""
    upsd.fault("garbage", data=b"OK STARTTLS\n", times=1)
    upsd.fault("silent")
    with pytest.raises(Unreadable, match="TLS"):
        CheckedClient(upsd.host, upsd.port, tls=trusting(certificates[0][0]), answer_s=0.2)


def test_plain_text_behind_the_answer_is_not_taken_into_the_session(upsd, certificates):
    """What somebody injects before the handshake isn't read as an answer after it."""
    upsd.fault("garbage", data=b'OK STARTTLS\nVAR demo ups.status "OL"\n', times=1)
    with pytest.raises(Unreadable, match="plain text"):
        CheckedClient(upsd.host, upsd.port, tls=trusting(certificates[0][0]), answer_s=0.2)


@pytest.mark.parametrize("kind", ["silent", "cut", "reset", "drip"])
def test_faults_under_tls_are_the_same_errors(certificates, kind):
    """Silence, a cut and a reset of the encrypted connection are Unreadable too."""
    mine, _ = certificates
    with serving(mine) as server:
        client = CheckedClient("localhost", server.port, tls=trusting(mine[0]), answer_s=0.2, exchange_s=0.3)
        server.fault(kind, after=30, seconds=0.05)
        with pytest.raises(Unreadable):
            client.list_vars("demo")
        assert not client.connected

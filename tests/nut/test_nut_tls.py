"""STARTTLS with Debian's upsd, which is built with NSS: verified, refused, and not blocked by others."""

from __future__ import annotations

import shutil
import socket
import ssl
import statistics
import subprocess
import time
from pathlib import Path

import pytest

from powerguard.core.types import Comm
from powerguard.errors import UpsRefused
from powerguard.node.ups_client import CheckedClient
from powerguard.node.ups_line import UpsAddress
from powerguard.node.ups_probe import probe
from powerguard.sim.nut import RealNut

TOOLS = ("openssl", "certutil", "pk12util")
absent = [tool for tool in TOOLS if shutil.which(tool) is None]
pytestmark = pytest.mark.skipif(bool(absent), reason=f"not installed: {', '.join(absent)} (apt: openssl libnss3-tools)")

USER = {"user": "secondary", "password": "secondarypw"}


def run(*command: object, at: Path) -> None:
    """One step of making certificates."""
    done = subprocess.run([str(word) for word in command], cwd=at, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def certificate(at: Path, name: str) -> Path:
    """A self-signed certificate for localhost, with its key beside it."""
    run("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.pem",
        "-days", "30", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", at=at)  # fmt: skip
    return at / f"{name}.pem"


@pytest.fixture(scope="module")
def secure(tmp_path_factory):
    """upsd with a certificate: (the server, its certificate, another's)."""
    made = tmp_path_factory.mktemp("certificates")
    mine, other = certificate(made, "mine"), certificate(made, "other")
    run("openssl", "pkcs12", "-export", "-in", mine, "-inkey", "mine.key", "-name", "upsd", "-passout", "pass:p12",
        "-out", "mine.p12", at=made)  # fmt: skip
    (made / "pw").write_text("dbpassword\n")
    with RealNut({"demo": {"ups.status": "OL"}}, ready=False) as nut:
        database = nut.directory / "nss"
        database.mkdir()
        run("certutil", "-N", "-d", f"sql:{database}", "-f", "pw", at=made)
        run("pk12util", "-i", "mine.p12", "-d", f"sql:{database}", "-k", "pw", "-W", "p12", at=made)
        run("certutil", "-M", "-d", f"sql:{database}", "-n", "upsd", "-t", "CTu,u,u", "-f", "pw", at=made)
        nut.give_away(database, *database.iterdir())
        with (nut.directory / "etc" / "upsd.conf").open("a") as conf:
            conf.write(f'CERTPATH {database}\nCERTIDENT "upsd" "dbpassword"\n')
        nut.stop("upsd")
        nut.start_upsd()
        nut.wait_ready()
        yield nut, mine, other


def trusting(cert: Path) -> ssl.SSLContext:
    """Trusts this certificate and no other."""
    return ssl.create_default_context(cafile=str(cert))


def at(nut: RealNut, host: str) -> UpsAddress:
    """The UPS by that name of its host."""
    return UpsAddress("demo", host, nut.port)


def test_the_right_certificate(secure):
    """Encrypted and verified, the whole probe works."""
    nut, mine, _other = secure
    seen = probe(at(nut, "localhost"), tls=trusting(mine), **USER)
    assert seen.tls == "TLSv1.3"
    assert (seen.variables["ups.status"], seen.logged_in, seen.numlogins) == ("OL", True, 1)


def test_a_list_over_tls_takes_no_nagle_stall(secure):
    """LIST VAR in a row through TLS stays far below 40 ms too."""
    nut, mine, _other = secure
    took = []
    with CheckedClient("localhost", nut.port, tls=trusting(mine)) as client:
        for _ in range(30):
            began = time.perf_counter()
            client.list_vars("demo")
            took.append((time.perf_counter() - began) * 1000)
    print(f"LIST VAR over TLS: {statistics.median(took):.2f} ms")
    assert statistics.median(took) < 10


def test_the_wrong_certificate(secure):
    """A certificate that we don't trust is refused, and says what to do."""
    nut, _mine, other = secure
    with pytest.raises(UpsRefused, match="the right CA file"):
        probe(at(nut, "localhost"), tls=trusting(other), **USER)


def test_a_name_that_is_not_in_the_certificate(secure):
    """The host's name counts, not only the issuer."""
    nut, mine, _other = secure
    context = trusting(mine)
    with pytest.raises(UpsRefused, match="certificate"):
        probe(at(nut, "127.0.0.1"), tls=context, **USER)


def test_plain_text_where_tls_is_not_configured(nut):
    """upsd without a certificate: refused, never plain."""
    with pytest.raises(UpsRefused, match="offers no TLS"):
        probe(UpsAddress.parse(nut.address("demo")), tls=ssl.create_default_context(), **USER)


def test_a_reader_over_tls_survives_another_client_that_blocks_upsd(secure, listen, eventually):
    """Anybody can block upsd 2.8.0 by STARTTLS and silence: unreachable in time meanwhile, well again afterwards."""
    nut, mine, _other = secure
    listener = listen(address=at(nut, "localhost"), tls=trusting(mine), **USER)
    eventually(lambda: listener.reader.login_held)
    with socket.create_connection((nut.host, nut.port), 5) as rude:
        rude.sendall(b"STARTTLS\n")
        assert listener.comm(Comm.UNREACHABLE).took_s < 1.5
    listener.comm(Comm.OK)
    eventually(lambda: listener.reader.login_held)

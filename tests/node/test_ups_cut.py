"""Answers cut at every byte, and arbitrary bytes as answers: the right value or an error, never a wrong value."""

from __future__ import annotations

import socket

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from powerguard.node.ups_client import CheckedClient
from powerguard.node.ups_exchange import NutError, Unreadable
from powerguard.node.ups_line import MalformedLine, decode, words
from powerguard.sim.upsd import SimUpsd

VARIABLES = {"ups.status": "OB LB DISCHRG", "battery.charge": "90", "battery.runtime": "1200", "ups.mfr": 'A"B\\C'}

QUESTIONS = {
    "LIST VAR demo": ("", lambda client: client.list_vars("demo"), VARIABLES),
    "GET VAR demo ups.status": ("", lambda client: client.get_var("demo", "ups.status"), "OB LB DISCHRG"),
    "LIST UPS": ("", lambda client: client.list_ups(), {"demo": "the rack"}),
    "GET NUMLOGINS demo": ("", lambda client: client.num_logins("demo"), 12),
    "LIST CLIENT demo": ("", lambda client: client.list_clients("demo"), {"demo": ["127.0.0.1"] * 12}),
    "NETVER": ("", lambda client: client.protocol(), "1.3"),
    "SET VAR demo ups.status OL": ("admin", lambda client: client.set_var("demo", "ups.status", "OL"), None),
    "PRIMARY demo": ("primary", lambda client: client.is_primary("demo"), True),
}


@pytest.fixture(scope="module")
def server():
    """A server whose NUMLOGINS has two digits, so that a cut could make a number of half of it."""
    with SimUpsd() as upsd:
        upsd.replace("demo", VARIABLES)
        upsd.describe("demo", "the rack")
        clients = [CheckedClient(upsd.host, upsd.port, "primary", "primarypw") for _ in range(12)]
        for client in clients:
            client.login("demo")
        yield upsd
        for client in clients:
            client.close()


def size(server: SimUpsd, question: str, user: str) -> int:
    """Bytes of the whole answer, read without our client."""
    with socket.create_connection((server.host, server.port), 5) as connection, connection.makefile("rb") as answers:
        for line in (f"USERNAME {user}", f"PASSWORD {user}pw") if user else ():
            connection.sendall(line.encode() + b"\n")
            answers.readline()
        server.fault("cut", after=1_000_000, times=1)
        connection.sendall(question.encode() + b"\n")
        return len(answers.read())


@pytest.mark.slow
@pytest.mark.parametrize("end", ["cut", "reset"])
@pytest.mark.parametrize("question", QUESTIONS)
def test_cut_at_every_byte(server, question, end):
    """For every n: the connection ends after n bytes of the answer, and no half of it becomes a value."""
    user, ask, right = QUESTIONS[question]
    whole = size(server, question, user)
    server.replace("demo", VARIABLES)
    outcomes: list[object] = []
    for after in range(whole + 1):
        client = CheckedClient(server.host, server.port, user or None, f"{user}pw", answer_s=60.0, exchange_s=60.0)
        server.fault(end, after=after, times=1)
        try:
            outcomes.append(("answer", ask(client)))
        except NutError as error:
            outcomes.append(error)
        client.close()
        server.replace("demo", VARIABLES)
    for after, outcome in enumerate(outcomes[:-1]):
        assert isinstance(outcome, Unreadable), f"cut after {after} of {whole} bytes"
        assert outcome.gone
    assert whole > 2
    assert end == "reset" or outcomes[-1] == ("answer", right)  # a reset may overtake the last byte


LINES = st.lists(
    st.sampled_from(
        [
            b"BEGIN LIST VAR demo\n", b"END LIST VAR demo\n", b'VAR demo ups.status "OL"\n',
            b'VAR demo ups.status "OB\n', b'VAR demo a "x\\"y"\n', b"VAR demo\n", b"\n", b"\r\n", b"ERR DATA-STALE\n",
            b"ERR\n", b"OK\n", b"\xff\xfb\x01", b"BEGIN LIST VAR demo", b'VAR other ups.status "OL"\n', b'"',
            b"\\", b"\x00",
        ]
    ),
    max_size=12,
).map(b"".join)  # fmt: skip


def believable(data: bytes) -> dict[str, str] | None:
    """What *data* says as a LIST VAR of `demo`, worked out another way; None if it isn't one."""
    lines = data.split(b"\n")[:-1]
    if not lines or lines[0].removesuffix(b"\r") != b"BEGIN LIST VAR demo":
        return None
    table: dict[str, str] = {}
    for line in lines[1:]:
        if line.removesuffix(b"\r") == b"END LIST VAR demo":
            return table
        try:
            verb, ups, name, value = words(decode(line.removesuffix(b"\r")))
        except (ValueError, MalformedLine):
            return None
        if (verb, ups) != ("VAR", "demo") or table.setdefault(name, value) != value:
            return None
    return None


@pytest.mark.slow
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    data=st.one_of(LINES, LINES.map(lambda body: b"BEGIN LIST VAR demo\n" + body + b"END LIST VAR demo\n"), st.binary())
)
def test_any_bytes_are_a_right_list_or_a_nut_error(server, data):
    """Whatever a server sends before it closes: a table that it really spelled out, or a NutError."""
    server.clear()
    if data:
        server.fault("cut", after=len(data), data=data, times=1)
    else:
        server.fault("drop", times=1)
    client = CheckedClient(server.host, server.port)
    try:
        answer = client.list_vars("demo")
    except NutError:
        return
    finally:
        client.close()
    assert answer == believable(data)

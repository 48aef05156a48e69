"""The simulated upsd answers as the real one did, and goes wrong as told."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.sim.upsd import HEALTHY, SimUpsd
from powerguard.sim.upsd_answers import Answers
from powerguard.sim.upsd_faults import HITCHES, OUTAGES, STATES, Fault
from powerguard.sim.upsd_grammar import quoted, take_question
from powerguard.sim.upsd_state import Session, Ups, User

TRANSCRIPT = Path(__file__).parent.parent / "data" / "upsd-2.8.0.txt"

USERS = {
    "admin": User("adminpw", upsmon="", may_set=True, may_fsd=True, instcmds=True),
    "mon1": User("mon1pw", upsmon="primary"),
    "mon2": User("mon2pw", upsmon="secondary"),
}


def as_recorded(text: str) -> Answers:
    """The state of the recorded server, taken from its own first lists."""
    answers = Answers(USERS)
    for name, description in re.findall(r'^S: UPS (\S+) "(.*)"$', text, re.MULTILINE)[:5]:
        described = None if description.startswith("Description una") else description.replace('\\"', '"')
        answers.upses[name] = Ups(name, described, commands=("load.off",))
    for name, var, value in re.findall(r'^S: VAR (\S+) (\S+) "(.*)"$', text, re.MULTILINE):
        answers.upses[name].variables.setdefault(var, re.sub(r"\\(.)", r"\1", value))
    answers.upses["ups5"].state = "driver-gone"
    return answers


def conversation(text: str):
    """(section, connection, question, answer lines) in order; an unanswered question has None."""
    section = connection = ""
    question, lines = None, []
    for line in [*text.splitlines(), "===== end"]:
        if line.startswith("S: "):
            lines.append(line[3:])
            continue
        if line.startswith("!!"):
            yield section, connection, question, None
            question = None
        elif line.startswith(("C: ", "C:", "=====", "---")):
            if question is not None:
                yield section, connection, question, lines
            question, lines = None, []
            if line.startswith("C:"):
                question = line[3:]
            elif line.startswith("====="):
                section, connection = line[6:], ""
            else:
                connection = line[4:]


def test_answers_are_those_of_the_recorded_upsd():
    """Question by question the answers are those that a real upsd 2.8.0 gave, but for version and tracking ids."""
    text = TRANSCRIPT.read_text()
    answers, sessions, compared = as_recorded(text), {}, 0
    for section, connection, question, expected in conversation(text):
        if (section, connection) not in sessions:
            if not any(key[0] == section for key in sessions):
                answers.sessions.clear()  # the recorder closed its connections between sections
            sessions[section, connection] = Session("127.0.0.1")
            answers.sessions.append(sessions[section, connection])
            answers.upses["ups3"].state = "stale" if section == "stale driver" else "ok"
        asked = take_question(bytearray(f"{question}\n".encode()))
        if expected is None:
            assert asked is None, question
            continue
        assert asked is not None, question
        given_back = answers.answer(sessions[section, connection], asked)
        if question == "VER":
            assert given_back[0].startswith("Network UPS Tools upsd 2.8.0")
        elif expected[0].startswith("OK TRACKING"):
            assert given_back[0].startswith("OK TRACKING")
        else:
            assert expected == given_back, f"{section}: {question}"
        compared += 1
    assert compared > 90


@given(st.lists(st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E)), max_size=6))
def test_quoted_words_come_back(words):
    """Whatever is quoted by upsd's rule is read back by upsd's grammar."""
    line = " ".join(quoted(word) for word in words) + "\n"
    assert words == take_question(bytearray(line.encode()))


@pytest.mark.parametrize(
    ("sent", "heard"),
    [
        (b'GET VAR "demo#" x\nNETVER\n', ["NETVER"]),
        (b'GET VAR "demo\\#" x\n', ["GET", "VAR", "demo#", "x"]),
        (b"GET # a comment\n", ["GET"]),
        ("GET Akk\u00fc\n".encode(), ["GET", "Akk"]),
        (b'SET "a\nb"\n', ["SET", "ab"]),
        (b'GET "a" "" b\\ c\r\n', ["GET", "a", "", "b c"]),
        (b'GET "open\n', None),
    ],
)
def test_questions_are_heard_as_upsd_hears_them(sent, heard):
    """Odd questions, as upsd 2.8.0 took them: a bare # in quotes spoils its line, what isn't ASCII is dropped."""
    assert take_question(bytearray(sent)) == heard


@given(st.binary(max_size=200))
def test_any_bytes_are_taken_or_waited_for(data):
    """The question reader never raises, and takes at least one byte with every question."""
    buffer = bytearray(data)
    size = len(buffer)
    while take_question(buffer) is not None:
        assert len(buffer) < size
        size = len(buffer)


class Client:
    """The smallest NUT client, so that the server is tested without ours."""

    def __init__(self, upsd: SimUpsd) -> None:
        self.socket = socket.create_connection((upsd.host, upsd.port), 5)
        self.file = self.socket.makefile("rb")

    def ask(self, question: str) -> str:
        self.socket.sendall(question.encode() + b"\n")
        return self.file.readline().decode().strip()

    def list(self, question: str) -> list[str]:
        lines = [self.ask(question)]
        while not lines[-1].startswith(("END", "ERR")) and lines[-1]:
            lines.append(self.file.readline().decode().strip())
        return lines

    def close(self) -> None:
        self.file.close()
        self.socket.close()


@pytest.fixture
def client(upsd):
    """One connection to the server."""
    made = Client(upsd)
    yield made
    made.close()


def test_variables_are_set_and_taken_away(upsd, client):
    """`set` shows at once, None removes, `replace` leaves nothing else."""
    upsd.set("demo", {"ups.status": "OB LB", "ups.load": None})
    assert client.ask("GET VAR demo ups.status") == 'VAR demo ups.status "OB LB"'
    assert client.ask("GET VAR demo ups.load") == "ERR VAR-NOT-SUPPORTED"
    upsd.replace("demo", {})
    assert client.list("LIST VAR demo") == ["BEGIN LIST VAR demo", "END LIST VAR demo"]
    upsd.remove("demo")
    assert client.ask("GET VAR demo ups.status") == "ERR UNKNOWN-UPS"


def test_login_lasts_as_long_as_its_connection(upsd, client):
    """NUMLOGINS counts connections and drops with them."""
    assert [client.ask(each) for each in ("USERNAME secondary", "PASSWORD secondarypw", "LOGIN demo")] == ["OK"] * 3
    assert upsd.numlogins("demo") == 1
    client.close()
    assert upsd.wait_for(lambda server: server.numlogins("demo") == 0)
    assert "PASSWORD ***" in upsd.asked
    assert not any("secondarypw" in question for question in upsd.asked)


def test_fsd_stays_until_restart(upsd):
    """FSD comes first in the status, survives its sender, and only a restart clears it."""
    client = Client(upsd)
    for question in ("USERNAME primary", "PASSWORD primarypw"):
        client.ask(question)
    assert client.ask("PRIMARY demo") == "OK PRIMARY-GRANTED"
    assert client.ask("FSD demo") == "OK FSD-SET"
    client.close()
    again = Client(upsd)
    assert again.ask("GET VAR demo ups.status") == 'VAR demo ups.status "FSD OL"'
    again.close()
    upsd.restart()
    anew = Client(upsd)
    assert anew.ask("GET VAR demo ups.status") == 'VAR demo ups.status "OL"'
    anew.close()


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("stale", "ERR DATA-STALE"),
        ("driver-gone", "ERR DRIVER-NOT-CONNECTED"),
        ("wait", 'VAR demo ups.status "WAIT"'),
    ],
)
def test_states_of_a_ups(upsd, client, kind, answer):
    """Stale, driver gone and waiting are answered as upsd does, for one UPS, until cleared."""
    upsd.replace("other", HEALTHY)
    upsd.fault(kind, ups="demo")
    assert answer == client.ask("GET VAR demo ups.status")
    assert client.ask("GET VAR other ups.status") == 'VAR other ups.status "OL"'
    upsd.clear("demo")
    assert client.ask("GET VAR demo ups.status") == 'VAR demo ups.status "OL"'


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (Fault("cut", after=7), b"VAR dem"),
        (Fault("cut", after=1000), b'VAR demo ups.status "OL"\n'),
        (Fault("drop"), b""),
        (Fault("cut", after=5, data=b"\xff\x00\xfe\n!"), b"\xff\x00\xfe\n!"),
    ],
)
def test_hitches_that_end_the_connection(upsd, client, fault, seen):
    """Exactly the promised bytes arrive, then the end."""
    upsd.inject(fault)
    client.socket.sendall(b"GET VAR demo ups.status\n")
    assert seen == client.file.read()


def test_hitches_that_go_on(upsd, client):
    """A wrong answer and garbage are sent once each where `times` is 1, then the truth again."""
    upsd.fault("wrong", times=1)
    assert client.ask("GET VAR demo ups.status") == 'VAR another ups.status "OL"'
    upsd.fault("garbage", times=1, data=b"what?\n")
    assert client.ask("GET VAR demo ups.status") == "what?"
    assert client.ask("GET VAR demo ups.status") == 'VAR demo ups.status "OL"'


def test_a_hitch_can_be_narrowed(upsd, client):
    """*on* and *ups* choose the questions that are hit."""
    upsd.replace("other", HEALTHY)
    upsd.fault("garbage", on="GET VAR", ups="other", data=b"hit\n")
    assert client.ask("NETVER") == "1.3"
    assert client.ask("GET VAR demo ups.status") == 'VAR demo ups.status "OL"'
    assert client.ask("GET VAR other ups.status") == "hit"


def test_reset_is_a_reset(upsd, client):
    """After *after* bytes the connection is reset, not closed."""
    upsd.fault("reset", after=3)
    client.socket.sendall(b"GET VAR demo ups.status\n")
    with pytest.raises(ConnectionResetError):
        client.file.read()


def test_silence_lateness_and_half_open_delay_the_answer(upsd, client):
    """Silent: no answer at all. Late: after its seconds. Half-open: only once it is over, as after SIGCONT."""
    client.socket.settimeout(0.05)
    upsd.fault("silent", times=1)
    client.socket.sendall(b"NETVER\n")
    with pytest.raises(TimeoutError):
        client.socket.recv(100)
    upsd.fault("half-open")
    client.socket.sendall(b"NETVER\n")
    with pytest.raises(TimeoutError):
        client.socket.recv(100)
    upsd.clear()
    client.socket.settimeout(5)
    assert client.socket.recv(100) == b"1.3\n"
    upsd.fault("late", seconds=0.1, times=1)
    began = time.monotonic()
    client.socket.sendall(b"NETVER\n")
    assert client.socket.recv(100) == b"1.3\n"
    assert time.monotonic() - began >= 0.1
    upsd.fault("drip", seconds=0.001, times=1)
    client.socket.sendall(b"NETVER\n")
    assert client.socket.recv(100) == b"1"


def test_refusing_ends_connections_and_clearing_brings_the_port_back(upsd, client):
    """Refuse: open connections end and new ones fail; after `clear` the same port serves again."""
    port = upsd.port
    assert client.ask("NETVER") == "1.3"
    upsd.fault("refuse")
    assert client.socket.recv(100) == b""
    with pytest.raises(ConnectionRefusedError):
        Client(upsd)
    upsd.clear()
    assert port == upsd.port
    again = Client(upsd)
    assert again.ask("NETVER") == "1.3"
    again.close()


def test_ipv6():
    """A server on ::1 has a bracketed address."""
    with SimUpsd(host="::1") as server:
        assert f"demo@[::1]:{server.port}" == server.address("demo")
        client = Client(server)
        assert client.ask("NETVER") == "1.3"
        client.close()


def test_faults_are_read_from_words():
    """A fault's text gives the same value as its constructor; nonsense is a ValueError."""
    assert Fault("cut", ups="demo", after=40, times=1) == Fault.parse("cut ups=demo after=40 times=1")
    assert Fault("late", on="LIST VAR", seconds=1.5) == Fault.parse("late on=LIST_VAR seconds=1.5")
    for kind in (*STATES, *HITCHES, *OUTAGES):
        assert kind == Fault.parse(kind).kind
    for wrong in ("explode", "cut after", "cut afer=3", "cut after=x", ""):
        with pytest.raises(ValueError, match=r".+"):
            Fault.parse(wrong)


def test_by_hand():
    """`python -m powerguard.sim.upsd` serves, obeys its lines, and explains what it doesn't understand."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "powerguard.sim.upsd", "--ups", "demo", "--port", "0"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1,
    )  # fmt: skip
    try:
        host, port = process.stdout.readline().split("@")[1].strip().split(":")
        assert "secondary" in process.stdout.readline()
        process.stdin.write("demo ups.status: OB DISCHRG\nnonsense\n")
        assert "not understood" in process.stdout.readline()
        with socket.create_connection((host, int(port)), 5) as connection:
            connection.sendall(b"GET VAR demo ups.status\n")
            assert connection.recv(100) == b'VAR demo ups.status "OB DISCHRG"\n'
        process.stdin.write("quit\n")
        assert process.wait(10) == 0
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()

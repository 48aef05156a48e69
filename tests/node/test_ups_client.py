"""Each measured defect of pynut2 2.1.2, mended: the right answer or a NutError, and never a stale connection."""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
import traceback

import pytest
from pynut2.nut2 import PyNUTClient, PyNUTError

from powerguard.core.types import Comm
from powerguard.errors import ConfigError
from powerguard.node.ups_client import CheckedClient
from powerguard.node.ups_exchange import NutError, Refused, Unreadable
from powerguard.sim.upsd import HEALTHY, SimUpsd
from powerguard.sim.upsd_answers import User

QUICK = {"answer_s": 0.1, "exchange_s": 0.3}


@pytest.fixture
def client(upsd):
    """A client of the simulated server with short deadlines."""
    made = CheckedClient(upsd.host, upsd.port, **QUICK)
    yield made
    made.close()


def closed(upsd: SimUpsd, client: CheckedClient) -> bool:
    """Whether a doubt ended the connection on both sides, and further questions fail."""
    with pytest.raises(Unreadable):
        client.list_vars("demo")
    return not client.connected and upsd.wait_for(lambda server: not server._sockets)


def test_the_happy_path(upsd, client):
    """Everything that is there is read as it is."""
    upsd.describe("demo", 'rack "A"')
    assert isinstance(client, PyNUTClient)
    assert client.list_ups() == {"demo": 'rack "A"'}
    assert client.description("demo") == 'rack "A"'
    assert client.list_vars("demo") == dict(HEALTHY)
    assert client.get_var("demo", "battery.charge") == client.get("demo", "battery.charge") == "100"
    assert "ups.status" in client.list_rw_vars("demo")
    assert "driver.name" not in client.list_rw_vars("demo")
    assert "load.off" in client.list_commands("demo")
    assert client.var_type("demo", "ups.status") == "RW STRING:32"
    assert client.var_description("demo", "ups.status") == "Description unavailable"
    assert client.num_logins("demo") == 0
    assert client.list_clients() == {"demo": []}
    assert client.list_enum("demo", "ups.status") == []
    assert client.list_range("demo", "ups.status") == []
    assert client.ver().startswith("Network UPS Tools upsd 2.8.0")
    assert "LOGIN" in client.help()
    assert client.protocol() == "1.3"


# ---- rows of the table of defects, in its order -------------------------------------------------------


def test_01_a_late_answer_is_never_another_questions(upsd, client):
    """After an answer that came too late the connection is gone, and a new one reads the right value."""
    upsd.fault("late", seconds=0.2, times=1)
    with pytest.raises(Unreadable, match="no answer in time"):
        client.get_var("demo", "ups.status")
    with pytest.raises(Unreadable, match="not connected"):
        client.get_var("demo", "battery.charge")
    with CheckedClient(upsd.host, upsd.port, **QUICK) as again:
        assert again.get_var("demo", "battery.charge") == "100"


@pytest.mark.parametrize(
    "data",
    [
        b'VAR other ups.status "OL"\n',
        b'VAR demo ups.load "OL"\n',
        b'VAR demo ups.status "OL" "OB"\n',
        b"VAR demo ups.status OB LB\n",
        b"VAR demo ups.status\n",
        b'UPS demo ups.status "OL"\n',
        b"OK\n",
        b"\n",
        b"ERR\n",
    ],
)
def test_02_an_answer_to_another_question_is_a_doubt(upsd, client, data):
    """An answer that doesn't repeat the question, or has too few or many words, is no answer."""
    upsd.fault("garbage", data=data)
    with pytest.raises(Unreadable):
        client.get_var("demo", "ups.status")
    assert closed(upsd, client)


def test_02_a_list_about_another_ups_is_a_doubt(upsd, client):
    """Each line of a list names the UPS that was asked for."""
    upsd.fault("wrong")
    with pytest.raises(Unreadable, match="was answered"):
        client.list_vars("demo")
    assert closed(upsd, client)


def test_03_a_value_that_was_cut_is_an_error(upsd, client):
    """`OB LB` cut to `OB` must never be read."""
    upsd.set("demo", {"ups.status": "OB LB"})
    upsd.fault("cut", after=len('VAR demo ups.status "OB'))
    with pytest.raises(Unreadable, match="closed"):
        client.get_var("demo", "ups.status")


def test_04_05_quotes_and_backslashes_are_unescaped(upsd, client):
    r"""`A\"BC` is A"BC and `\\` is one backslash, in values and descriptions alike."""
    odd = {"ups.mfr": 'A"BC', "ups.model": r"he said \ and \\", "ups.id": "#1 = one", "empty": "", "pad": "  x  "}
    upsd.replace("demo", odd)
    upsd.describe("demo", r'"\"')
    assert client.list_vars("demo") == odd
    assert client.get_var("demo", "ups.mfr") == 'A"BC'
    assert client.description("demo") == r'"\"'


def test_06_no_variables_are_an_empty_dict(upsd, client):
    """A UPS without variables, and a server without UPSes, give empty tables."""
    upsd.replace("demo", {})
    assert client.list_vars("demo") == {}
    assert client.list_rw_vars("demo") == {}
    upsd.remove("demo")
    assert client.list_ups() == {}
    upsd.fault("garbage", on="LIST CMD", data=b"BEGIN LIST CMD demo\nEND LIST CMD demo\n")
    assert client.list_commands("demo") == {}


@pytest.mark.parametrize("kind", ["cut", "reset"])
@pytest.mark.parametrize("after", [0, 20, 60])
def test_07_08_the_end_of_the_connection_is_one_kind_of_error(upsd, client, kind, after):
    """FIN or RST, before or within the answer: Unreadable, which is a PyNUTError, and says the other end left."""
    upsd.fault(kind, after=after)
    for ask in (lambda: client.list_vars("demo"), lambda: client.get_var("demo", "ups.status")):
        with pytest.raises(Unreadable) as caught:
            ask()
        assert isinstance(caught.value, PyNUTError)
        assert caught.value.comm is Comm.UNREACHABLE
    upsd.clear()


def test_07_a_list_that_stalls_is_an_error(upsd, client):
    """Half a list and then silence is no list."""
    upsd.fault("garbage", data=b'BEGIN LIST VAR demo\nVAR demo ups.status "OL"\n')
    with pytest.raises(Unreadable, match="no answer in time"):
        client.list_vars("demo")


def test_08_a_server_that_went_away_between_questions(upsd, client):
    """A question after the server ended is Unreadable with `gone`, not an AttributeError."""
    assert client.protocol() == "1.3"
    upsd.fault("refuse")
    assert upsd.wait_for(lambda server: not server._sockets)
    with pytest.raises(Unreadable) as caught:
        client.list_vars("demo")
    assert caught.value.gone
    with pytest.raises(Unreadable, match="refused"):
        CheckedClient(upsd.host, upsd.port)


def test_10_silence_has_a_name_and_an_end(upsd, client):
    """A server that never answers costs one answer_s, and the error says so."""
    upsd.fault("silent")
    began = time.monotonic()
    with pytest.raises(Unreadable, match="no answer in time"):
        client.get_var("demo", "ups.status")
    assert time.monotonic() - began < 1.0


def test_10_a_drip_is_bounded_by_the_exchange(upsd, client):
    """Bytes that trickle in, each in time, don't stretch the whole answer beyond exchange_s."""
    upsd.fault("drip", seconds=0.05)
    began = time.monotonic()
    with pytest.raises(Unreadable, match="no answer in time"):
        client.list_vars("demo")
    assert time.monotonic() - began < 2.0


def test_10_a_server_that_accepts_and_never_reads(upsd):
    """The kernel accepts for a stopped upsd: connecting works, the first question ends in time."""
    upsd.fault("half-open")
    client = CheckedClient(upsd.host, upsd.port, **QUICK)
    with pytest.raises(Unreadable, match="no answer in time"):
        client.ver()


def test_10_the_owner_bounds_everything(upsd):
    """Nothing waits beyond *until*, however long the other deadlines are."""
    upsd.fault("silent")
    began = time.monotonic()
    client = CheckedClient(upsd.host, upsd.port, answer_s=60, exchange_s=60, until=began + 0.1)
    with pytest.raises(Unreadable):
        client.ver()
    with pytest.raises(Unreadable):
        CheckedClient("192.0.2.1", 3493, until=time.monotonic() + 0.1)  # TEST-NET-1: nobody answers, or no route
    assert time.monotonic() - began < 2.0


def test_11_a_wrong_password_is_seen_at_login(upsd, client):
    """upsd says OK to any password; LOGIN tells, and the connection stays good."""
    client.authenticate("secondary", "wrong")
    with pytest.raises(Refused) as caught:
        client.login("demo")
    assert (caught.value.code, caught.value.comm) == ("ACCESS-DENIED", Comm.REFUSED)
    assert client.get_var("demo", "ups.status") == "OL"


def test_12_login_logs_in_until_the_connection_ends(upsd):
    """LOGIN counts, LIST CLIENT shows it, LOGOUT ends it."""
    client = CheckedClient(upsd.host, upsd.port, "secondary", "secondarypw")
    assert upsd.numlogins("demo") == 0
    client.login("demo")
    assert client.num_logins("demo") == 1
    client.logout()
    assert not client.connected
    assert upsd.numlogins("demo") == 0
    assert upsd.asked[-1] == "LOGOUT"


def test_13_set_var_stores_the_whole_value(upsd):
    """A value of several words is stored whole."""
    with CheckedClient(upsd.host, upsd.port, "admin", "adminpw") as client:
        client.set_var("demo", "ups.status", 'OB "LB" \\')
    assert upsd.variables("demo")["ups.status"] == 'OB "LB" \\'


def test_14_list_clients(upsd, client):
    """LIST CLIENT is spelled as the protocol has it."""
    with CheckedClient(upsd.host, upsd.port, "secondary", "secondarypw") as other:
        other.login("demo")
        assert client.list_clients("demo") == {"demo": ["127.0.0.1"]}


def test_16_ranges_and_enums(upsd, client):
    """A range has two ends; an empty list is empty; afterwards the connection is in step."""
    upsd.fault("garbage", on="LIST RANGE", data=b'BEGIN LIST RANGE u v\nRANGE u v "1" "9"\nEND LIST RANGE u v\n')
    upsd.fault("garbage", on="LIST ENUM", data=b'BEGIN LIST ENUM u v\nENUM u v "a b"\nEND LIST ENUM u v\n')
    assert client.list_range("u", "v") == [("1", "9")]
    assert client.list_enum("u", "v") == ["a b"]
    assert client.get_var("demo", "ups.status") == "OL"


def test_17_bytes_that_are_not_utf8(upsd, client):
    """A Latin-1 byte costs no reading, and 0xff is a byte of the value, not telnet."""
    data = b'BEGIN LIST VAR demo\nVAR demo ups.mfr "\xc4\xff\xfe\xff"\nVAR demo a "OB LB"\nEND LIST VAR demo\n'
    upsd.fault("garbage", data=data)
    assert client.list_vars("demo") == {"ups.mfr": "\udcc4\udcff\udcfe\udcff", "a": "OB LB"}


def test_18_odd_names(upsd, client):
    """Names are quoted where needed; a newline can't become a second command; the connection stays in step."""
    upsd.replace("two#=", {"ups.status": "OL"})
    assert client.get_var("two#=", "ups.status") == "OL"
    assert client.get_var("DEMO", "ups.status") == "OL"
    for name in ("demo ", '"demo"', "", "ups 1", "a\\b", "VAR", "demo#", "a=b", "Akkü"):
        with pytest.raises(Refused, match="unknown ups"):
            client.list_vars(name)
    with pytest.raises(ConfigError):
        client.get_var("demo\nLIST UPS", "ups.status")
    assert "LIST UPS" not in upsd.asked
    assert client.get_var("demo", "ups.status") == "OL"


def test_19_a_password_of_several_words():
    """Blanks, quotes and backslashes in user and password arrive as they are."""
    with SimUpsd(users={'the "user"': User('a "b\\ c#=')}) as server:
        server.replace("demo", {})
        with CheckedClient(server.host, server.port, 'the "user"', 'a "b\\ c#=') as client:
            client.login("demo")
            assert server.numlogins("demo") == 1


def test_20_fsd_asks_for_primary_first(upsd):
    """A primary commands FSD; a secondary is refused; an old server is asked by its old word."""
    with CheckedClient(upsd.host, upsd.port, "secondary", "secondarypw") as client:
        assert not client.is_primary("demo")
        with pytest.raises(Refused, match="not a primary"):
            client.fsd("demo")
    assert upsd.variables("demo")["ups.status"] == "OL"
    with CheckedClient(upsd.host, upsd.port, "primary", "primarypw") as client:
        upsd.fault("garbage", on="PRIMARY", data=b"ERR UNKNOWN-COMMAND\n", times=1)
        assert client.is_primary("demo")
        assert upsd.asked[-1] == "MASTER demo"
        client.fsd("demo")
    assert upsd.variables("demo")["ups.status"] == "FSD OL"


def everything_shown(error: BaseException) -> str:
    """The traceback as the most talkative handler prints it: with the variables of every frame."""
    return "".join(traceback.TracebackException.from_exception(error, capture_locals=True).format())


@pytest.mark.parametrize("kind", ["silent", "drop", "garbage"])
def test_21_no_password_is_ever_shown(upsd, caplog, kind):
    """No log line and no traceback, its variables included, holds the password, whatever goes wrong with it."""
    password = "hunter2 secret"
    upsd.fault(kind, on="PASSWORD", data=b"what?\n")
    with caplog.at_level(logging.DEBUG), pytest.raises(NutError) as caught:
        connect(upsd)
    assert "hunter2" not in caplog.text
    own = caught.value.with_traceback(caught.value.__traceback__.tb_next.tb_next)  # ours, not this test's frames
    assert "hunter2" not in everything_shown(own), password
    with pytest.raises(ConfigError) as refused:
        CheckedClient(upsd.host, upsd.port, "u", "line\nbreak hunter2")
    assert "hunter2" not in str(refused.value)


def connect(upsd):
    """Its frame holds no password."""
    return CheckedClient(upsd.host, upsd.port, "secondary", "hunter2 secret", **QUICK)


# ---- further doubts -----------------------------------------------------------------------------------


@pytest.mark.parametrize("code", ["DATA-STALE", "DRIVER-NOT-CONNECTED", "UNKNOWN-UPS", "ACCESS-DENIED", "NEW-WORD"])
def test_errors_of_upsd_are_told_apart(upsd, client, code):
    """Stale and driver-gone are states of the UPS; anything else is a refusal; the connection stays."""
    upsd.fault("garbage", data=f"ERR {code}\r\n".encode(), times=1)
    with pytest.raises(Refused) as caught:
        client.list_vars("demo")
    states = {"DATA-STALE": Comm.STALE, "DRIVER-NOT-CONNECTED": Comm.DRIVER_GONE}
    assert (caught.value.code, caught.value.comm) == (code, states.get(code, Comm.REFUSED))
    assert client.protocol() == "1.3"


def test_more_answers_than_questions_are_a_doubt(upsd, client):
    """What is already there when a question is asked would be read as its answer: the connection ends instead."""
    upsd.fault("garbage", times=1, data=b'VAR demo ups.status "OL"\nVAR demo battery.charge "10"\n')
    assert client.get_var("demo", "ups.status") == "OL"
    with pytest.raises(Unreadable, match="more was answered than asked"):
        client.get_var("demo", "battery.charge")
    assert closed(upsd, client)


def test_an_answer_out_of_the_blue_is_a_doubt(upsd, client):
    """A second answer that comes after the first was read is noticed before the next question."""
    assert client.protocol() == "1.3"
    (connection,) = upsd._sockets.values()
    connection.sendall(b"1.4\n")
    peek = client._x._link._socket
    peek.settimeout(5)
    peek.recv(1, socket.MSG_PEEK)  # it has arrived
    with pytest.raises(Unreadable, match="more was answered than asked"):
        client.protocol()


@pytest.mark.parametrize(
    "data",
    [
        b"BEGIN LIST VAR demo\nVAR demo a \"1\"\nVAR demo a \"2\"\nEND LIST VAR demo\n",
        b"BEGIN LIST VAR demo\nVAR demo a \"1\"\nERR DATA-STALE\nEND LIST VAR demo\n",
        b"BEGIN LIST VAR demo\nVAR demo a \"1\"\nEND LIST VAR other\n",
        b"BEGIN LIST VAR demo\nVAR demo a \"1\"\nEND LIST VAR demo more\n",
        b"BEGIN LIST VAR demo more\nEND LIST VAR demo\n",
        b"BEGIN LIST VAR other\nEND LIST VAR other\n",
        b"BEGIN LIST RW demo\nEND LIST RW demo\n",
        b"BEGIN LIST VAR demo\nVAR demo a\nEND LIST VAR demo\n",
        b'BEGIN LIST VAR demo\nVAR demo a "END LIST VAR demo\nEND LIST VAR demo\n',
        b"VAR demo a \"1\"\nEND LIST VAR demo\n",
    ],
)  # fmt: skip
def test_lists_that_make_no_sense(upsd, client, data):
    """Two values of one name, foreign lines, foreign or crooked begin and end: a doubt each."""
    upsd.fault("garbage", data=data)
    with pytest.raises(Unreadable):
        client.list_vars("demo")
    assert closed(upsd, client)


def test_a_value_may_look_like_the_end_of_the_list(upsd, client):
    """`END LIST VAR demo` inside quotes is a value."""
    upsd.replace("demo", {"a": "END LIST VAR demo", "ups.status": "OL"})
    assert client.list_vars("demo") == {"a": "END LIST VAR demo", "ups.status": "OL"}


@pytest.mark.parametrize("count", [b"-1", b"one", b"1.5", "²".encode(), b'""'])
def test_numlogins_is_a_number(upsd, client, count):
    """Anything but digits is a doubt."""
    upsd.fault("garbage", data=b"NUMLOGINS demo " + count + b"\n")
    with pytest.raises(Unreadable):
        client.num_logins("demo")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"x" * 10_000, "a line of over 8192 bytes"),
        (b'VAR demo ups.status "' + b"x" * 2_000_000 + b'"\n', "a line of over 8192 bytes"),
        (b"BEGIN LIST VAR demo\n" + b"\n" * 2_000_000, "was answered"),
    ],
)
def test_memory_is_bounded(upsd, client, data, why):
    """A line without an end, a huge line and a flood are cut off, not collected."""
    upsd.fault("garbage", data=data)
    with pytest.raises(Unreadable, match=why):
        client.list_vars("demo")


def test_a_list_has_a_limit(upsd, client):
    """A list that never ends is a doubt."""
    lines = b"".join(b'VAR demo v%d "1"\n' % each for each in range(5000))
    upsd.fault("garbage", data=b"BEGIN LIST VAR demo\n" + lines)
    with pytest.raises(Unreadable, match="over 4096 lines"):
        client.list_vars("demo")


def test_an_answer_has_a_limit(upsd, client):
    """So has an answer's size."""
    line = b'VAR demo v "' + b"x" * 2000 + b'"\n'
    upsd.fault("garbage", data=b"BEGIN LIST VAR demo\n" + line * 1000)
    with pytest.raises(Unreadable, match="over 1048576 bytes"):
        client.list_vars("demo")


def test_ipv6():
    """A literal IPv6 address is connected to."""
    with SimUpsd(host="::1") as server:
        server.replace("demo", HEALTHY)
        with CheckedClient("::1", server.port) as client:
            assert client.get_var("demo", "ups.status") == "OL"


def test_localhost_is_tried_at_all_its_addresses(upsd):
    """`localhost` may be ::1 first where upsd listens on 127.0.0.1 only."""
    with CheckedClient("localhost", upsd.port) as client:
        assert client.protocol() == "1.3"


def test_a_name_that_does_not_resolve():
    """An unknown host is Unreadable and says so, in time."""
    with pytest.raises(Unreadable, match="can't find the address of no-such-host"):
        CheckedClient("no-such-host.invalid", 3493, connect_s=0.5, exchange_s=0.1)


def test_a_list_does_not_wait_for_nagle(upsd, client):
    """Many lists in a row take far less than the 40 ms each that delayed acknowledgements would cost."""
    client.list_vars("demo")
    began = time.monotonic()
    for _ in range(20):
        client.list_vars("demo")
    assert (time.monotonic() - began) / 20 < 0.02


def test_without_pynut2_the_missing_extra_is_named():
    """Importing the reader where pynut2 isn't installed says what to install, even with warnings as errors."""
    program = (
        "import sys\n"
        "if len(sys.argv) > 1: sys.modules['pynut2'] = None\n"
        "from powerguard.errors import MissingDependency\n"
        "try:\n    import powerguard.node.ups\nexcept MissingDependency as error:\n    print(error)\n"
    )
    command = [sys.executable, "-W", "error", "-c", program]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == ""
    without = subprocess.run([*command, "without"], capture_output=True, text=True, check=True)
    assert "pip install 'powerguard[node]'" in without.stdout

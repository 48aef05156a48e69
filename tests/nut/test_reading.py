"""Against a real upsd and real drivers: what is read, how fast, and through every failure of theirs."""

from __future__ import annotations

import signal
import statistics
import time

import pytest
from pynut2.nut2 import PyNUTClient

from powerguard.core.types import Comm
from powerguard.errors import UpsNotReady, UpsRefused, UpsUnknown
from powerguard.node.ups_client import CheckedClient
from powerguard.node.ups_exchange import Refused, Unreadable
from powerguard.node.ups_line import UpsAddress
from powerguard.node.ups_probe import discover, probe
from powerguard.sim.nut import RealNut

NAMES = {name: f"powerguard {name}" for name in ("demo", "other", "odd", "story")}

USER = {"user": "secondary", "password": "secondarypw"}


def address(nut: RealNut, ups: str = "demo") -> UpsAddress:
    """Of a UPS of the shared server."""
    return UpsAddress.parse(nut.address(ups))


def logins(nut: RealNut, ups: str = "demo") -> str:
    """What upsd itself counts."""
    return nut.ask(f"GET NUMLOGINS {ups}")


def test_values_are_those_of_plain_pynut2(nut):
    """On the happy path ours and pynut2's own reading agree, variable by variable."""
    plain = PyNUTClient(nut.host, nut.port)
    with CheckedClient(nut.host, nut.port) as client:
        ours = client.list_vars("demo")
        assert ours == plain.list_vars("demo")
        assert ours["battery.runtime"] == "1200"
        assert client.get_var("demo", "ups.status") == plain.get_var("demo", "ups.status") == "OL"
        assert client.list_ups() == plain.list_ups() == NAMES
        assert client.num_logins("demo") == plain.num_logins("demo") == 0
        assert client.list_commands("demo") == plain.list_commands("demo")
        assert client.var_type("demo", "ups.status") == plain.var_type("demo", "ups.status")
        assert client.ver().startswith("Network UPS Tools upsd")


def test_a_change_is_seen_within_two_seconds(nut, listen):
    """The mains fail in the driver; the reader says so within the driver's poll and its own."""
    listener = listen()
    listener.comm(Comm.OK)
    for status in ("OB DISCHRG", "OB DISCHRG LB", "OL CHRG", "OL"):
        nut.set("demo", {"ups.status": status})
        began = time.monotonic()
        listener.until(lambda sample, status=status: sample.variables.get("ups.status") == status)
        assert time.monotonic() - began < 3.0


def test_a_sequence_is_played(listen):
    """The text of a `.seq` file runs by its timers: on line and on battery in turn."""
    listener = listen("story")
    for status in ("OL", "OB DISCHRG", "OL"):
        listener.until(lambda sample, status=status: sample.variables.get("ups.status") == status)


def test_odd_values(nut):
    r"""Escapes of the real upsd are read (`A\"BC`), where plain pynut2 stops at the quote."""
    with CheckedClient(nut.host, nut.port) as client:
        assert client.get_var("odd", "ups.mfr") == client.list_vars("odd")["ups.mfr"] == 'A"BC'
        assert client.get_var("odd", "device.description") == r"he said hi and \ back"
    assert PyNUTClient(nut.host, nut.port).get_var("odd", "ups.mfr") == "A\\"


def test_a_value_of_several_words_is_set_whole(nut, eventually):
    """SET VAR stores all words (plain pynut2 stores the first)."""
    nut.stop("other")  # a dummy-ups 2.8.0 that outlived an upsd aborts at SET
    nut.start_driver("other")
    nut.wait_ready("other")
    with CheckedClient(nut.host, nut.port, "admin", "adminpw") as client:
        client.set_var("other", "ups.mfr", "two words = x")
        eventually(lambda: client.get_var("other", "ups.mfr") == "two words = x")
        client.set_var("other", "ups.mfr", "Acme")
        eventually(lambda: client.get_var("other", "ups.mfr") == "Acme")


def test_a_list_takes_no_nagle_stall(nut):
    """LIST VAR in a row: far below the 40 ms that plain pynut2 pays for each (44 ms here, ours 0.1 ms)."""

    def median_ms(client, count: int) -> float:
        took = []
        for _ in range(count):
            began = time.perf_counter()
            client.list_vars("demo")
            took.append((time.perf_counter() - began) * 1000)
        return statistics.median(took)

    with CheckedClient(nut.host, nut.port) as client:
        ours = median_ms(client, 50)
    plain = median_ms(PyNUTClient(nut.host, nut.port), 10)
    print(f"LIST VAR: ours {ours:.2f} ms, plain pynut2 {plain:.2f} ms")
    assert ours < 10


def test_login_is_held_and_given_up(nut, listen, eventually):
    """NUMLOGINS is what we hold: one a reader, none after a clean stop."""
    first, second = listen(**USER), listen(**USER)
    eventually(lambda: logins(nut) == "NUMLOGINS demo 2")
    eventually(lambda: first.reader.login_held and second.reader.login_held)
    first.reader.close()
    eventually(lambda: logins(nut) == "NUMLOGINS demo 1")
    second.reader.close()
    eventually(lambda: logins(nut) == "NUMLOGINS demo 0")


def test_a_wrong_password(nut, listen):
    """upsd tells at LOGIN only; the readings come all the same; the probe says what to do."""
    listener = listen(user="secondary", password="wrong")
    sample = listener.comm(Comm.OK)
    assert "access denied" in sample.detail
    assert logins(nut) == "NUMLOGINS demo 0"
    with pytest.raises(UpsRefused, match=r"upsd\.users"):
        probe(address(nut), user="secondary", password="wrong")


def test_a_wrong_name(nut, listen):
    """REFUSED for the reader; the probe lists the names that there are."""
    assert "unknown ups" in listen("nosuch").comm(Comm.REFUSED).detail
    with pytest.raises(UpsUnknown, match="it has demo, other, odd, story"):
        probe(address(nut, "nosuch"))


def test_the_probe_of_a_healthy_ups(nut):
    """Roles, logins and values as upsd gives them."""
    seen = probe(address(nut), **USER)
    assert (seen.logged_in, seen.primary, seen.numlogins, seen.clients) == (True, False, 1, ("127.0.0.1",))
    assert probe(address(nut), user="primary", password="primarypw").primary
    assert discover(nut.host, nut.port) == NAMES


def test_odd_names_stay_in_step(nut):
    """Names that pynut2 stumbles over are refused, and the next question gets its own answer."""
    with CheckedClient(nut.host, nut.port) as client:
        for name in ("demo ", '"demo"', "de mo", "Akkü", "", "a=b", "demo#", "a\\b"):
            with pytest.raises(Refused):
                client.list_vars(name)
            assert client.get_var("DEMO", "ups.status") == "OL"


def test_a_driver_that_is_killed(nut, listen, eventually):
    """Driver gone, LOGIN held; then WAIT, never taken for data; then data."""
    listener = listen("other", **USER)
    eventually(lambda: logins(nut, "other") == "NUMLOGINS other 1")
    nut.stop("other", signal.SIGKILL)
    assert "driver not connected" in listener.comm(Comm.DRIVER_GONE).detail
    with pytest.raises(UpsNotReady, match="start the driver"):
        probe(address(nut, "other"), **USER)
    assert nut.ask("LIST CLIENT other") == "BEGIN LIST CLIENT other"
    assert listener.reader.login_held
    nut.start_driver("other")
    seen = listener.until(lambda sample: sample.comm is Comm.OK)
    assert {sample.comm for sample in seen[:-1]} <= {Comm.DRIVER_GONE, Comm.WAIT}
    assert seen[-1].variables["ups.status"] == "OL"
    assert logins(nut, "other") == "NUMLOGINS other 1"


def test_a_driver_that_hangs(nut, listen):
    """STALE within MAXAGE and a bit, fresh at once when it goes on."""
    listener = listen("other")
    listener.comm(Comm.OK)
    nut.send("other", signal.SIGSTOP)
    try:
        assert "data stale" in listener.comm(Comm.STALE).detail
    finally:
        nut.send("other", signal.SIGCONT)
    assert listener.comm(Comm.OK).variables["ups.status"] == "OL"


def test_an_upsd_that_is_killed_and_restarted(nut, listen, eventually):
    """Unreachable at once; connected and logged in anew within the retry bound."""
    listener = listen(**USER)
    eventually(lambda: logins(nut) == "NUMLOGINS demo 1")
    nut.stop("upsd", signal.SIGKILL)
    listener.comm(Comm.UNREACHABLE)
    assert not listener.reader.login_held
    nut.start_upsd()
    assert listener.comm(Comm.OK).variables["ups.status"] == "OL"
    eventually(lambda: logins(nut) == "NUMLOGINS demo 1")
    eventually(lambda: listener.reader.login_held)


def test_an_upsd_that_hangs(nut, listen, eventually):
    """A stopped upsd accepts and never answers: unreachable in time, every time, and fine when it goes on."""
    listener = listen(**USER)
    listener.comm(Comm.OK)
    nut.send("upsd", signal.SIGSTOP)
    try:
        for _ in range(2):
            assert listener.comm(Comm.UNREACHABLE).took_s < 1.5
        with pytest.raises(Unreadable, match="no answer in time"):
            CheckedClient(nut.host, nut.port, "secondary", "secondarypw", answer_s=0.2)
    finally:
        nut.send("upsd", signal.SIGCONT)
    listener.comm(Comm.OK)
    eventually(lambda: logins(nut) == "NUMLOGINS demo 1")


def test_wait_at_the_start_and_ipv6():
    """From the very first moment: driver gone or WAIT, and values only when they are the driver's. All that on ::1."""
    with RealNut({"demo": {"ups.status": "OB", "battery.charge": "42"}}, host="::1", ready=False) as nut:
        client = CheckedClient(nut.host, nut.port)
        seen: list[str] = []
        ends = time.monotonic() + 10
        while time.monotonic() < ends and "42" not in seen:
            try:
                seen.append(client.list_vars("demo").get("battery.charge", "none"))
            except Refused as error:
                seen.append(error.comm.value)
            time.sleep(0.02)
        client.close()
        assert set(seen) <= {"none", "driver-gone", "42"}
        assert seen[-1] == "42"
        assert "none" in seen
        assert nut.address("demo").startswith("demo@[::1]:")
        assert probe(UpsAddress.parse(nut.address("demo")), **USER).clients == ("::1",)

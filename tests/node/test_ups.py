"""The reader thread: a sample a poll whatever happens, LOGIN held, and back again after every fault."""

from __future__ import annotations

import queue
import socket
import threading
import time

import pytest
from msgspec import json

from powerguard.core.types import Comm, Sample
from powerguard.node.ups import RETRY_MOST_S, WHOLE_S, UpsReader
from powerguard.node.ups_line import UpsAddress
from powerguard.sim.upsd import HEALTHY, SimUpsd

USER = {"user": "secondary", "password": "secondarypw"}


class Readers:
    """Starts readers with short deadlines, collects their samples, and ends them."""

    def __init__(self, upsd: SimUpsd) -> None:
        self.upsd = upsd
        self.samples: queue.SimpleQueue[Sample] = queue.SimpleQueue()
        self.started: list[UpsReader] = []

    def start(self, ups: str = "demo", **options) -> UpsReader:
        options = {"poll_s": 0.05, "answer_s": 0.2, "poll_max_s": 0.4, **options}
        put = options.pop("put", self.samples.put)
        clock = options.pop("clock", lambda: 1000.0)
        reader = UpsReader(UpsAddress.parse(self.upsd.address(ups)), put, clock, **options)
        self.started.append(reader)
        reader.start()
        return reader

    def next(self, comm: Comm | None = None, within_s: float = 10.0) -> Sample:
        """The next sample (in the state *comm*)."""
        ends = time.monotonic() + within_s
        while True:
            sample = self.samples.get(timeout=max(0.01, ends - time.monotonic()))
            if comm is None or sample.comm is comm:
                return sample

    def skip(self) -> None:
        """Forgets the samples that are there."""
        while not self.samples.empty():
            self.samples.get()


@pytest.fixture
def readers(upsd):
    """Readers of the simulated server."""
    made = Readers(upsd)
    yield made
    for reader in made.started:
        assert reader.close()


def test_a_sample_is_what_the_ups_says(readers):
    """Name, instant, state and variables of a healthy UPS."""
    readers.start(clock=lambda: 1234.5)
    sample = readers.next()
    assert (sample.feed, sample.at, sample.comm, sample.detail) == (readers.upsd.address("demo"), 1234.5, Comm.OK, "")
    assert sample.variables == dict(HEALTHY)
    assert 0 < sample.took_s < 0.4


def test_a_poll_is_one_question(readers):
    """LOGIN once, and then LIST VAR and nothing else, poll after poll, on one connection."""
    readers.start(**USER)
    for _ in range(5):
        readers.next()
    expected = ["LIST VAR demo", "USERNAME secondary", "PASSWORD ***", "LOGIN demo", "LIST VAR demo"]
    assert list(readers.upsd.asked)[:5] == expected
    assert set(list(readers.upsd.asked)[5:]) == {"LIST VAR demo"}
    assert readers.upsd.connections == 1


@pytest.mark.parametrize("comm", [Comm.STALE, Comm.DRIVER_GONE, Comm.WAIT])
def test_states_of_the_ups(readers, comm):
    """Stale, driver gone and WAIT are states, not lost connections: LOGIN is held through them."""
    reader = readers.start(**USER)
    readers.next()
    readers.upsd.fault(comm.value)
    sample = readers.next(comm)
    assert sample.variables == ({"ups.status": "WAIT"} if comm is Comm.WAIT else {})
    assert reader.login_held
    readers.upsd.clear()
    assert readers.next(Comm.OK).variables == dict(HEALTHY)
    assert readers.upsd.connections == 1


@pytest.mark.parametrize("kind", ["stale", "driver-gone"])
def test_login_needs_no_data(readers, kind, eventually):
    """A UPS that is stale from the start is logged in to all the same."""
    readers.upsd.fault(kind)
    reader = readers.start(**USER)
    eventually(lambda: reader.login_held)
    assert readers.upsd.numlogins("demo") == 1


def test_wait_with_other_tokens_is_not_wait(readers):
    """Only WAIT alone means "no data yet"."""
    readers.upsd.set("demo", {"ups.status": "OB WAIT LB"})
    readers.start()
    assert readers.next().comm is Comm.OK


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["silent", "half-open", "cut", "reset", "drop", "garbage", "wrong", "late", "drip"])
def test_every_fault_is_unreachable_and_passes(readers, kind):
    """While a fault lasts: UNREACHABLE samples, each in time; afterwards the truth and the LOGIN return."""
    reader = readers.start(**USER)
    readers.next(Comm.OK)
    readers.upsd.set("demo", {"ups.status": "OB LB"})
    readers.skip()
    readers.upsd.fault(kind, after=20, seconds=0.5, data=b"what?\n" if kind == "garbage" else b"")
    sample = readers.next(Comm.UNREACHABLE)
    assert sample.variables == {}
    assert sample.detail
    assert sample.took_s < 2.0
    assert readers.next().comm is Comm.UNREACHABLE
    readers.upsd.clear()
    assert readers.next(Comm.OK).variables["ups.status"] == "OB LB"
    assert readers.upsd.wait_for(lambda server: server.numlogins("demo") == 1)
    assert reader.login_held


def calm_reader(readers, **options) -> UpsReader:
    """A reader in calm, its first list told and its first question for the status alone asked."""
    reader = readers.start(**USER, **options)
    readers.next()
    reader.set_poll(0.05, calm=True)
    assert readers.upsd.wait_for(lambda server: "GET VAR demo ups.status" in server.asked)
    readers.skip()
    return reader


def test_in_calm_only_the_status_is_asked_for(readers):
    """The same quiet status is told by nobody; the next list, and sample, is due by its age."""
    calm_reader(readers)
    asked = len(readers.upsd.asked)
    assert readers.upsd.wait_for(lambda server: len(server.asked) >= asked + 10)
    assert set(list(readers.upsd.asked)[asked : asked + 10]) == {"GET VAR demo ups.status"}
    assert readers.next(within_s=WHOLE_S + 10.0).variables == dict(HEALTHY)
    assert readers.upsd.connections == 1


def test_a_new_status_is_told_at_once_and_whole(readers):
    """In calm too: everything is asked for as soon as the status isn't what it was, and at each poll from then on."""
    calm_reader(readers)
    readers.upsd.set("demo", {"ups.status": "OB DISCHRG", "battery.charge": "91"})
    for _ in range(3):
        sample = readers.next(within_s=WHOLE_S / 2)
        assert (sample.variables["ups.status"], sample.variables["battery.charge"]) == ("OB DISCHRG", "91")


@pytest.mark.parametrize("status", ["OL RB", "OL ALARM", "OL LB", "FSD OL", "OL OFF", "OL BYPASS", "OL CAL", ""])
def test_a_status_that_has_something_to_say_is_never_quiet(readers, status):
    """Whoever says more than "on line" is asked for everything, each time."""
    readers.upsd.set("demo", {"ups.status": status})
    reader = readers.start(**USER)
    readers.next()
    reader.set_poll(0.05, calm=True)
    for _ in range(3):
        assert readers.next(within_s=WHOLE_S / 2).variables["ups.status"] == status
    assert "GET VAR demo ups.status" not in readers.upsd.asked


@pytest.mark.parametrize("kind", ["wait", "stale", "driver-gone", "silent", "cut", "garbage", "wrong", "refuse"])
def test_in_calm_a_fault_is_told_at_once(readers, kind):
    """No UPS hides behind a status of before: not a stale one, nor one whose server went or talks nonsense."""
    calm_reader(readers)
    readers.upsd.fault(kind, data=b"what?\n" if kind == "garbage" else b"")
    assert readers.next(within_s=WHOLE_S / 2).comm is not Comm.OK


def test_in_calm_a_restarted_upsd_gets_its_login_again(readers):
    """The connection that is gone is made anew at once, with its LOGIN."""
    calm_reader(readers)
    readers.upsd.restart()
    assert readers.next(Comm.OK).variables == dict(HEALTHY)  # a poll may fall between its end and its start
    assert readers.upsd.wait_for(lambda server: server.numlogins("demo") == 1)


def test_a_restarted_upsd_costs_no_sample(readers):
    """upsd restarted between two polls: the next poll connects anew, logs in anew, and is OK."""
    reader = readers.start(poll_s=60, **USER)
    assert readers.next().comm is Comm.OK
    assert readers.upsd.wait_for(lambda server: server.numlogins("demo") == 1)
    readers.upsd.restart()
    assert readers.upsd.numlogins("demo") == 0
    reader.set_poll(0.05)
    assert readers.next().comm is Comm.OK
    assert readers.upsd.wait_for(lambda server: server.numlogins("demo") == 1)
    assert readers.upsd.connections == 2


def test_silence_is_waited_for_once(readers):
    """A connection that falls silent costs one wait, not a second one on a new connection within the same poll."""
    made_by: dict[Comm, int] = {}

    def put(sample: Sample) -> None:  # on the reader's thread: no further poll has begun
        made_by.setdefault(sample.comm, readers.upsd.connections)
        readers.samples.put(sample)

    readers.start(put=put)
    readers.next(Comm.OK)
    readers.upsd.fault("silent")
    readers.next(Comm.UNREACHABLE)
    assert made_by == {Comm.OK: 1, Comm.UNREACHABLE: 1}


def test_refused_connections_are_retried_for_ever_with_a_bounded_wait(readers):
    """Nobody listens: the reader says so, waits longer each time but never over 5 s, and comes back."""
    readers.upsd.fault("refuse")
    readers.start()
    assert "refused" in readers.next(Comm.UNREACHABLE).detail
    by_hand, waits = UpsReader(UpsAddress.parse(readers.upsd.address("demo")), print, time.monotonic), []
    for _ in range(7):
        assert by_hand._poll(time.monotonic()).comm is Comm.UNREACHABLE
        waits.append(by_hand._retry_s)
    assert waits == [0.5, 1.0, 2.0, 4.0, RETRY_MOST_S, RETRY_MOST_S, RETRY_MOST_S]
    readers.upsd.clear()
    assert readers.next(Comm.OK)


@pytest.mark.slow
def test_a_long_poll_period_does_not_slow_the_retries(readers):
    """With a poll a minute, a lost connection is still tried again within a second at first."""
    readers.upsd.fault("refuse")
    readers.start(poll_s=60)
    readers.next(Comm.UNREACHABLE)
    readers.upsd.clear()
    assert readers.next(Comm.OK, within_s=3.0)


def test_an_unknown_name_is_refused(readers):
    """A UPS that the server doesn't have is REFUSED, and found when it appears."""
    readers.start("nosuch", **USER)
    sample = readers.next()
    assert (sample.comm, sample.variables) == (Comm.REFUSED, {})
    assert "unknown ups" in sample.detail
    readers.upsd.replace("nosuch", HEALTHY)
    assert readers.next(Comm.OK)


def test_a_wrong_password_costs_no_reading(readers):
    """Without LOGIN the values are as good: they keep coming, and the sample says that the login is missing."""
    reader = readers.start(user="secondary", password="wrong")
    sample = readers.next()
    assert (sample.comm, sample.variables) == (Comm.OK, dict(HEALTHY))
    assert "not logged in: access denied" in sample.detail
    assert not reader.login_held
    assert reader.login_problem == sample.detail
    assert readers.upsd.numlogins("demo") == 0
    for _ in range(3):
        readers.next(Comm.OK)
    assert list(readers.upsd.asked).count("LOGIN demo") == 1  # not again at every poll


@pytest.mark.slow
def test_a_login_that_is_not_answered_costs_no_reading(readers):
    """LOGIN meets silence: the values that were read before count, and the connection is made anew."""
    readers.upsd.fault("silent", on="LOGIN")
    reader = readers.start(**USER)
    for _ in range(2):
        sample = readers.next()
        assert (sample.comm, sample.variables) == (Comm.OK, dict(HEALTHY))
        assert "not logged in: no answer in time" in sample.detail
    readers.upsd.clear()
    assert readers.upsd.wait_for(lambda server: server.numlogins("demo") == 1)
    assert reader.is_alive()


def test_a_password_that_cannot_be_sent(readers):
    """A line break in the password is told, and costs no reading either."""
    readers.start(user="u", password="a\nb")
    sample = readers.next()
    assert (sample.comm, sample.variables) == (Comm.OK, dict(HEALTHY))
    assert "control characters" in sample.detail


def test_set_poll_takes_effect_at_once(readers):
    """A shorter period counts from the last poll, not from the end of the old wait."""
    reader = readers.start(poll_s=3600)
    readers.next()
    began = time.monotonic()
    reader.set_poll(0.05)
    assert reader.poll_s == 0.05
    readers.next()
    readers.next()
    assert time.monotonic() - began < 2.0


def test_bytes_that_are_not_utf8_can_be_journalled(readers):
    """A value with odd bytes comes as text that JSON can hold, and costs no reading."""
    data = b'BEGIN LIST VAR demo\nVAR demo ups.mfr "\xc4\xff"\nVAR demo ups.status "OL"\nEND LIST VAR demo\n'
    readers.upsd.fault("garbage", data=data)
    readers.start()
    sample = readers.next()
    assert sample.variables == {"ups.mfr": r"\xc4\xff", "ups.status": "OL"}
    assert json.decode(json.encode(sample), type=Sample) == sample


def test_a_clean_stop_says_goodbye(readers):
    """close() sends LOGOUT on the same connection, and the thread ends."""
    reader = readers.start(**USER)
    readers.next()
    readers.next()
    assert reader.close()
    assert not reader.is_alive()
    assert not reader.login_held
    assert readers.upsd.asked[-1] == "LOGOUT"
    assert readers.upsd.numlogins("demo") == 0


def test_a_stop_without_goodbye_holds_the_login(readers):
    """close(logout=False) ends the polls and leaves the LOGIN to the life of the process."""
    reader = readers.start(**USER)
    readers.next()
    readers.next()
    assert reader.close(logout=False)
    assert not reader.is_alive()
    assert reader.login_held
    assert readers.upsd.numlogins("demo") == 1
    assert "LOGOUT" not in readers.upsd.asked
    assert reader.close()
    assert readers.upsd.wait_for(lambda server: server.numlogins("demo") == 0)


def test_close_is_bounded_while_the_server_is_silent(readers):
    """A reader in the middle of a hopeless poll ends within its deadlines."""
    readers.upsd.fault("half-open")
    reader = readers.start(**USER)
    began = time.monotonic()
    assert reader.close()
    assert time.monotonic() - began < 3.0


def test_close_before_start():
    """A reader that never ran can be closed."""
    reader = UpsReader(UpsAddress("demo"), print, time.monotonic)
    assert reader.close()


def test_one_reader_is_one_login(readers):
    """Two readers of one UPS are two connections with a LOGIN each."""
    for _ in range(2):
        readers.start(**USER)
    assert readers.upsd.wait_for(lambda server: server.numlogins("demo") == 2)


def test_a_consumer_that_raises_does_not_end_the_thread(readers, eventually):
    """put() fails: the reader goes on and remembers why."""
    seen: list[Sample] = []

    def put(sample: Sample) -> None:
        seen.append(sample)
        raise RuntimeError("full")

    reader = readers.start(put=put)
    eventually(lambda: len(seen) > 3)
    assert "RuntimeError: full" in reader.fault
    assert reader.trouble() == ""


def test_our_own_mistake_is_a_sample_too(readers):
    """An unexpected exception within a poll is UNREACHABLE with its name, and the next poll is tried."""
    reader = readers.start()
    readers.next(Comm.OK)
    reader.address = None
    assert "fault of the reader: AttributeError" in readers.next(Comm.UNREACHABLE).detail
    reader.address = UpsAddress.parse(readers.upsd.address("demo"))
    assert readers.next(Comm.OK)


def test_a_dead_thread_is_noticed(readers):
    """trouble() names a reader that never started or has ended."""
    address = UpsAddress.parse(readers.upsd.address("demo"))
    reader = UpsReader(address, readers.samples.put, time.monotonic)
    assert "is not running" in reader.trouble()
    reader.start()
    readers.next()
    assert reader.trouble() == ""
    reader.close()
    assert "is not running" in reader.trouble()


def test_a_stuck_thread_is_noticed(readers, eventually):
    """trouble() names a reader whose consumer blocks it."""
    release = threading.Event()
    reader = readers.start(put=lambda _: release.wait(30), poll_max_s=0.05)
    eventually(reader.trouble)
    assert "s late" in reader.trouble()
    release.set()
    eventually(lambda: not reader.trouble())


def test_a_name_server_that_is_down_costs_no_reading(upsd, readers, monkeypatch):
    """After a first good answer the address is remembered: name servers lose power too."""
    real = socket.getaddrinfo
    down = threading.Event()

    def lookup(host, port, *args, **kwargs):
        if host != "ups.test" or kwargs.get("flags"):
            return real(host, port, *args, **kwargs)
        if down.is_set():
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return real("127.0.0.1", port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    reader = UpsReader(UpsAddress("demo", "ups.test", upsd.port), readers.samples.put, time.monotonic, poll_s=0.05)
    readers.started.append(reader)
    reader.start()
    assert readers.next(Comm.OK)
    down.set()
    upsd.drop()
    assert upsd.wait_for(lambda server: server.connections >= 2)
    readers.skip()
    assert readers.next().comm is Comm.OK


@pytest.mark.slow
def test_a_name_server_that_hangs_is_bounded(upsd, readers, monkeypatch):
    """A lookup that never returns costs the poll its bound, and only one lookup is under way at a time."""
    real = socket.getaddrinfo
    release, lookups = threading.Event(), []

    def lookup(host, port, *args, **kwargs):
        if host != "hung.test" or kwargs.get("flags"):
            return real(host, port, *args, **kwargs)
        lookups.append(host)
        release.wait(30)
        return real("127.0.0.1", port, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    address = UpsAddress("demo", "hung.test", upsd.port)
    reader = UpsReader(address, readers.samples.put, time.monotonic, poll_s=0.05, poll_max_s=0.2)
    readers.started.append(reader)
    reader.start()
    sample = readers.next(Comm.UNREACHABLE)
    assert "can't find the address of hung.test" in sample.detail
    assert sample.took_s < 1.0
    readers.next(Comm.UNREACHABLE)
    assert lookups == ["hung.test"]
    release.set()
    assert readers.next(Comm.OK)

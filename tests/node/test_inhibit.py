"""logind's delay lock on a private bus: taken, released, taken anew, and its loss noticed."""

from __future__ import annotations

import contextlib
import os
import queue
import select
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest

from powerguard.node.inhibit import Inhibitor, Shutdown, too_short

pytestmark = pytest.mark.skipif(not shutil.which("dbus-daemon"), reason="no dbus-daemon here")

BUS_CONFIG = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><type>system</type><listen>unix:path={path}</listen><auth>EXTERNAL</auth>
<policy context="default"><allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/>
<allow own="*"/></policy>
</busconfig>"""

WAIT_S = 20.0


class FakeLogind:
    """org.freedesktop.login1 as far as delay locks go: each is a pipe whose other end shows whether it is held."""

    def __init__(self, *, preparing: bool = False, delay_s: float = 5.0) -> None:
        self.preparing, self.delay_s, self.forgets = preparing, delay_s, False
        self.refuses = self.mute = False
        self.locks: list[int] = []
        self.taken = self.asked = 0
        self._open()

    def _open(self) -> None:
        from jeepney import DBusAddress
        from jeepney.io.blocking import open_dbus_connection
        from jeepney.wrappers import new_method_call

        self._bus = open_dbus_connection("SYSTEM", enable_fds=True)
        own = DBusAddress("/org/freedesktop/DBus", "org.freedesktop.DBus", "org.freedesktop.DBus")
        self._bus.send_and_get_reply(
            new_method_call(own, "RequestName", "su", ("org.freedesktop.login1", 0)), timeout=5
        )
        self._stop, self._stopped = os.pipe()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """As if it had crashed: its locks are forgotten with it."""
        os.close(self._stopped)
        self._thread.join(5)
        os.close(self._stop)
        self._bus.close()
        for lock in self.locks:
            os.close(lock)
        self.locks.clear()

    def restart(self) -> None:
        self.close()
        self._open()

    def held(self) -> int:
        """Locks whose other end is open."""
        poll = select.poll()
        for lock in self.locks:
            poll.register(lock, select.POLLHUP)
        return len(self.locks) - len(poll.poll(0))

    def say(self, begins: bool) -> None:
        """PrepareForShutdown, as the property will say too."""
        from jeepney import DBusAddress, new_signal

        self.preparing = begins
        emitter = DBusAddress("/org/freedesktop/login1", interface="org.freedesktop.login1.Manager")
        self._bus.send(new_signal(emitter, "PrepareForShutdown", "b", (begins,)))

    def _serve(self) -> None:
        from jeepney import HeaderFields, MessageType

        while True:
            with contextlib.suppress(TimeoutError, OSError):
                message = self._bus.receive(timeout=0)
                if message.header.message_type is MessageType.method_call and not self.mute:
                    self._answer(message, message.header.fields[HeaderFields.member])
                continue
            if self._stop in select.select([self._bus.sock, self._stop], [], [])[0]:
                return

    def _answer(self, message, name: str) -> None:
        from jeepney import new_error, new_method_return

        self.asked += 1
        if name == "Get":
            value = self.preparing if message.body[1] == "PreparingForShutdown" else int(self.delay_s * 1e6)
            kind = "b" if message.body[1] == "PreparingForShutdown" else "t"
            self._bus.send(new_method_return(message, "v", ((kind, value),)))
        elif name == "ListInhibitors":
            known = [] if self.forgets or not self.held() else [os.getpid()]
            rows = [("sleep:shutdown", "powerguard", "why", "delay", 0, pid) for pid in known]
            self._bus.send(new_method_return(message, "a(ssssuu)", (rows,)))
        elif self.refuses or self.preparing:
            self._bus.send(new_error(message, "org.freedesktop.login1.OperationInProgress", "s", ("not now",)))
        else:
            assert ("shutdown", "powerguard", "delay") == (message.body[0], message.body[1], message.body[3])
            ours, theirs = os.pipe()
            self.locks.append(ours)
            self.taken += 1
            self.forgets = False
            self._bus.send(new_method_return(message, "h", (theirs,)))
            os.close(theirs)


@pytest.fixture
def bus(tmp_path, monkeypatch) -> Iterator[None]:
    """A private D-Bus daemon in the place of the system's."""
    path = tmp_path / "bus"
    (tmp_path / "bus.conf").write_text(BUS_CONFIG.format(path=path))
    daemon = subprocess.Popen(
        ["dbus-daemon", f"--config-file={tmp_path / 'bus.conf'}", "--nofork", "--print-address=1"],
        stdout=subprocess.PIPE,
    )
    assert daemon.stdout is not None
    daemon.stdout.readline()
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={path}")
    yield
    daemon.terminate()
    daemon.wait(10)
    daemon.stdout.close()


@pytest.fixture
def logind(bus) -> Iterator[Callable[..., FakeLogind]]:
    made: list[FakeLogind] = []

    def make(**how) -> FakeLogind:
        made.append(FakeLogind(**how))
        return made[-1]

    yield make
    for fake in made:
        fake.close()


class Held:
    """An inhibitor and what it said."""

    def __init__(self, **how) -> None:
        self.said: queue.Queue[Shutdown] = queue.Queue()
        self.inhibitor = Inhibitor(self.said.put, **{"call_s": 2.0, "retry_s": 0.05, **how})
        self.inhibitor.start()

    def next(self) -> Shutdown:
        return self.said.get(timeout=WAIT_S)


@pytest.fixture
def hold() -> Iterator[Callable[..., Held]]:
    made: list[Held] = []

    def make(**how) -> Held:
        made.append(Held(**how))
        return made[-1]

    yield make
    for one in made:
        one.inhibitor.close()
        assert not one.inhibitor.is_alive()


def test_the_lock_is_taken_at_the_start_and_its_length_is_known(logind, hold):
    """Held from the first word on, which says that no shutdown is under way and how long one would wait."""
    fake = logind(delay_s=300.0)
    held = hold()

    assert Shutdown(False, 300.0) == held.next()
    assert held.inhibitor.held
    assert 1 == fake.held()
    assert (300.0, "") == (held.inhibitor.delay_s, held.inhibitor.trouble())


def test_a_shutdown_waits_until_the_lock_is_released(logind, hold, eventually):
    """The signal comes through, the lock holds, and is gone once it is released; released twice it is the same."""
    fake = logind()
    held = hold()
    held.next()
    fake.say(True)

    assert held.next().begins
    assert 1 == fake.held()
    held.inhibitor.release()
    held.inhibitor.release()
    assert 0 == fake.held()
    assert "" == held.inhibitor.trouble()


def test_a_released_lock_stays_released(logind, hold, eventually):
    """Looking doesn't take it back: whoever released it is about to power off."""
    fake = logind()
    held = hold(check_s=0.05)
    held.next()
    held.inhibitor.release()
    asked = fake.asked
    eventually(lambda: fake.asked > asked + 6)

    assert (0, 1) == (fake.held(), fake.taken)


def test_a_shutdown_that_is_called_off_gives_the_lock_back(logind, hold):
    """After a release the lock is taken anew before anybody is told that training may go on."""
    fake = logind()
    held = hold()
    held.next()
    fake.say(True)
    held.next()
    held.inhibitor.release()
    fake.say(False)

    assert not held.next().begins
    assert held.inhibitor.held
    assert (1, 2) == (fake.held(), fake.taken)


def test_a_daemon_that_starts_in_mid_shutdown_says_so(logind, hold):
    """No lock is to be had then, and none is missed; once it is called off there is one."""
    fake = logind(preparing=True)
    held = hold()

    assert held.next().begins
    assert not held.inhibitor.held
    fake.say(False)
    assert not held.next().begins
    assert held.inhibitor.held


def test_a_lost_lock_is_noticed_and_taken_anew(logind, hold, eventually):
    """logind doesn't list us although nothing was said: found by looking, told, and mended."""
    fake = logind()
    held = hold(check_s=0.1)
    held.next()
    fake.forgets = True

    eventually(lambda: fake.taken == 2)
    eventually(lambda: fake.held() == 1)
    assert held.inhibitor.held


@pytest.mark.slow
def test_a_loss_is_said_for_a_while(logind, hold, eventually):
    """Whoever asks in the minute after it is told."""
    fake = logind()
    held = hold(check_s=0.5)
    held.next()
    fake.forgets = True

    eventually(lambda: "was lost" in held.inhibitor.trouble())
    eventually(lambda: not held.inhibitor.trouble())


def test_a_missed_signal_is_made_up_for(logind, hold):
    """What logind says when asked counts as well."""
    fake = logind()
    held = hold(check_s=0.1)
    held.next()
    fake.preparing = True

    assert held.next().begins


def test_a_restarted_logind_gives_a_new_lock(logind, hold, eventually):
    """The old one may be worth nothing: without waiting for the next look there is a new one."""
    fake = logind()
    held = hold()
    held.next()
    fake.restart()

    eventually(lambda: fake.taken == 2)
    eventually(lambda: held.inhibitor.trouble() == "")
    assert 1 == fake.held()


def test_no_bus_no_lock_and_a_word_about_it(tmp_path, monkeypatch, hold, eventually):
    """Without D-Bus the daemon goes on; it says that a shutdown wouldn't wait."""
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/nobody")
    held = hold()

    eventually(lambda: "wouldn't wait" in held.inhibitor.trouble())
    assert not held.inhibitor.held


def test_a_refusal_is_told_and_tried_again(logind, hold, eventually):
    """logind's reason is passed on; when it relents, the lock is there."""
    fake = logind()
    fake.refuses = True
    held = hold()

    eventually(lambda: "not now" in held.inhibitor.trouble())
    fake.refuses = False
    eventually(lambda: held.inhibitor.held)
    eventually(lambda: held.inhibitor.trouble() == "")


@pytest.mark.slow
def test_a_silent_logind_is_noticed(logind, hold, eventually):
    """It never answers: bounded, told, and the lock is there when it speaks again."""
    fake = logind()
    fake.mute = True
    held = hold(call_s=0.2)

    eventually(lambda: "wouldn't wait" in held.inhibitor.trouble())
    fake.mute = False
    eventually(lambda: held.inhibitor.held)


@pytest.mark.slow
def test_a_mute_bus_is_noticed(tmp_path, monkeypatch, eventually):
    """A bus that accepts and says nothing: the thread may hang, whoever asks is told."""
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute"))
        mute.listen()
        monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/mute")
        inhibitor = Inhibitor(lambda _: None, check_s=0.1, call_s=0.1)
        inhibitor.start()
        eventually(inhibitor.trouble)
        inhibitor.close()


def test_closing_gives_the_lock_up(logind, hold):
    """A daemon that ends holds no shutdown up."""
    fake = logind()
    held = hold()
    held.next()
    held.inhibitor.close()

    assert 0 == fake.held()
    assert not held.inhibitor.held


@pytest.mark.parametrize(("delay_s", "save_s", "short"), [
    (None, 60.0, False), (70.0, 60.0, False), (69.9, 60.0, True), (5.0, 0.0, True), (10.0, 0.0, False),
])  # fmt: skip
def test_too_short_a_delay_is_said(delay_s, save_s, short):
    """Less than the flush and the margin is too short; unknown isn't said to be."""
    said = too_short(delay_s, save_s, 10.0)

    assert short == bool(said)
    if short:
        assert f"{save_s:.0f} s" in said

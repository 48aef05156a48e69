"""logind's delay lock: whoever shuts this system down, ranks get their flush first.

While the lock is held, logind begins a shutdown with a signal and then waits, for at most InhibitDelayMaxSec, until it
is released. It binds what goes through logind (`systemctl reboot`, `shutdown`, a power button), not `reboot -f`.

The thread here keeps the lock and puts a `Shutdown` into the inbox; it decides nothing. What it checks every minute
doesn't rest on signals: that logind still knows the lock, how long it waits, and whether a shutdown is under way.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec import Struct

CALL_S = 5.0
"""Every D-Bus call has this long; logind answers in milliseconds."""
CHECK_S = 60.0
RETRY_FIRST_S, RETRY_MOST_S = 1.0, 30.0

_NAME, _PATH = "org.freedesktop.login1", "/org/freedesktop/login1"
_MANAGER = "org.freedesktop.login1.Manager"


class Shutdown(Struct, frozen=True):
    """What logind says: a shutdown is under way and waits for us at most *within_s*, or none is."""

    begins: bool
    within_s: float | None = None


class Inhibitor(threading.Thread):
    """Holds the lock from `start` to `close`, but for the time between a `release` and the end of that shutdown.

    *put* is called on this thread: whenever a shutdown begins or is called off, and once at the start.
    """

    def __init__(
        self,
        put: Callable[[Shutdown], object],
        *,
        why: str = "training saves its state first",
        check_s: float = CHECK_S,
        call_s: float = CALL_S,
        retry_s: float = RETRY_FIRST_S,
    ) -> None:
        super().__init__(name="inhibitor", daemon=True)
        self._put, self._why = put, why
        self._check_s, self._call_s, self._retry_s = check_s, call_s, retry_s
        self._lock = threading.Lock()  # guards _fd
        self._fd = -1
        self._shutting_down: bool | None = None
        self._released = False
        self._delay_s: float | None = None
        self._trouble = ""
        self._looked_at = time.monotonic()
        self._closing = threading.Event()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    # ---- for the loop ------------------------------------------------------------------------------

    @property
    def held(self) -> bool:
        """Whether a shutdown would wait for us."""
        return self._fd >= 0

    @property
    def delay_s(self) -> float | None:
        """How long it would (InhibitDelayMaxSec); None = not known."""
        return self._delay_s

    def trouble(self) -> str:
        """ "" or why a shutdown would not wait."""
        if self._closing.is_set() or self._released:
            return ""
        if not self.is_alive():
            return f"the shutdown lock isn't watched: {self._trouble or 'its thread has ended'}"
        silent_s = time.monotonic() - self._looked_at
        if silent_s > self._check_s + 3 * self._call_s:
            return f"logind hasn't answered for {silent_s:.0f} s"
        return self._trouble

    def release(self) -> None:
        """Lets a shutdown go on. The lock is taken anew only if that shutdown is called off. A repeat is nothing."""
        self._released = True
        self._let_go()

    def close(self) -> None:
        """Gives the lock up and ends."""
        if self._closing.is_set():
            return
        self._closing.set()
        with contextlib.suppress(OSError):
            os.eventfd_write(self._wake, 1)
        if self.is_alive():
            self.join(self._call_s)
        self._let_go()
        if not self.is_alive():
            os.close(self._wake)

    # ---- the thread --------------------------------------------------------------------------------

    def run(self) -> None:
        """Holds on, whatever happens to the bus."""
        retry_s = self._retry_s
        while not self._closing.is_set():
            began = time.monotonic()
            try:
                self._connected()
            except Exception as err:  # a broken bus may break in any way
                self._trouble = f"a shutdown wouldn't wait for training: D-Bus: {err or type(err).__name__}"
            if time.monotonic() - began > RETRY_MOST_S:
                retry_s = self._retry_s
            self._closing.wait(retry_s)
            retry_s = min(RETRY_MOST_S, 2 * retry_s)

    def _connected(self) -> None:
        """One connection's life; returns when it is time to end."""
        from jeepney import MatchRule, message_bus
        from jeepney.io.blocking import Proxy, open_dbus_connection

        with open_dbus_connection("SYSTEM", enable_fds=True, auth_timeout=self._call_s) as bus:
            news: deque[Any] = deque(maxlen=1000)
            rules = [
                MatchRule(type="signal", interface=_MANAGER, member="PrepareForShutdown", path=_PATH),
                MatchRule(type="signal", member="NameOwnerChanged", path="/org/freedesktop/DBus"),
            ]
            rules[1].add_arg_condition(0, _NAME)
            daemon = Proxy(message_bus, bus, timeout=self._call_s)
            for rule in rules:
                daemon.AddMatch(rule)
            with contextlib.ExitStack() as filters:
                for rule in rules:
                    filters.enter_context(bus.filter(rule, queue=news))
                self._look(_Manager(bus, self._call_s), anew=True)
                while not self._closing.is_set():
                    self._wait(bus, news)

    def _wait(self, bus: Any, news: deque[Any]) -> None:
        """Until something is said, or it is time to look."""
        manager = _Manager(bus, self._call_s)
        until = self._looked_at + self._check_s
        while not news and not self._closing.is_set() and (left_s := until - time.monotonic()) > 0:
            select.select([bus.sock, self._wake], [], [], left_s)
            with contextlib.suppress(TimeoutError):
                while True:
                    bus.recv_messages(timeout=0)
        if self._closing.is_set():
            return
        restarted = False
        while news:
            signal = news.popleft()
            if len(signal.body) == 1:
                self._turned(manager, bool(signal.body[0]))
            elif len(signal.body) == 3 and signal.body[2]:
                restarted = True  # logind came back: its memory of us may be gone
        if restarted or time.monotonic() >= until:
            self._look(manager, anew=restarted)

    def _look(self, manager: _Manager, *, anew: bool) -> None:
        """What logind knows now. *anew*: the lock that we hold, if any, may be worth nothing."""
        self._delay_s = manager.delay_s()
        shutting_down = manager.shutting_down()
        self._trouble = ""
        if shutting_down is not self._shutting_down:
            self._turned(manager, shutting_down)
        elif not shutting_down and not self._released and (anew or not (self.held and manager.knows_us())):
            lost = self.held and not anew
            self._take(manager)
            if lost:
                self._trouble = "the shutdown lock was lost, and has been taken anew"  # said until the next look
        self._looked_at = time.monotonic()

    def _turned(self, manager: _Manager, begins: bool) -> None:
        """A shutdown begins, or is called off: then the lock is needed again before anybody trains on."""
        was, self._shutting_down = self._shutting_down, begins
        if not begins:
            self._released = self._released and not was
            if not self._released:
                self._take(manager)
        self._put(Shutdown(begins, self._delay_s))

    def _take(self, manager: _Manager) -> None:
        """A lock in place of the one that is held, without a gap."""
        fd = manager.inhibit(self._why)
        with self._lock:
            old, self._fd = self._fd, fd
        if old >= 0:
            os.close(old)
        if self._released or self._closing.is_set():
            self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class _Manager:
    """The few words that are needed of logind. Every call is bounded; whatever goes wrong is raised."""

    def __init__(self, bus: Any, call_s: float) -> None:
        self._bus, self._call_s = bus, call_s

    def delay_s(self) -> float:
        """InhibitDelayMaxSec."""
        return int(self._property("InhibitDelayMaxUSec")) / 1e6

    def shutting_down(self) -> bool:
        """A shutdown is under way, or waits for delay locks."""
        return bool(self._property("PreparingForShutdown"))

    def knows_us(self) -> bool:
        """A delay lock of this process is in force."""
        return any(
            "shutdown" in what.split(":") and mode == "delay" and pid == os.getpid()
            for what, _who, _why, mode, _uid, pid in self._call(_MANAGER, "ListInhibitors", None, ())
        )

    def inhibit(self, why: str) -> int:
        """A new lock: it holds until the descriptor is closed."""
        return int(self._call(_MANAGER, "Inhibit", "ssss", ("shutdown", "powerguard", why, "delay")).to_raw_fd())

    def _property(self, name: str) -> Any:
        return self._call("org.freedesktop.DBus.Properties", "Get", "ss", (_MANAGER, name))[1]

    def _call(self, interface: str, method: str, signature: str | None, body: tuple[object, ...]) -> Any:
        from jeepney import DBusAddress, MessageType, new_method_call

        message = new_method_call(DBusAddress(_PATH, _NAME, interface), method, signature, body)
        reply = self._bus.send_and_get_reply(message, timeout=self._call_s)
        if reply.header.message_type is MessageType.error:
            raise ConnectionError(f"logind refused {method}: {reply.body[0] if reply.body else 'no reason given'}")
        return reply.body[0]


def delay_now(call_s: float = CALL_S) -> float | None:
    """InhibitDelayMaxSec as logind has it now; None where it can't be asked."""
    found: list[float] = []

    def ask() -> None:
        from jeepney.io.blocking import open_dbus_connection

        with contextlib.suppress(Exception), open_dbus_connection("SYSTEM") as bus:  # a broken bus breaks in any way
            found.append(_Manager(bus, call_s).delay_s())

    thread = threading.Thread(target=ask, name="inhibit delay", daemon=True)  # jeepney doesn't bound its first call
    thread.start()
    thread.join(2 * call_s)
    return found[0] if found else None


def too_short(delay_s: float | None, save_s: float, margin_s: float) -> str:
    """ "" or that logind doesn't wait long enough for a flush; *save_s*: everything up to durable."""
    if delay_s is None or delay_s >= save_s + margin_s:
        return ""
    return (
        f"a shutdown waits {delay_s:.0f} s for training (InhibitDelayMaxSec), "
        f"and a flush needs {save_s:.0f} s + margin {margin_s:.0f} s"
    )

"""The thread that reads one UPS: a Sample a poll, whatever happens, and LOGIN held so that the primary waits.

It decides nothing and never ends by itself. A connection that gave cause for doubt is closed and made anew,
after 0.5 to 5 s (a third of NUT's DEADTIME), for ever. Every poll ends within *poll_max_s*.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable

from powerguard.core.types import Comm, Sample
from powerguard.errors import PowerguardError
from powerguard.node.ups_client import CheckedClient
from powerguard.node.ups_exchange import NutError, Refused, Unreadable
from powerguard.node.ups_line import UpsAddress, printable

RETRY_FIRST_S, RETRY_MOST_S = 0.5, 5.0
"""Wait after the first failure, doubled at each further one, up to a third of NUT's DEADTIME of 15 s."""

LOGIN_AGAIN_S = 30.0
"""A LOGIN that was refused is tried again so often: upsd.users may have been put right and reloaded."""

POLL_LEAST_S = 0.05

WHOLE_S = 5.0
"""While all is calm and a UPS says the same quiet status, polls ask for that alone and tell nothing; everything is
asked and told so often: what upsmon asks, and how often upsmon asks it. A list is 40 to 60 lines, each a piece of its
own that upsd writes.
"""
_QUIET = frozenset({"OL", "CHRG"})

LAG_S, LAGS = 0.04, 8
"""Feeds are looked at one after another, so long apart: two threads that do the same at the same instant are switched
at every step, and each switch is dearer than the step.
"""


class UpsReader(threading.Thread):
    """Reads *address* every *poll_s* and gives each Sample to *put*, on this thread; see `WHOLE_S` for when it needn't.

    *clock* gives the instants of the samples (CLOCK_BOOTTIME); waits go by the monotonic clock. Without *user*
    there is no LOGIN. *feed* names the samples; the address by default. *turn* numbers the readers of a process.
    """

    def __init__(
        self,
        address: UpsAddress,
        put: Callable[[Sample], None],
        clock: Callable[[], float],
        *,
        feed: str = "",
        user: str | None = None,
        password: str | None = None,
        tls: ssl.SSLContext | None = None,
        poll_s: float = 5.0,
        answer_s: float = 2.0,
        poll_max_s: float = 4.0,
        turn: int = 0,
    ) -> None:
        super().__init__(name=f"ups {address}", daemon=True)
        self.address, self.feed = address, feed or str(address)
        self.fault = ""  # what went wrong on our side, the last time something did
        self._put, self._clock = put, clock
        self._user, self._password, self._tls = user, password, tls
        self._poll_s, self._answer_s, self._poll_max_s = max(POLL_LEAST_S, poll_s), answer_s, poll_max_s
        self._lag_s = LAG_S * (turn % LAGS)
        self._client: CheckedClient | None = None
        self._calm = False
        self._quiet = ""  # the status that the last list told, if it is one of a UPS with nothing to say
        self._listed_at = 0.0
        self._authenticated = False  # USERNAME and PASSWORD can be said once a connection
        self._login_held = False
        self._login_problem = ""
        self._login_at = 0.0  # not tried again before this instant
        self._retry_s = 0.0  # > 0 while there is no connection
        self._last: float | None = None  # when the last poll began
        self._made_at = time.monotonic()
        self._wake = threading.Condition()
        self._stopping = self._says_goodbye = False

    # ---- for other threads -------------------------------------------------------------------------

    @property
    def login_held(self) -> bool:
        """Whether the primary knows of us now."""
        return self._login_held

    @property
    def login_problem(self) -> str:
        """Why not, where upsd gave a reason."""
        return self._login_problem

    @property
    def poll_s(self) -> float:
        """Seconds between polls."""
        return self._poll_s

    def set_poll(self, seconds: float, *, calm: bool = False) -> None:
        """Polls every *seconds* from now on; a shorter period counts from the last poll. *calm*: see `WHOLE_S`."""
        with self._wake:
            self._poll_s, self._calm = max(POLL_LEAST_S, seconds), calm
            self._wake.notify()

    def trouble(self) -> str:
        """ "" while the thread does its duty, else what is wrong with it; for the daemon's watchdog."""
        if not self.is_alive():
            return f"the reader of {self.feed} is not running" + (f": {self.fault}" if self.fault else "")
        late_s = time.monotonic() - self._due_at()
        return f"the reader of {self.feed} is {late_s:.0f} s late" if late_s > 2 * self._poll_max_s else ""

    def close(self, *, logout: bool = True, within_s: float = 10.0) -> bool:
        """Ends the thread; False if it didn't end in time.

        With *logout* upsd is told that we are done. Without, the connection is left as it is: the LOGIN then holds
        until the process ends (or upsd drops the silent connection after 60 s), and a later `close()` gives it up.
        """
        with self._wake:
            self._stopping, self._says_goodbye = True, logout
            self._wake.notify()
        if self.is_alive():
            self.join(within_s)
        if self.is_alive():
            return False
        if logout:  # the thread has done it, unless it never ran or was closed without before
            self._goodbye()
        return True

    # ---- the thread --------------------------------------------------------------------------------

    def run(self) -> None:
        """Polls until closed."""
        while self._wait():
            self._last = began = time.monotonic()
            if self._still_quiet(began):
                continue
            sample = self._poll(began)
            try:
                self._put(sample)
            except Exception as error:
                self.fault = f"a sample could not be handed over: {type(error).__name__}: {error}"
        if self._says_goodbye:
            self._goodbye()

    def _due_at(self) -> float:
        if self._last is None:
            return self._made_at
        if self._retry_s:
            return self._last + min(self._poll_s, self._retry_s)
        # at whole periods of the clock: all feeds are looked at together, and the loop is woken once for them
        return ((self._last - self._lag_s) // self._poll_s + 1.0) * self._poll_s + self._lag_s

    def _wait(self) -> bool:
        """Waits for the next poll; False when it is time to end."""
        with self._wake:
            while not self._stopping:
                left_s = self._due_at() - time.monotonic()
                if left_s <= 0:
                    return True
                self._wake.wait(left_s)
        return False

    def _still_quiet(self, began: float) -> bool:
        """Whether there is nothing to tell: a list of the last `WHOLE_S` says what upsd says now."""
        client, status = self._client, self._quiet
        if client is None or not self._calm or not status or began - self._listed_at > WHOLE_S - self._poll_s / 2:
            return False
        self._quiet = ""
        client.until = began + self._poll_max_s
        try:
            if client.still(self.address.ups, "ups.status", status):
                self._quiet = status
        except NutError:
            if not client.connected:
                self._drop()
        return bool(self._quiet)

    def _poll(self, began: float) -> Sample:
        variables: dict[str, str] = {}
        try:
            variables = self._read(began + self._poll_max_s)
            comm, detail = _state(variables), self._login_problem
            if self._user is None or self._login_held:
                self._quiet, self._listed_at = _quiet(variables), began
        except NutError as error:
            comm, detail = error.comm, str(error)
        except PowerguardError as error:
            comm, detail = Comm.REFUSED, str(error)
        except Exception as error:  # our own mistake must not blind the node
            self.fault = f"{type(error).__name__}: {error}"
            comm, detail = Comm.UNREACHABLE, f"fault of the reader: {self.fault}"
        if comm is Comm.UNREACHABLE:
            self._drop()
        if self._client is not None and self._client.connected:
            self._retry_s = 0.0
        else:
            self._retry_s = min(RETRY_MOST_S, 2 * self._retry_s or RETRY_FIRST_S)
        return Sample(
            feed=self.feed,
            at=self._clock(),
            comm=comm,
            variables={printable(name): printable(value) for name, value in variables.items()},
            detail=printable(detail),
            took_s=time.monotonic() - began,
        )

    def _read(self, until: float) -> dict[str, str]:
        reused = self._client is not None
        try:
            return self._read_once(until)
        except Unreadable as error:
            self._drop()
            if not (reused and error.gone):
                raise
        # upsd was restarted or has dropped us since the last poll: no outage of data if it is back already
        return self._read_once(until)

    def _read_once(self, until: float) -> dict[str, str]:
        if self._client is None:
            self._client = CheckedClient(
                self.address.host, self.address.port, tls=self._tls, answer_s=self._answer_s, until=until
            )
        client, refusal, variables = self._client, None, {}
        client.until = until
        try:
            variables = client.list_vars(self.address.ups)
        except Refused as error:
            refusal = error  # the LOGIN of a stale UPS counts all the same
        self._hold_login(client)
        if refusal is not None:
            raise refusal
        return variables

    def _hold_login(self, client: CheckedClient) -> None:
        """LOGIN once a connection. A failure costs no reading: without LOGIN the values are as good."""
        if self._user is None or self._login_held or time.monotonic() < self._login_at:
            return
        try:
            if not self._authenticated:
                client.authenticate(self._user, self._password or "")
                self._authenticated = True
            client.login(self.address.ups)
        except Refused as error:
            self._login_problem = f"not logged in: {error}"
            if error.comm is Comm.REFUSED:  # else the driver isn't there: asked again at the next poll
                self._login_at = time.monotonic() + LOGIN_AGAIN_S
        except (Unreadable, PowerguardError) as error:
            self._drop()
            self._login_problem = f"not logged in: {error}"
        else:
            self._login_held, self._login_problem = True, ""

    def _drop(self) -> None:
        client, self._client = self._client, None
        self._authenticated = self._login_held = False
        self._login_at = 0.0
        self._quiet = ""
        if client is not None:
            client.close()

    def _goodbye(self) -> None:
        client = self._client
        if client is not None:
            client.until = time.monotonic() + self._answer_s
            client.logout()
        self._drop()


def _state(variables: dict[str, str]) -> Comm:
    """upsd answers WAIT, and nothing else, until the driver's first data is in."""
    return Comm.WAIT if variables.get("ups.status", "").split() == ["WAIT"] else Comm.OK


def _quiet(variables: dict[str, str]) -> str:
    """The status, if it is that of a UPS on line with nothing to say."""
    status = variables.get("ups.status", "")
    words = status.split()
    return status if "OL" in words and _QUIET.issuperset(words) else ""

"""Outlets of the UPS itself, by NUT's instant commands: `load.off`, `outlet.1.load.off` and the like.

upsd says OK to a command as soon as its driver was told. Seen: dummy-ups 2.8.0 lists `load.off`, upsd says OK, and the
driver logs "unknown command". So the command is tracked (upsd 2.8 and later), and a variable is read back where the
rig names one; with neither, the outlet is refused.
"""

from __future__ import annotations

import time

from hil.outlets.what import ASK_EVERY_S, Named, OutletFailed, secret, wait_for
from powerguard.node.ups_client import CheckedClient
from powerguard.node.ups_exchange import NutError, Refused
from powerguard.node.ups_line import UpsAddress


class Nut(Named, frozen=True, tag="nut"):
    """*ups* as `name@host:port`; *state* is a variable that says `on` or `off`, "" where the device has none."""

    ups: str
    user: str
    password_file: str
    on: str = "load.on"
    off: str = "load.off"
    state: str = ""

    def switch(self, on: bool) -> None:
        """Returns when the driver has done it and, with *state*, the UPS says so."""
        address = UpsAddress.parse(self.ups)
        try:
            with _Tracking(address.host, address.port, self.user, secret(self.password_file)) as upsd:
                tracked = upsd.command(address.ups, self.on if on else self.off, self.settle_s)
                if not tracked and not self.state:
                    raise OutletFailed(
                        f"{self.name}: this upsd can't tell whether the command was carried out",
                        todo='name a variable that tells: state = "outlet.1.status"',
                    )
                if self.state:
                    wait_for(on, lambda: upsd.get_var(address.ups, self.state).lower() in ("on", "yes"), self)
        except NutError as error:
            raise OutletFailed(f"{self.name}: {error}", todo="look at the driver's log; switch it by hand") from None


class _Tracking(CheckedClient):
    """A client that follows a command to its end."""

    def command(self, ups: str, command: str, within_s: float) -> bool:
        """Whether its success is known; False where upsd is too old to say. Raises Refused if it failed."""
        try:
            self._x.expect(("OK",), "SET", "TRACKING", "ON")
        except Refused:
            self.run_command(ups, command)
            return False
        answer = self._x.ask("INSTCMD", ups, command)
        if answer[:2] != ["OK", "TRACKING"] or len(answer) != 3:
            raise self._x.doubt(f"INSTCMD was answered with {' '.join(answer)[:80]!r}")
        ends = time.monotonic() + within_s
        while (said := self._x.ask("GET", "TRACKING", answer[2])) == ["PENDING"]:
            if time.monotonic() > ends:
                raise self._x.doubt(f"{command} is still pending after {within_s:.0f} s")
            time.sleep(ASK_EVERY_S)
        if said != ["SUCCESS"]:
            raise self._x.doubt(f"{command} ended as {' '.join(said)[:80]!r}")
        return True

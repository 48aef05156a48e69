"""The simulated upsd by hand: lines on standard input change the UPS, as in a file of NUT's dummy-ups."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence

from powerguard.sim.upsd import SimUpsd
from powerguard.sim.upsd_faults import Fault
from powerguard.sim.upsd_state import HEALTHY, USERS

HELP = """\
ups.status: OB DISCHRG        set a variable of every UPS
demo ups.status: OB LB        ... of one
fault cut after=40 times=1    what goes wrong from now on; also ups=, on=, seconds=
clear                         nothing does
fsd demo                      a primary commands the forced shutdown
restart                       upsd anew
quit"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Serves until "quit" or a signal."""
    parser = argparse.ArgumentParser(
        prog="python -m powerguard.sim.upsd", description="a simulated NUT server", epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--ups", action="append", metavar="NAME", help="a UPS to serve (may be repeated; demo)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=3493, help="0 = any free one")
    options = parser.parse_args(arguments)
    with SimUpsd(options.port, host=options.host) as upsd:
        names: list[str] = options.ups or ["demo"]
        for name in names:
            upsd.replace(name, HEALTHY)
            say(f"serving {upsd.address(name)}")
        say("users: " + ", ".join(f"{name} / {user.password}" for name, user in USERS.items()))
        try:
            for line in sys.stdin:
                if line.strip() == "quit":
                    return
                obey(upsd, names, line.strip())
            signal.pause()  # no more input: serve on
        except KeyboardInterrupt:
            return


def obey(upsd: SimUpsd, names: Sequence[str], line: str) -> None:
    """Does what *line* says, or says why not."""
    verb, _, rest = line.partition(" ")
    try:
        if not line:
            return
        if verb == "fault":
            upsd.inject(Fault.parse(rest))
        elif verb == "clear":
            upsd.clear(rest.strip())
        elif verb == "fsd":
            for name in [rest.strip()] if rest else names:
                upsd.fsd(name)
        elif verb == "restart":
            upsd.restart()
        else:
            _set(upsd, names, line)
    except ValueError as error:
        say(f"not understood ({error})\n{HELP}")


def _set(upsd: SimUpsd, names: Sequence[str], line: str) -> None:
    target, colon, value = line.partition(":")
    words = target.split()
    if not colon or len(words) not in (1, 2) or (len(words) == 2 and words[0] not in names):
        raise ValueError(line)
    for name in names if len(words) == 1 else words[:1]:
        upsd.set(name, {words[-1]: value.strip() or None})


def say(text: str) -> None:
    """One line to whoever watches."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()

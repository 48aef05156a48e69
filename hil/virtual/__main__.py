"""`python -m hil.virtual [RIG ...]`: every virtual rig, or those named. One that can't run here says why."""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Sequence
from importlib.util import find_spec

from msgspec import Struct

from hil.virtual import snmp, volume
from powerguard.errors import DrillFailed, PowerguardError

Say = Callable[[str], None]


class Rig(Struct, frozen=True):
    """*missing* says why it can't run here, or ""."""

    name: str
    about: str
    missing: Callable[[], str]
    run: Callable[[Say], None]


def _torch_and(kind: str) -> Callable[[], str]:
    return lambda: volume.missing(kind) or ("" if find_spec("torch") else "torch isn't installed")


def _power_cut(kind: str) -> Callable[[Say], None]:
    def run(say: Say) -> None:
        with volume.Volume(kind) as made:
            say(str(importlib.import_module("hil.virtual.powercut").cut_everywhere(made)))

    return run


def _ways(say: Say) -> None:
    ways = importlib.import_module("hil.virtual.ways")
    scores = []
    for kind in volume.KINDS:
        if not volume.missing(kind):
            with volume.Volume(kind) as made:
                scores += ways.compare(made, times=12)
    say(ways.table(scores))
    ours = [score for score in scores if score.way == ways.WAYS[-1].name]
    if any(score.lost or score.nothing or score.wrong for score in ours):
        raise DrillFailed("powerguard.checkpoint.save lost a checkpoint")


def _usb_missing() -> str:
    return str(importlib.import_module("hil.virtual.vm.usb").missing())


def _usb(say: Say) -> None:
    importlib.import_module("hil.virtual.vm.usb").rig(say)


def _vm_missing() -> str:
    return str(importlib.import_module("hil.virtual.vm.image").missing())


def _vm(say: Say) -> None:
    importlib.import_module("hil.virtual.vm.outage").both(say)


def _snmp(mib: str) -> Callable[[Say], None]:
    return lambda say: snmp.rig(mib, say)


RIGS = (
    *(
        Rig(
            f"powercut-{kind}",
            f"the power of {kind} goes at every instant of a save",
            _torch_and(kind),
            _power_cut(kind),
        )
        for kind in volume.KINDS
    ),
    Rig("ways", "what a power cut leaves of other ways of saving", _torch_and("ext4"), _ways),
    *(
        Rig(f"snmp-{mib}", f"an SNMP UPS that speaks {name}", snmp.missing, _snmp(mib))
        for mib, name in snmp.MIBS.items()
    ),
    Rig("usb", "a UPS on USB that isn't there, in a virtual machine", _usb_missing, _usb),
    Rig("vm", "a virtual machine loses its power: a whole outage, and one in which the battery lies", _vm_missing, _vm),
)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if nothing that could run failed; DrillFailed's code otherwise."""
    parser = argparse.ArgumentParser(prog="python -m hil.virtual", description=__doc__)
    parser.add_argument("rig", nargs="*", choices=[[], *(rig.name for rig in RIGS)], help="all, if none is named")
    names = parser.parse_args(arguments).rig
    lines: list[str] = []
    failed = 0
    for rig in RIGS:
        if names and rig.name not in names:
            continue
        if why := rig.missing():
            lines.append(f"skipped  {rig.name}: {why}")
            print(lines[-1], flush=True)
            continue
        print(f"\n== {rig.name}: {rig.about}", flush=True)
        begun = time.monotonic()
        try:
            rig.run(lambda text: print(text, flush=True))
            verdict = "ok     "
        except (PowerguardError, OSError) as error:
            print(f"FAILED: {error}", flush=True)
            verdict, failed = "FAILED ", failed + 1
        lines.append(f"{verdict}  {rig.name}  {time.monotonic() - begun:.0f} s")
    print("\n" + "\n".join(lines), flush=True)
    return DrillFailed.exit_code if failed else 0


if __name__ == "__main__":
    sys.exit(main())

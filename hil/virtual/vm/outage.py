"""Two nights of the virtual machine: one as it should be, and one in which the battery lies."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from msgspec.structs import replace

from hil.virtual.vm.disk import VolatileDisk
from hil.virtual.vm.image import CHECKPOINTS, HOST, STATE, Image
from hil.virtual.vm.machine import LOOK_S, Machine
from powerguard import journal
from powerguard.drill.plan import PLANS
from powerguard.drill.power import UPS, power
from powerguard.drill.supply import Supply, boottime
from powerguard.errors import DrillFailed
from powerguard.generations import Generation, latest
from powerguard.journal import Done, Tick
from powerguard.node.ups_client import CheckedClient
from powerguard.node.ups_line import UpsAddress
from powerguard.sim.nut import RealNut

WAIT_S = 1800.0
"""For anything: an emulated processor that shares its cores with others boots in half a minute, or in ten."""
RUNTIME_S = 400.0  # of the battery while training
MID_FLUSH_BYTES = 12 << 20  # of the state's 24 MB
MB = 1 << 20

POLICY: dict[str, float | str] = {
    "on_battery": "park", "snapshot": "never", "poll_online_s": 2.0, "poll_battery_s": 1.0, "resume_after_s": 10.0,
    "margin_s": 5.0, "flush_default_s": 30.0, "flush_max_s": 300.0, "prepare_max_s": 10.0, "hold_max_s": 60.0,
    "seal_max_s": 60.0, "halt_s": 90.0, "exit_wait_s": 30.0, "park_max_s": 15.0, "blind_save_s": 60.0,
    "blind_halt_s": 60.0,
}  # fmt: skip
"""Ranks stop as soon as mains are gone, and the node halts soon after: here it's the machine that is tested, not the
battery. Waits are those of an emulated processor."""

Say = Callable[[str], None]


def configuration() -> str:
    """The guest's powerguard.toml; the port is filled in at each boot."""
    policy = "\n".join(f"{key} = {json.dumps(value)}" for key, value in POLICY.items())
    return (
        f'[node]\nname = "vm"\n\n[[ups]]\nname = "{UPS}@{HOST}:3493"\nuser = "secondary"\n'
        'password_file = "${CREDENTIALS_DIRECTORY}/nut-password"\n\n'
        f'[policy]\n{policy}\n\n[halt]\nmethod = "logind"\n'
    )


def both(say: Say) -> None:
    """The two nights, one after the other, on one image. Raises DrillFailed."""
    with tempfile.TemporaryDirectory(prefix="pg-vm-") as folder:
        begun = time.monotonic()
        image = Image(Path(folder), configuration())
        say(f"image: {image.path.stat().st_blocks * 512 / 1e6:.0f} MB, made in {time.monotonic() - begun:.0f} s")
        complete(image, Path(folder), say)
        lying(image, Path(folder), say)


@contextlib.contextmanager
def _machine(image: Image, folder: Path, upsd_port: int) -> Iterator[Machine]:
    where = Path(tempfile.mkdtemp(dir=folder))
    disk = VolatileDisk(image.path, where / "disk")
    machine = Machine(image, disk, where, upsd_port)
    try:
        yield machine
    finally:
        machine.close()
        disk.close()


# ---- a whole outage --------------------------------------------------------------------------------


def complete(image: Image, folder: Path, say: Say) -> None:
    """Mains fail, ranks park, the node halts by logind, the battery is flat, mains return, training goes on."""
    plan = PLANS["blackout"]
    with (
        power(replace(plan, nut=True, runtime_s=RUNTIME_S), boottime) as (supply, address, _),
        _machine(image, folder, UpsAddress.parse(address).port) as machine,
    ):
        boot_s = _train(machine, address)
        supply.cut_mains()
        cut_at = boottime()
        machine.until("the stop", lambda: machine.told("stopped"), WAIT_S)
        step, right = machine.told("stopped")[0]
        supply.load(plan.loads.parked)
        say(
            f"complete: booted and training after {boot_s:.0f} s; stopped after step {step}, "
            f"{boottime() - cut_at:.0f} s into the outage"
        )
        _until_off(machine, supply)
        say(
            f"complete: halted and off {boottime() - cut_at:.0f} s into the outage, with {supply.truth_s():.0f} s left "
            "on the battery"
        )
        _drain(supply)
        lost = machine.disk.cut()
        supply.restore_mains()
        boot_s = _boot_again(machine)
        resumed, values = machine.told("resumed")[0]
        if (right, values, int(resumed)) != ("right", "right", int(step) + 1):
            raise DrillFailed(f"complete: stopped after step {step} ({right}), resumed at {resumed} ({values})")
        machine.until("a step", lambda: len(machine.told("step")) > 3, WAIT_S)
        say(
            f"complete: the battery was flat and the plug pulled, {lost} blocks lost from the disk's cache; up again "
            f"after {boot_s:.0f} s, resumed at step {resumed} with every value right, and trains on"
        )
        machine.close()
        machine.disk.cut(keep=0.5)
        phases, done, generation = _look_inside(machine, folder)
        if phases[-3:] != ["flushing", "parked", "halting"] or not done or generation is None:
            raise DrillFailed(f"complete: the journal tells {phases}, halt done: {done}; {generation}")
        say(f"complete: its journal tells {' > '.join(phases)}, halted for real; {generation.name} verifies")


def _train(machine: Machine, address: str) -> float:
    """Boots it; seconds until training has saved, and the daemon is logged in to the UPS."""
    machine.boot()
    ups = UpsAddress.parse(address)
    seconds = machine.until("training", lambda: machine.told("saved"), WAIT_S)
    return seconds + machine.until("the LOGIN", lambda: _logins(ups) > 0, WAIT_S)


def _logins(ups: UpsAddress) -> int:
    with CheckedClient(ups.host, ups.port) as client:
        return client.num_logins(ups.ups)


def _boot_again(machine: Machine) -> float:
    machine.boot()
    return machine.until("training again", lambda: machine.told("resumed"), WAIT_S)


def _until_off(machine: Machine, supply: Supply) -> None:
    """Until it has switched itself off, as a node must before its battery is flat."""
    begun = time.monotonic()
    while not machine.off:
        if supply.flat:
            machine.kill()
            raise DrillFailed("complete: the battery was flat before the node was off")
        if time.monotonic() - begun > WAIT_S:
            raise DrillFailed(f"complete: not off after {WAIT_S:.0f} s")
        time.sleep(LOOK_S)


def _drain(supply: Supply) -> None:
    """What is left of the battery goes, with the node off."""
    supply.load(PLANS["blackout"].loads.halted)
    supply.lapse(max(1.0, supply.truth_s() / 3.0))
    while not supply.flat:
        time.sleep(LOOK_S)


def _look_inside(machine: Machine, folder: Path) -> tuple[list[str], bool, Generation | None]:
    """The disk, taken out and mounted here: (phases of the first boot, whether that halted, the newest generation)."""
    image, where = folder / "out.img", folder / "out"
    machine.disk.save(image)
    where.mkdir()
    subprocess.run(["mount", "-o", "loop", image, where], check=True, capture_output=True)
    try:
        records = [record for path in _first_boot(where / STATE) for record in journal.read(path).records]
        phases = [tick.phase.value for tick in records if isinstance(tick, Tick)]
        found = latest(where / CHECKPOINTS)
        return (
            [phase for phase, before in zip(phases, ["", *phases], strict=False) if phase != before],
            any(isinstance(record, Done) and record.done and record.real for record in records),
            found.generation,
        )
    finally:
        subprocess.run(["umount", where], check=False, capture_output=True)
        where.rmdir()
        image.unlink()


def _first_boot(state: Path) -> list[Path]:
    heads = {path: journal.read(path).head for path in sorted(state.glob("journal-*"))}
    known = [(head.created, path, head.boot) for path, head in heads.items() if head is not None]
    first = min(known)[2] if known else ""
    return [path for _, path, boot in sorted(known) if boot == first]


# ---- a battery that lies ---------------------------------------------------------------------------


def lying(image: Image, folder: Path, say: Say) -> None:
    """The UPS promises 20 minutes; the plug goes in the middle of the flush. The checkpoint before it counts."""
    healthy = {"ups.status": "OL", "battery.charge": "100", "battery.runtime": "1200", "ups.load": "60"}
    with RealNut({UPS: healthy}) as nut, _machine(image, folder, nut.port) as machine:
        _train(machine, nut.address(UPS))
        saved = machine.told("saved")[0][0]
        machine.disk.cut_at(MID_FLUSH_BYTES, machine.kill)
        nut.set(UPS, {"ups.status": "OB DISCHRG"})
        begun = time.monotonic()
        while not machine.off:
            if time.monotonic() - begun > WAIT_S:
                raise DrillFailed("lying: the flush never came")
            time.sleep(LOOK_S)
        if machine.disk.cuts != 1 or machine.told("stopped"):
            raise DrillFailed("lying: the machine went off by itself")
        steps = machine.told("step")
        say(
            f"lying: the plug went {time.monotonic() - begun:.0f} s into the outage, in the flush after step "
            f"{steps[-1][0]}, with {MID_FLUSH_BYTES / MB:.0f} MB of it in the disk's cache, of which "
            f"{machine.disk.lost_blocks} blocks were lost"
        )
        nut.set(UPS, {"ups.status": "OL"})
        boot_s = _boot_again(machine)
        resumed, values = machine.told("resumed")[0]
        if (values, int(resumed)) != ("right", int(saved) + 1):
            raise DrillFailed(f"lying: step {saved} was saved, resumed at {resumed} ({values})")
        machine.until("a step", lambda: len(machine.told("step")) > 3, WAIT_S)
        say(
            f"lying: up again after {boot_s:.0f} s, resumed at step {resumed}, from the checkpoint before, with every "
            "value right; the half-written one was not taken"
        )

"""`powerguard slurm`: a node on battery gets no new jobs, and a saved job goes back into the queue."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import time
from typing import Annotated

import typer

from powerguard.cli.ask import ConfigFile, RunDir, fetch, run_dir_of
from powerguard.cli.limits import within
from powerguard.cli.out import say, warn, without_digits
from powerguard.errors import EXIT_REQUEUE, DaemonUnreachable, NotReady
from powerguard.integrations.slurm import SETUP, DrainOn, Power, Slurm, SlurmError, Step, due

Node = Annotated[
    str,
    typer.Option(
        envvar="SLURMD_NODENAME", help="this node as Slurm calls it; default: its host name", show_default=False
    ),
]
On = Annotated[DrainOn, typer.Option("--drain-on", help="not-ready: also on line power while batteries are too low")]
Scontrol = Annotated[str, typer.Option(help="Slurm's own command")]


def register(app: typer.Typer) -> None:
    """Adds the commands to *app*."""
    group = typer.Typer(no_args_is_help=True, help="Keep a Slurm node in step with its power.")
    for command in (watch, sync, prolog, requeue, setup):
        group.command()(command)
    app.add_typer(group, name="slurm")


def sync(
    node: Node = "",
    drain_on: On = DrainOn.BATTERY,
    file: ConfigFile = None,
    run_dir: RunDir = "",
    scontrol: Scontrol = "scontrol",
) -> None:
    """Drain or give back this node, once, as its power has it now."""
    slurm = _slurm(node, scontrol)
    say(_told(_bring(slurm, run_dir_of(file, run_dir), drain_on)))


def watch(
    *,
    node: Node = "",
    drain_on: On = DrainOn.BATTERY,
    every: Annotated[float, typer.Option(help="seconds between looks, 1 to 600")] = 5.0,
    file: ConfigFile = None,
    run_dir: RunDir = "",
    scontrol: Scontrol = "scontrol",
) -> None:
    """Drain this node while it is on battery, and give it back once its batteries carry a job. Until Ctrl-C.

    Only what powerguard drained is given back. While the daemon or slurmctld doesn't answer nothing is changed.
    """
    within("--every", every, 1.0, 600.0, todo="give seconds")
    slurm, where, said = _slurm(node, scontrol), run_dir_of(file, run_dir), ""
    with contextlib.suppress(KeyboardInterrupt):
        while True:
            try:
                told, tell = _told(_bring(slurm, where, drain_on)), say
            except (DaemonUnreachable, SlurmError) as error:
                told, tell = f"nothing changed: {error}", warn
            kind = without_digits(told)
            if kind != said:  # a state is told once, not at every look
                said = kind
                tell(told)
            time.sleep(every)


def prolog(
    node: Node = "",
    strict: Annotated[bool, typer.Option("--strict", help="refuse the job if no daemon answers, too")] = False,
    file: ConfigFile = None,
    run_dir: RunDir = "",
    scontrol: Scontrol = "scontrol",
) -> None:
    """For slurmd's Prolog: code 17 (the job goes back into the queue) while batteries don't carry a flush and a halt.

    The node is drained with powerguard's reason first, so that `watch` gives it back.
    """
    try:
        now = fetch(run_dir_of(file, run_dir))
    except DaemonUnreachable as error:
        if strict:
            raise
        warn(f"this job isn't protected: {error}")
        return
    if not now.gate:
        return
    try:
        slurm = _slurm(node, scontrol)
        slurm.act(due(Power(now.phase, now.on_battery, now.gate), slurm.look(), DrainOn.NOT_READY))
    except SlurmError as error:
        warn(f"the node couldn't be drained: {error}")
    raise NotReady(now.gate, todo="the job waits in the queue")


def requeue(scontrol: Scontrol = "scontrol") -> None:
    """In a job script, after ranks left with code 75: put this job back into the queue."""
    job = os.environ.get("SLURM_ARRAY_JOB_ID", "")
    task = os.environ.get("SLURM_ARRAY_TASK_ID", "")
    name = f"{job}_{task}" if job and task else os.environ.get("SLURM_JOB_ID", "")
    _slurm("", scontrol).requeue(name)
    say(f"job {name} is back in the queue")


def setup() -> None:
    """Print what goes where: slurm.conf, a prolog, a unit and a job script. Changes nothing."""
    where = shutil.which("powerguard") or "/usr/bin/powerguard"
    say(SETUP.format(code=EXIT_REQUEUE, powerguard=where, prolog="/etc/slurm/prolog.d/50-powerguard.sh").rstrip())


def _slurm(node: str, scontrol: str) -> Slurm:
    return Slurm(node or socket.gethostname().split(".")[0], scontrol=scontrol)


def _bring(slurm: Slurm, run_dir: str, drain_on: DrainOn) -> tuple[str, Step]:
    now = fetch(run_dir)
    step = due(Power(now.phase, now.on_battery, now.gate), slurm.look(), drain_on)
    slurm.act(step)
    return slurm.node, step


def _told(done: tuple[str, Step]) -> str:
    node, step = done
    verb = {"drain": "drained: ", "resume": "given back: "}.get(step.verb, "")
    return f"{node}: {verb}{step.reason}"

"""A node's state in Slurm, kept in step with its power: drained on battery, given back once the batteries carry a job.

What counts is the state, not an event: whoever missed one puts it right at the next look. Only what powerguard drained
is given back, known by its reason. With nobody to ask (no daemon, no slurmctld) nothing is changed.
"""

from __future__ import annotations

import re
import subprocess
from enum import Enum

from msgspec import Struct

from powerguard.errors import PowerguardError, UsageError

MARK = "powerguard: "
"""How the reason of a drain of ours begins."""

REASON_MAX = 200
"""Characters of a reason; Slurm shows it in one column."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_REASON = re.compile(r"\bReason=(.*?)(?: \[[^\]]*\])?(?: Comment=.*)?$")


class SlurmError(PowerguardError):
    """Slurm can't be asked, or refused."""


class DrainOn(str, Enum):
    """When a node gets no new jobs."""

    BATTERY = "battery"  # in an outage, from its first second until the node may begin anew
    NOT_READY = "not-ready"  # also on line power, while the batteries don't carry a flush and a halt


class NodeState(Struct, frozen=True):
    """What slurmctld says of a node."""

    state: str  # for example "MIXED+DRAIN"
    reason: str = ""

    @property
    def drained(self) -> bool:
        """It gets no new jobs: draining, drained, or down."""
        return bool({"DRAIN", "DRAINED", "DRAINING", "DOWN"} & set(self.state.upper().replace("*", "").split("+")))

    @property
    def ours(self) -> bool:
        """The drain is powerguard's."""
        return self.drained and self.reason.startswith(MARK)


class Power(Struct, frozen=True):
    """What a drain depends on, as the daemon's status has it."""

    phase: str
    on_battery: bool | None
    gate: str  # why no training should begin now; "" = it may


class Step(Struct, frozen=True):
    """What to do: "drain" or "resume" with the reason, or "" with why nothing."""

    verb: str
    reason: str


def due(power: Power, node: NodeState, drain_on: DrainOn = DrainOn.BATTERY) -> Step:
    """What brings *node* in step with *power*. Pure."""
    outage = power.phase != "online" or power.on_battery is True
    if outage or (power.gate and drain_on is DrainOn.NOT_READY):
        if node.drained:
            return Step("", f"out of service already: {node.reason or node.state}")
        return Step("drain", (MARK + (power.gate or "on battery"))[:REASON_MAX])
    if power.gate:
        return Step("", f"not ready for new jobs: {power.gate}")
    if not node.drained:
        return Step("", "in service")
    if not node.ours:
        return Step("", f"drained by somebody else, and left so: {node.reason or node.state}")
    return Step("resume", "the batteries carry a flush and a halt again")


class Slurm:
    """`scontrol` for one node, every call bounded by *answer_s*. Raises SlurmError, and UsageError for a bad name."""

    def __init__(self, node: str, *, scontrol: str = "scontrol", answer_s: float = 15.0) -> None:
        if not _NAME.fullmatch(node):
            raise UsageError(f"{node!r} isn't the name of a node", todo="give --node as sinfo -N shows it")
        self.node, self._scontrol, self._answer_s = node, scontrol, answer_s

    def look(self) -> NodeState:
        """The node's state now."""
        said = self._call("show", "node", self.node, "--oneliner").strip()
        state = re.search(r"\bState=(\S+)", said)
        if state is None:
            raise SlurmError(f"scontrol says nothing of {self.node}", todo="give --node as sinfo -N shows it")
        reason = _REASON.search(said)
        return NodeState(state.group(1), reason.group(1).strip() if reason else "")

    def act(self, step: Step) -> None:
        """Carries *step* out."""
        if step.verb == "drain":
            self._update("state=drain", f"reason={step.reason}")
        elif step.verb == "resume":
            self._update("state=resume")

    def requeue(self, job: str) -> None:
        """Puts *job* back into the queue; Slurm ends what is left of it."""
        if not re.fullmatch(r"[0-9]+(_[0-9]+)?", job):
            raise UsageError(f"{job!r} isn't a job", todo="run it inside the job, where SLURM_JOB_ID is set")
        self._call("requeue", job)

    def _update(self, *what: str) -> None:
        self._call("update", f"nodename={self.node}", *what)

    def _call(self, *words: str) -> str:
        try:
            done = subprocess.run(
                [self._scontrol, *words], capture_output=True, text=True, timeout=self._answer_s, check=False
            )
        except FileNotFoundError:
            raise SlurmError(
                f"there is no {self._scontrol} here", todo="install Slurm's client, or give --scontrol"
            ) from None
        except OSError as error:
            raise SlurmError(f"{self._scontrol} can't be run: {error.strerror}", todo="give --scontrol") from None
        except subprocess.TimeoutExpired:
            raise SlurmError(
                f"slurmctld doesn't answer within {self._answer_s:.0f} s", todo="see: scontrol ping"
            ) from None
        if done.returncode:
            why = (done.stderr or done.stdout).strip().splitlines() or ["no reason given"]
            todo = (
                "run it as root or as SlurmUser"
                if "ermission" in why[-1] or "Access" in why[-1]
                else "see: scontrol ping"
            )
            raise SlurmError(f"scontrol {' '.join(words[:2])}: {why[-1]}", todo=todo)
        return done.stdout


SETUP = """\
# slurm.conf, on the controller -------------------------------------------------------------------------------
# A job whose ranks were saved and left exits with {code}: it goes back into the queue by itself.
RequeueExit={code}
JobRequeue=1
# A prolog that fails before the job begins requeues it; without Alloc it runs only with the first step.
PrologFlags=Alloc
Prolog={prolog}

# {prolog}, on each node (root, 0755) -------------------------------------------
#!/bin/sh
# No job begins while the batteries don't carry a flush and a halt.
exec {powerguard} slurm prolog --node "$SLURMD_NODENAME"

# /etc/systemd/system/powerguard-slurm.service, on each node --------------------------------------------------
[Unit]
Description=Drain this node in Slurm while it is on battery
Documentation=man:scontrol(1)
After=powerguard.service slurmd.service
Wants=powerguard.service

[Service]
# SlurmUser may update nodes; the group lets it ask the daemon.
User=slurm
Group=powerguard
ExecStart={powerguard} slurm watch
Restart=always
RestartSec=10

[Install]
WantedBy=multi-user.target

# a job script ------------------------------------------------------------------------------------------------
#!/bin/bash
#SBATCH --requeue
#SBATCH --open-mode=append
# The ranks' own exit code must become the script's; `exec` or `exit $?` do that.
srun python train.py        # guard.resume() goes on from the newest whole generation
status=$?
# Where RequeueExit can't be set:  [ $status -eq {code} ] && {powerguard} slurm requeue
exit $status
"""
"""What `powerguard slurm setup` prints."""

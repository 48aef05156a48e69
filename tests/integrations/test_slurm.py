"""When a node is drained in Slurm and when it is given back; what a scontrol that fails leads to."""

from __future__ import annotations

import os
import stat

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.cli import run
from powerguard.errors import UsageError
from powerguard.integrations.slurm import MARK, REASON_MAX, DrainOn, NodeState, Power, Slurm, SlurmError, due

ON_LINE = Power("online", False, "")
IDLE = NodeState("IDLE")
OURS = NodeState("IDLE+DRAIN", f"{MARK}on battery")


@pytest.mark.parametrize(
    ("power", "node", "verb"),
    [
        (ON_LINE, IDLE, ""),
        (Power("on_battery", True, "the node is on battery"), IDLE, "drain"),
        (Power("parked", True, "the node is parked"), NodeState("MIXED"), "drain"),
        (Power("parked", False, "the node is parked"), IDLE, "drain"),  # mains are back, not believed yet
        (Power("on_battery", True, "x"), OURS, ""),
        (Power("online", False, "runway 40 s < need 90 s"), OURS, ""),  # low batteries: not yet
        (Power("online", None, "not known to be on line power"), OURS, ""),
        (Power("online", None, "not known to be on line power"), IDLE, ""),
        (ON_LINE, OURS, "resume"),
        (ON_LINE, NodeState("MIXED+DRAIN", f"{MARK}on battery"), "resume"),
        (ON_LINE, NodeState("IDLE+DRAIN", "broken fan"), ""),
        (ON_LINE, NodeState("DOWN", "Not responding"), ""),
        (ON_LINE, NodeState("DOWN*+DRAIN", f"{MARK}the node is halting"), "resume"),
    ],
)
def test_the_node_follows_its_power(power: Power, node: NodeState, verb: str):
    """Drained in an outage, given back when ready; somebody else's drain and an unknown power change nothing."""
    assert due(power, node).verb == verb


def test_low_batteries_drain_only_where_that_is_wanted():
    """not-ready also drains on line power."""
    low = Power("online", False, "runway 40 s < need 90 s")
    assert due(low, IDLE, DrainOn.BATTERY).verb == ""
    assert due(low, IDLE, DrainOn.NOT_READY).verb == "drain"


states = st.builds(
    NodeState, st.sampled_from(["IDLE", "IDLE+DRAIN", "DOWN", "MIXED+DRAIN"]), st.sampled_from(["", "x", MARK + "y"])
)
phases = st.sampled_from(["online", "on_battery", "flushing", "parked", "halting"])
powers = st.builds(Power, phases, st.sampled_from([True, False, None]), st.text())


@given(powers, states, st.sampled_from(DrainOn))
def test_only_our_own_drain_is_ever_taken_back(power: Power, node: NodeState, on: DrainOn):
    """Whatever the power: resume only ends a drain of ours, on known line power with an open gate."""
    step = due(power, node, on)
    if step.verb == "resume":
        assert node.ours
        assert power == Power("online", power.on_battery, "")
        assert power.on_battery is not True
    if step.verb == "drain":
        assert not node.drained
        assert step.reason.startswith(MARK)
        assert len(step.reason) <= REASON_MAX


def scontrol(folder, script: str) -> str:
    path = folder / "scontrol"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_reason_with_blanks_is_read_whole(tmp_path):
    """scontrol's one line ends with the reason, its author and the time."""
    line = "NodeName=n1 State=IDLE+DRAIN CPUTot=2 Reason=powerguard: on battery for 3 s [root@2026-01-02T03:04:05]"
    found = Slurm("n1", scontrol=scontrol(tmp_path, f"echo '{line}'")).look()
    assert found == NodeState("IDLE+DRAIN", "powerguard: on battery for 3 s")
    assert found.ours


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("echo 'slurm_update error: Access/permission denied' >&2; exit 1", "run it as root or as SlurmUser"),
        ("exit 1", "no reason given"),
        ("echo nonsense", "says nothing of n1"),
    ],
)
def test_a_scontrol_that_fails_is_told_with_what_to_do(tmp_path, script, words):
    """Never a traceback, always the last word of scontrol."""
    with pytest.raises(SlurmError, match=words):
        Slurm("n1", scontrol=scontrol(tmp_path, script)).look()


@pytest.mark.slow
def test_a_silent_slurmctld_is_not_waited_for(tmp_path):
    """Bounded."""
    with pytest.raises(SlurmError, match="doesn't answer within"):
        Slurm("n1", scontrol=scontrol(tmp_path, "exec sleep 30"), answer_s=0.3).look()


def test_no_scontrol_at_all(tmp_path):
    """The path is named."""
    with pytest.raises(SlurmError, match="there is no /nowhere/scontrol here"):
        Slurm("n1", scontrol="/nowhere/scontrol").look()


@pytest.mark.parametrize("name", ["", "-a", "n1 state=idle", "n1;x", "x" * 80])
def test_a_name_that_isnt_one_is_refused(name):
    """Nothing but a node's name reaches scontrol."""
    with pytest.raises(UsageError):
        Slurm(name)


def test_requeue_outside_a_job_is_refused(monkeypatch, capsys):
    """Exit code 2 and what to do."""
    for name in [name for name in os.environ if name.startswith("SLURM")]:
        monkeypatch.delenv(name)
    assert run(["slurm", "requeue"]) == 2
    assert "SLURM_JOB_ID" in capsys.readouterr().err


def test_without_a_daemon_nothing_is_drained(tmp_path, capsys):
    """sync says that nobody answers (10); a prolog lets the job begin and warns, unless it is strict."""
    log = tmp_path / "called"
    options = ["--run-dir", str(tmp_path), "--node", "n1", "--scontrol", scontrol(tmp_path, f"touch {log}")]
    assert run(["slurm", "sync", *options]) == 10
    assert run(["slurm", "prolog", *options]) == 0
    assert "isn't protected" in capsys.readouterr().err
    assert run(["slurm", "prolog", "--strict", *options]) == 10
    assert not log.exists()


def test_setup_prints_what_goes_where(capsys):
    """The code to requeue on, a prolog, a unit, a job script."""
    assert run(["slurm", "setup"]) == 0
    text = capsys.readouterr().out
    for word in ("RequeueExit=75", "slurm prolog", "slurm watch", "#SBATCH --requeue", "exit $status"):
        assert word in text

"""A job in a real Slurm lives through an outage: saved, requeued, kept off the node, resumed when it is given back."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from powerguard.generations import latest

pytest.importorskip("torch")
pytestmark = [pytest.mark.slow, pytest.mark.e2e, pytest.mark.root, pytest.mark.torch]

TRAIN = Path(__file__).with_name("train.py")
ROOT = Path(__file__).resolve().parents[2]


def powerguard(cluster, daemon, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "powerguard.cli", "slurm", *words, "--node", "localhost"]
    env = {**cluster.env, "POWERGUARD_RUN_DIR": str(daemon.process.run_dir), "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.timeout(400)
def test_from_outage_to_resume(cluster, ups, powerguard_daemon, tmp_path):
    """Running -> outage -> flush -> exit code 75 -> requeued -> node drained -> mains back -> given back -> resumed."""
    daemon, told, checkpoints = powerguard_daemon, tmp_path / "told", tmp_path / "checkpoints"
    script = tmp_path / "job.sh"
    script.write_text(
        f"#!/bin/sh\n#SBATCH --requeue --open-mode=append --output={tmp_path}/job.log\n"
        f"exec {sys.executable} {TRAIN} {checkpoints} {told}\n"
    )
    passed = {**daemon.env, "PYTHONPATH": str(ROOT), "POWERGUARD_JOB_ID": "slurm-run"}
    number = cluster.call("sbatch", "--parsable", "--export=ALL", str(script), **passed).strip()
    cluster.until(lambda: min(daemon.steps(), default=0) >= 3, "steps of the job")

    ups.cut_mains()
    daemon.wait_for("parked", 60.0)
    drained = powerguard(cluster, daemon, "sync")
    assert drained.returncode == 0, drained.stderr
    assert "State=MIXED+DRAIN" in cluster.node()
    assert "Reason=powerguard: the node is" in cluster.node()

    ups.supply.lapse(4.0)  # parked ranks could wait for long
    cluster.until(lambda: daemon.halted, "halt", 120.0)
    cluster.until(lambda: cluster.job(number)["JobState"] == "PENDING", "requeue")
    assert cluster.job(number)["Restarts"] == "1"
    saved = latest(checkpoints).generation
    assert saved is not None

    daemon.cut()  # the node is off; the mains return; it boots
    ups.restore_mains()
    ups.supply.lapse(240.0)  # the batteries charge, four hours in a minute
    (tmp_path / "fast").touch()
    daemon.start()
    assert cluster.job(number)["JobState"] == "PENDING"  # the drain outlived the boot
    cluster.until(lambda: "given back" in powerguard(cluster, daemon, "sync").stdout, "the node given back", 120.0)
    # Slurm holds a requeued job back for two minutes
    cluster.call("scontrol", "update", f"jobid={number}", "StartTime=now")
    cluster.until(lambda: "ended" in told.read_text(), f"end of the run ({tmp_path}/job.log)", 120.0)
    assert "DRAIN" not in cluster.node()
    first, second, ended = told.read_text().splitlines()
    assert (first, second) == ("began 0", f"began {saved.step + 1}")
    assert ended == undisturbed(tmp_path)


def undisturbed(folder: Path) -> str:
    """What the same run ends with when nobody interrupts it."""
    alone = folder / "alone"
    alone.mkdir()
    (alone / "fast").touch()
    command = [sys.executable, str(TRAIN), str(alone / "checkpoints"), str(alone / "told")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "POWERGUARD_SOCKET": str(alone / "nobody")}
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=120)
    return (alone / "told").read_text().splitlines()[-1]


def test_a_prolog_keeps_jobs_off_low_batteries(cluster, ups, powerguard_daemon, tmp_path):
    """In an outage the prolog sends a job back into the queue, and the node is drained with our reason, not Slurm's."""
    cluster.prolog.write_text(
        f"#!/bin/sh\nexport SLURM_CONF={cluster.env['SLURM_CONF']} PYTHONPATH={ROOT} PATH=$PATH:/usr/bin:/bin\n"
        f'exec {sys.executable} -m powerguard.cli slurm prolog --node "$SLURMD_NODENAME"'
        f" --run-dir {powerguard_daemon.process.run_dir}\n"
    )
    ups.cut_mains()
    powerguard_daemon.wait_for("parked", 60.0)
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    number = cluster.call("sbatch", "--parsable", "--output=/dev/null", str(script)).strip()
    cluster.until(lambda: "Reason=powerguard: the node is" in cluster.node(), "drained node")
    cluster.until(lambda: cluster.job(number)["JobState"] == "PENDING", "job in the queue")
    assert "DRAIN" in cluster.node()
    assert not (tmp_path / "ran").exists()

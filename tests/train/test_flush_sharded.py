"""Sharded and replicated state of several real ranks, and its way to other world sizes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(300)]

RANKS = Path(__file__).with_name("ranks.py")


def run(directory: Path, *stages: str) -> list[dict[str, Any]]:
    """Rank 0's answer in each stage."""
    done = subprocess.run(
        [sys.executable, str(RANKS), str(directory), *stages], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def test_fsdp2_shards_and_their_way_to_other_world_sizes(tmp_path):
    """Each rank saves and loads its own; stock dcp.load takes the export at 1 and 4 ranks, and under DDP.

    The same checkpoint, imported, is a generation that any number of ranks take their own part of.
    """
    made, *others = run(
        tmp_path,
        "save_and_go_on:fsdp:2",
        "load_stock:fsdp:1",
        "load_stock:fsdp:4",
        "load_stock:ddp:2",
        "load_import:fsdp:4",
        "load_import:ddp:2",
    )
    assert len(others) == 5
    for got in others:
        assert got["whole"] == made["whole"]
        assert got["losses"] == pytest.approx(made["losses"], rel=1e-4)


def test_ddp_replicas_and_their_way_to_fsdp(tmp_path):
    """Replicas are saved by each rank; the export is the same state for FSDP2 at another world size."""
    made, got = run(tmp_path, "save_and_go_on:ddp:2", "load_stock:fsdp:4")
    assert got["whole"] == made["whole"]


def test_periodic_saves_without_a_daemon(tmp_path):
    """Ranks name, seal and resume by themselves; damage that one rank meets makes all fall back together."""
    (got,) = run(tmp_path, "periodic:ddp:2")
    assert got["step"] == 2
    (skipped,) = got["skipped"]
    assert "rank 1: rank-00001's shard doesn't match" in skipped


def test_directories_of_their_own_are_refused_at_the_start(tmp_path):
    """A generation that lies in several directories would never be whole: said before anything is trained."""
    (got,) = run(tmp_path, "apart:ddp:3")
    first, *others = got["told"]
    assert first == ""
    assert all("isn't the one that rank 0 sees" in word for word in others)


def test_directories_of_other_names_are_refused_as_well(tmp_path):
    """Names that hold the node's are no reason to wait for a rank that will never answer."""
    (got,) = run(tmp_path, "named_apart:ddp:3")
    first, *others = got["told"]
    assert first == ""
    assert all("isn't the one that rank 0 sees" in word for word in others)


def test_one_directory_may_have_many_names(tmp_path):
    """What counts is that all see the same: ranks agree on a name, and on what to load."""
    (got,) = run(tmp_path, "many_names:ddp:2")
    assert got["values"] == [{"rank": 0}, {"rank": 1}]


def torchrun(directory: Path, *options: str, **env: str) -> subprocess.Popen[str]:
    """One agent with its ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-id", "4711", *options]
    env = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "POWERGUARD_"))} | env
    return subprocess.Popen(
        [*command, str(RANKS), str(directory)], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def answers(*agents: subprocess.Popen[str]) -> list[dict[str, Any]]:
    """What rank 0 has printed, under whichever agent it was."""
    try:
        out = [agent.communicate(timeout=120) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert all(agent.returncode == 0 for agent in agents), "".join(err[-3000:] for _, err in out)
    return [json.loads(line) for text, _ in out for line in text.splitlines() if line.startswith("{")]


def test_torchrun_s_ranks_agree_before_torch_distributed_is_initialised(tmp_path):
    """Two starts of one id, as of a job that is requeued, have names of their own; the process group comes later."""
    options = ("--rdzv-endpoint", "localhost:0", "--nproc-per-node", "2")
    names = set()
    for _ in range(2):
        (got,) = answers(torchrun(tmp_path, *options))
        for attempts in (got["attempts"], got["afterwards"]):
            assert attempts == attempts[:1] * 2
            names.add(attempts[0])
    assert len(names) == 4


def test_torchrun_s_ranks_agree_after_a_restart(tmp_path):
    """torchrun's store holds what the first life left, and a restart counts on the node alone whose rank has died."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    options = ("--rdzv-endpoint", f"localhost:{port}", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", "2")
    (got,) = answers(*[torchrun(tmp_path, *options, "--monitor-interval", "0.1", DYING="1") for _ in range(2)])
    assert sorted(got["restarts"]) == ["0", "1"]
    assert got["attempts"] == got["attempts"][:1] * 2
    marks = {path.name for path in (tmp_path / "shared" / ".powerguard").rglob("*") if path.is_file()}
    assert got["attempts"][0] in marks


def test_the_durable_dcp_writer_with_several_ranks(tmp_path):
    """All ranks write through it, stock dcp.load reads, and training goes on the same."""
    (got,) = run(tmp_path, "durable_dcp:fsdp:2")
    assert len(got["losses"]) == 2

"""Sharded and replicated state of several real ranks, and its way to other world sizes."""

from __future__ import annotations

import json
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


def test_the_durable_dcp_writer_with_several_ranks(tmp_path):
    """All ranks write through it, stock dcp.load reads, and training goes on the same."""
    (got,) = run(tmp_path, "durable_dcp:fsdp:2")
    assert len(got["losses"]) == 2

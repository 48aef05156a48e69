"""What ranks hold alike is written once: real gloo ranks under DDP, FSDP2 and HSDP, which load it back bit by bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(900)]

ALL = bool(os.environ.get("POWERGUARD_TEST_REPLICAS"))
full = pytest.mark.skipif(not ALL, reason="set POWERGUARD_TEST_REPLICAS=1")
RANKS = Path(__file__).with_name("replica_ranks.py")
COPY = 3 * 4 * (600 * 1400 + 1400 * 3 + 30 * 1400 + 30)
"""One copy of the parameters and their two moments."""
OWN = 60_000
"""What each rank has to itself (buffers, noise, random states, the header), at most."""


STAGES = ("ddp:2:local:", "ddp:4:local:", "hsdp:4:local:", "fsdp:2:local:")
MORE = ("ddp:2:shared:1,0", "ddp:4:shared:1,1,0,0", "ddp:4:apart:", "said:2:local:")
"""Played if POWERGUARD_TEST_REPLICAS is set: test_replicas.py shows the same without processes."""


@pytest.fixture(scope="module")
def told(tmp_path_factory) -> dict[str, dict[str, Any]]:
    """Rank 0's answer in each stage; all in one process, which imports torch once."""
    directory = tmp_path_factory.mktemp("replicas")
    stages = STAGES + (MORE if ALL else ())
    done = subprocess.run(
        [sys.executable, str(RANKS), str(directory), *stages], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-5000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert sorted(stages) == sorted(line["stage"] for line in lines)
    return {line["stage"]: line for line in lines}


@pytest.mark.parametrize("world", [2, 4])
def test_replicas_of_one_node_write_one_copy_between_them(told, world):
    """Ranks under DDP write equal parts; each loads all of its state from all of them, bit by bit, and no more.

    A wrong byte in one rank's part is met by every rank that needs it.
    """
    got = told[f"ddp:{world}:local:"]
    assert sum(got["held"]) > world * COPY
    assert COPY < sum(got["shards"]) < COPY + world * OWN
    assert max(got["shards"]) < COPY / world * 1.1 + OWN
    assert all("rank-00001's shard doesn't match" in said for said in got["lost"])


def test_hsdp_replicas_write_each_shard_once_and_fsdp_its_own(told):
    """On a mesh of 2 replicas by 2 shards, a shard's two replicas write half of it each; FSDP2 alone splits nothing."""
    hsdp, fsdp = told["hsdp:4:local:"], told["fsdp:2:local:"]
    for got, world in ((hsdp, 4), (fsdp, 2)):
        assert COPY < sum(got["shards"]) < COPY + world * OWN
    assert max(hsdp["shards"]) < COPY / 4 * 1.1 + OWN
    assert sum(hsdp["held"]) > 2 * COPY > sum(fsdp["held"])
    assert [bool(said) for said in fsdp["lost"]] == [False, True]


@full
def test_ranks_whose_power_lasts_longer_write_more(told):
    """By weight: one of two ranks takes it all, or two of four half each; memory for that was made beforehand."""
    two, four = told["ddp:2:shared:1,0"], told["ddp:4:shared:1,1,0,0"]
    assert two["shards"][0] > COPY > OWN > two["shards"][1]
    assert two["no_new_memory"]
    assert four["no_new_memory"]
    assert all(COPY / 2 / 1.1 < size < COPY / 2 * 1.1 + OWN for size in four["shards"][:2])
    assert all(size < OWN for size in four["shards"][2:])


@full
def test_the_shards_of_each_node_are_a_whole_copy(told):
    """storage="local": ranks split within their node, and need no other node's shards for what they hold alike."""
    got = told["ddp:4:apart:"]
    for node in ((0, 1), (2, 3)):
        assert COPY < sum(got["shards"][rank] for rank in node) < COPY + 2 * OWN


@full
def test_what_the_user_says_is_alike_is_written_once(told):
    """Without DDP nothing is known to be alike: only what `replicated` names is split, the rest is each rank's own."""
    got = told["said:2:local:"]
    assert 2 * COPY + COPY / 3 < sum(got["shards"]) < 2 * COPY + COPY / 3 + 3 * OWN

"""State that ranks hold alike, split between flushers of one process: what is written, found, refused and loaded."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

from powerguard.errors import CheckpointError, StateError, UsageError  # noqa: E402
from powerguard.flusher.writing import Pen  # noqa: E402
from powerguard.generations import generation_name, latest, scan, seal, verify  # noqa: E402
from powerguard.generations.ledger import Facts  # noqa: E402
from powerguard.generations.names import RECORD, SHARD, rank_name  # noqa: E402
from powerguard.train.flush import Flusher  # noqa: E402
from powerguard.train.log import Log  # noqa: E402
from powerguard.train.replicas import Replicas, node_ranks  # noqa: E402
from powerguard.train.staging import Staging  # noqa: E402

ROWS = 300_000
WORLD = 3


def state_of(rank: int, seed: int = 0) -> dict[str, Any]:
    """Alike but for "mine"."""
    torch.manual_seed(seed)
    big = torch.randn(ROWS, 4)
    tied = torch.randn(3000)
    return {
        "w": {
            "big": big,
            "half": torch.randn(200, 300).to(torch.bfloat16),
            "turned": torch.randn(400, 500).t(),
            "image": torch.randn(8, 16, 20, 20).to(memory_format=torch.channels_last),
            "tied": tied,
            "again": tied,
            "tail": tied[100:2000],
            "complex": torch.randn(1000, dtype=torch.complex64),
            "small": torch.tensor(7),
            "none": torch.empty(0),
        },
        "mine": {"x": torch.full((5000,), float(rank)), "rank": rank},
    }


@pytest.fixture
def flushers(tmp_path):
    """One for each rank, of one shared directory."""
    made = [
        Flusher(tmp_path, rank=rank, world_size=WORLD, reserve=False, storage="shared", replicated=["w"])
        for rank in range(WORLD)
    ]
    yield made
    for flusher in made:
        flusher.close()


def save(
    flushers: list[Flusher], *, weights: Any = None, states: Any = None, name: str = generation_name(3, "x")
) -> Any:
    """The records of a generation that all have written."""
    records = []
    for rank, flusher in enumerate(flushers):
        state = states[rank] if states else state_of(rank)
        given = weights[rank] if weights else ()
        records.append(flusher.write(flusher.stage(state, 3, weights=given), name).record)
    return records


def check_loaded(state: dict[str, Any], rank: int) -> None:
    expected = state_of(rank)
    for name, value in expected["w"].items():
        assert torch.equal(state["w"][name], value), name
        assert state["w"][name].stride() == value.stride(), name
    assert torch.equal(state["mine"]["x"], expected["mine"]["x"])
    assert state["mine"]["rank"] == rank


def test_replicas_write_one_copy_and_each_loads_the_whole(flushers, tmp_path):
    """Big, small, turned, tied, half and complex tensors: one copy in all, loaded whole by each, in place or anew."""
    records = save(flushers)
    name = generation_name(3, "x")
    seal(tmp_path, name, step=3, world_size=WORLD, shards=records)
    found = latest(tmp_path).generation
    copy = sum(value.nbytes for key, value in state_of(0)["w"].items() if key not in ("again", "tail"))
    shards = [(tmp_path / name / rank_name(rank) / SHARD).stat().st_size for rank in range(WORLD)]

    assert [] == verify(found)
    assert copy < sum(shards) < copy + WORLD * 45_000
    assert max(shards) < copy / WORLD + 1_500_000  # what can't be cut is as large
    for rank, flusher in enumerate(flushers):
        there = state_of(9, seed=5)
        flusher.load(found, there)
        check_loaded(there, rank)
        anew: dict[str, Any] = {"w": {}, "mine": {}}
        flusher.load(found, anew)
        check_loaded(anew, rank)


def test_a_split_record_is_of_another_format(flushers, tmp_path):
    """An older reader refuses it instead of missing tensors; what isn't split stays in the old format."""
    save(flushers)
    alone = Flusher(tmp_path / "alone", rank=0, world_size=1, reserve=False)
    alone.write(alone.stage(state_of(0), 3), generation_name(3, "x"))
    alone.close()
    split, plain = (
        json.loads((folder / generation_name(3, "x") / rank_name(0) / RECORD).read_bytes())
        for folder in (tmp_path, tmp_path / "alone")
    )

    assert ("powerguard-record-2", "powerguard-record-1") == (split["format"], plain["format"])
    assert [[0, 1, 2]] == [one["group"] for one in split["splits"]]
    assert not {"splits", "shared", "pieces"} & set(plain)


@pytest.mark.parametrize("what", ["weights", "shape", "group"])
def test_ranks_that_disagree_make_no_generation(flushers, tmp_path, what):
    """Other weights, another shape or another group on one rank: neither sealed nor taken for whole without a seal."""
    states = [state_of(rank) for rank in range(WORLD)]
    weights: list[Any] = [(), (), ()]
    if what == "weights":
        weights[2] = (1.0, 2.0, 1.0)
    elif what == "shape":
        states[2]["w"]["big"] = states[2]["w"]["big"][:-1]
    else:
        flushers[2].replicas.replicated = frozenset()
    records = save(flushers, weights=weights, states=states)

    with pytest.raises(CheckpointError, match="disagree on what they share"):
        seal(tmp_path, generation_name(3, "x"), step=3, world_size=WORLD, shards=records)
    (found,) = scan(tmp_path)
    assert not found.whole
    assert any("disagree" in text for text in found.problems)


def test_weights_say_who_writes(flushers, tmp_path):
    """The rank without weight writes nothing of what is shared, the others its part; all is there."""
    records = save(flushers, weights=[(1.0, 0.0, 1.0)] * WORLD)
    name = generation_name(3, "x")
    seal(tmp_path, name, step=3, world_size=WORLD, shards=records)
    found = latest(tmp_path).generation

    assert (tmp_path / name / rank_name(1) / SHARD).stat().st_size < 45_000
    for rank, flusher in enumerate(flushers):
        there = state_of(9, seed=5)
        flusher.load(found, there)
        check_loaded(there, rank)


def test_verifying_a_rank_reads_what_its_replicas_wrote(flushers, tmp_path):
    """A wrong byte in rank 0's part is a problem of rank 1's state, and found where that alone is asked for."""
    records = save(flushers)
    name = generation_name(3, "x")
    seal(tmp_path, name, step=3, world_size=WORLD, shards=records)
    path = tmp_path / name / rank_name(0) / SHARD
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    (found,) = scan(tmp_path)

    assert ["rank-00000"] == [str(problem).split("'")[0] for problem in verify(found, ranks=[1])]
    with pytest.raises(CheckpointError, match="rank-00000's shard doesn't match"):
        flushers[1].load(found, state_of(9))


def test_staged_states_are_split_as_well(flushers, tmp_path):
    """Plan B of a job with replicas: each deputy writes its rank's part, and every rank loads the whole."""
    shm = tmp_path / "shm"
    shm.mkdir()
    name = generation_name(3, "b-1")
    records = []
    for rank, flusher in enumerate(flushers):
        facts = Facts(
            "job", rank, WORLD, os.getpid(), str(tmp_path / "s"), str(tmp_path), "optimizer_step", reserve=False
        )
        staging = Staging(flusher, state_of(rank), facts, log=Log(), folder=shm)
        pen = Pen(staging.shelf.ledger, facts)
        try:
            assert staging.stage(state_of(rank), 3)
            records.append(pen.write(1, 3, name).record)
        finally:
            pen.close()
            staging.close()
    seal(tmp_path, name, step=3, world_size=WORLD, shards=records)
    found = latest(tmp_path).generation

    assert [] == verify(found)
    for rank, flusher in enumerate(flushers):
        there = state_of(9, seed=5)
        flusher.load(found, there)
        check_loaded(there, rank)


def test_what_is_said_to_be_replicated_must_be_there(tmp_path):
    """A name that is none of the state's is refused at the start, and so is a storage that isn't known."""
    flusher = Flusher(tmp_path, rank=0, world_size=2, reserve=False, replicated=["emma"])
    with pytest.raises(StateError, match=r"\['emma'\] is said to be replicated"):
        flusher.prepare({"ema": torch.zeros(3)})
    flusher.close()
    with pytest.raises(UsageError, match="storage is 'nfs'"):
        Replicas(0, 1, storage="nfs")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("rank", "env", "ranks"),
    [
        (5, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, range(4, 8)),
        (0, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "8"}, range(8)),
        (5, {}, range(5, 6)),
        (5, {"LOCAL_RANK": "1"}, range(5, 6)),
        (5, {"LOCAL_RANK": "x", "LOCAL_WORLD_SIZE": "4"}, range(5, 6)),
        (5, {"LOCAL_RANK": "4", "LOCAL_WORLD_SIZE": "4"}, range(5, 6)),
        (7, {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "4"}, range(7, 8)),
        (1, {"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "4"}, range(1, 2)),
    ],
)
def test_ranks_of_a_node_are_known_from_torchrun_or_not_at_all(rank, env, ranks):
    """What doesn't add up says nothing, and then no rank relies on another's file."""
    assert ranks == node_ranks(rank, 8, env)


def test_local_storage_without_word_of_the_node_splits_nothing(tmp_path):
    """The default is safe: every rank writes all that it holds unless it is known who shares its directory."""
    flusher = Flusher(tmp_path, rank=0, world_size=2, reserve=False, replicated=["w"])
    staged = flusher.stage(state_of(0), 3)

    assert () == staged.content.splits
    assert staged.bytes > ROWS * 16
    flusher.close()

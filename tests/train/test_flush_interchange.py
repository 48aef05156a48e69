"""Generations for other tools, and other tools' checkpoints for us."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest

from powerguard.errors import CheckpointError, DirectoryError

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.filterwarnings("ignore::UserWarning:torch.*")]


@pytest.fixture
def trained() -> dict[str, Any]:
    """A model with tied weights and an optimizer that has state."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(2):
        model[2](model[1](model[0](torch.randn(5, 4))).bfloat16()).float().sum().backward()
        optimizer.step()
    place = {"epoch": 3, "seen": torch.arange(5), "names": ["a", "b"], "sizes": (1, 2)}
    return {"model": model, "optimizer": optimizer, "place": place}


def same(one: Any, other: Any) -> bool:
    """Equal to the bit; dicts by their items."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return set(one) == set(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_a_reader_that_isn_t_ours_opens_a_shard(flusher, save, trained):
    """A shard is a safetensors file: names, dtypes, shapes and values, and its data starts aligned."""
    from safetensors import safe_open

    generation = save(flusher(), trained, 1)
    path = generation.path / "rank-00000" / "shard.safetensors"
    with safe_open(path, framework="pt") as file:
        for name, value in trained["model"].state_dict().items():
            assert same(file.get_tensor(f"model.{name}"), value)
        assert same(
            file.get_tensor("optimizer.state.0.exp_avg"), trained["optimizer"].state_dict()["state"][0]["exp_avg"]
        )
    header = int.from_bytes(path.read_bytes()[:8], "little")
    assert (8 + header) % 4096 == 0


def test_a_reader_written_from_the_document_reads_a_generation(flusher, save, trained):
    """docs/format.md suffices: JSON, xxh3 and any safetensors reader find and prove every weight."""
    import json

    import xxhash
    from safetensors import safe_open

    folder = save(flusher(), trained, 1).path

    def read(path: Path) -> dict[str, Any]:
        data = path.read_bytes()
        value = json.loads(data)
        digest = value["digest"].encode()
        assert xxhash.xxh3_128_hexdigest(data.replace(digest, b"0" * 32, 1)) == value["digest"]
        return value  # type: ignore[no-any-return]

    seal = read(folder / "seal.json")
    assert (seal["generation"], seal["world_size"]) == (folder.name, 1)
    record = read(folder / seal["shards"][0]["path"] / "record.json")
    assert record["digest"] == seal["shards"][0]["digest"]
    path = folder / "rank-00000" / record["file"]["name"]
    data, size = path.read_bytes(), record["file"]["chunk_bytes"]
    assert [xxhash.xxh3_128_hexdigest(data[at : at + size]) for at in range(0, len(data), size)] == record["file"][
        "sums"
    ]
    with safe_open(path, framework="pt") as file:
        for name, node in record["state"]["model"]["stateful"]["value"]["ordered"]:
            assert same(file.get_tensor(node["tensor"]["ref"]), trained["model"].state_dict()[name])


def test_every_dtype_is_in_the_shard_as_others_know_it(flusher, save):
    """fp8 by its name, complex as pairs of floats, what readers don't know as bytes."""
    from safetensors import safe_open

    state = {
        "f8": torch.ones(3, dtype=torch.float8_e4m3fn),
        "c": torch.ones(3, dtype=torch.complex64) * 2j,
        "odd": torch.ones(3, dtype=torch.float8_e4m3fnuz),
        "zero": torch.tensor(4.0),
        "empty": torch.empty(0, 3),
    }
    generation = save(flusher(), state, 1)
    with safe_open(generation.path / "rank-00000" / "shard.safetensors", framework="pt") as file:
        assert file.get_tensor("f8").dtype == torch.float8_e4m3fn
        assert torch.equal(torch.view_as_complex(file.get_tensor("c")), state["c"])
        assert file.get_tensor("odd").dtype == torch.uint8
        assert file.get_tensor("zero").shape == ()
        assert file.get_tensor("empty").shape == (0, 3)


def test_export_to_dcp_is_read_by_stock_dcp(flusher, save, trained, tmp_path):
    """dcp.load fills get_state_dict's templates of fresh objects, and the training state is the same to the bit."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    from powerguard.train.export import export

    generation = save(flusher(), trained, 7)
    left = export(generation, tmp_path / "dcp", "dcp")
    assert left == ("random states of 1 ranks",)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4).bfloat16())
    optimizer = torch.optim.AdamW(model.parameters())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {
        "model": model_state,
        "optimizer": optimizer_state,
        "place": {"epoch": 0, "seen": torch.zeros(5, dtype=torch.long)},
        "powerguard": {"step": 0},
    }
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    assert same(model.state_dict(), trained["model"].state_dict())
    assert same(optimizer.state_dict()["state"], trained["optimizer"].state_dict()["state"])
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert state["place"]["epoch"] == 3
    assert torch.equal(state["place"]["seen"], torch.arange(5))
    assert state["powerguard"]["step"] == 7


def test_stock_dcp_reads_a_generation_as_it_lies(flusher, save, trained):
    """`dcp.load` through our reader: tensors and plain values without an export, and nothing of a damaged one."""
    import torch.distributed.checkpoint as dcp

    from powerguard.train.dcp_reader import GenerationReader

    generation = save(flusher(), trained, 7)
    model = {name: torch.zeros_like(value) for name, value in trained["model"].state_dict().items()}
    state = {"model": model, "place": {"epoch": 0, "seen": torch.zeros(5, dtype=torch.long)}, "powerguard": {"step": 0}}
    dcp.load(state, storage_reader=GenerationReader(generation.path), no_dist=True)
    assert same(state["model"], dict(trained["model"].state_dict()))
    assert state["place"]["epoch"] == 3
    assert torch.equal(state["place"]["seen"], torch.arange(5))
    assert state["powerguard"]["step"] == 7
    path = generation.path / "rank-00000" / "shard.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    model["0.weight"].zero_()
    for place, words in (
        (generation.path, "doesn't match its checksum"),
        (generation.path.parent, "isn't a generation"),
    ):
        with pytest.raises(BaseException, match=words):
            dcp.load(state, storage_reader=GenerationReader(place), no_dist=True)
    assert not model["0.weight"].any()


def test_export_by_index_fits_plain_state_dicts(flusher, save, trained, tmp_path):
    """For code that gives optimizer.state_dict() itself to dcp.load."""
    import torch.distributed.checkpoint as dcp

    from powerguard.train.export import export

    generation = save(flusher(), trained, 7)
    export(generation, tmp_path / "dcp", "dcp", optimizer_names="index")
    expected = trained["optimizer"].state_dict()
    template = {"optimizer": {"state": {i: dict.fromkeys(s, torch.zeros(())) for i, s in expected["state"].items()}}}
    for index, moments in expected["state"].items():
        for key, value in moments.items():
            template["optimizer"]["state"][index][key] = torch.zeros_like(value)
    dcp.load(template, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert same(template["optimizer"]["state"], expected["state"])


def test_export_to_torch(flusher, save, trained, tmp_path):
    """One file for torch.load, without pickled objects, and no larger than its tensors."""
    from powerguard.train.export import export

    generation = save(flusher(), trained, 7)
    export(generation, tmp_path / "all.pt", "torch", optimizer_names="index")
    state = torch.load(tmp_path / "all.pt", weights_only=True)
    assert same(dict(state["model"]), dict(trained["model"].state_dict()))
    assert same(state["optimizer"], trained["optimizer"].state_dict())
    assert same(state["place"], trained["place"])
    assert state["powerguard"] == {"step": 7, "unit": "optimizer_step"}
    assert (tmp_path / "all.pt").stat().st_size < generation.bytes + 20_000


def test_export_to_safetensors(flusher, save, trained, tmp_path):
    """One file with all tensors, under names without wrappers."""
    from safetensors.torch import load_file

    from powerguard.train.export import export

    generation = save(flusher(), trained, 7)
    export(generation, tmp_path / "all.safetensors", "safetensors")
    tensors = load_file(tmp_path / "all.safetensors")
    assert same(tensors["model.2.weight"], trained["model"][2].weight)
    assert same(tensors["optimizer.state.0.weight.exp_avg"], trained["optimizer"].state_dict()["state"][0]["exp_avg"])
    assert not any("rng" in name for name in tensors)


def test_nothing_damaged_is_exported(flusher, save, trained, tmp_path):
    """An export vouches for what it writes: it verifies first, and leaves nothing behind."""
    from powerguard.train.export import export

    generation = save(flusher(), trained, 7)
    path = generation.path / "rank-00000" / "shard.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    for to in ("dcp", "torch", "safetensors"):
        with pytest.raises(CheckpointError, match="can't be exported"):
            export(generation, tmp_path / "out", to)
        assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(flusher, save, trained, tmp_path):
    """An export into something that is there is refused."""
    from powerguard.train.export import export

    generation = save(flusher(), trained, 7)
    (tmp_path / "out").mkdir()
    for to in ("dcp", "torch", "safetensors"):
        with pytest.raises(DirectoryError, match="exists already"):
            export(generation, tmp_path / "out", to)


def test_a_dcp_checkpoint_becomes_a_generation(flusher, trained, tmp_path):
    """The periodic checkpoint of a run that used DCP is resumed from like one of ours, in fresh objects."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    from powerguard.generations import latest
    from powerguard.train.export import import_dcp

    model_state, optimizer_state = get_state_dict(trained["model"], trained["optimizer"])
    state = {"model": model_state, "optimizer": optimizer_state, "place": {"epoch": 9}}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    generation = import_dcp(tmp_path / "dcp", tmp_path / "run", step=123)
    assert generation.sealed
    assert generation.portable
    assert latest(tmp_path / "run", world_size=8).generation == generation
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4).bfloat16())
    there = {"model": model, "optimizer": torch.optim.AdamW(model.parameters()), "place": {"epoch": 0}}
    report = flusher(tmp_path / "run", rank=5, world_size=8).load(generation, there)
    assert report.step == 123
    assert same(model.state_dict(), trained["model"].state_dict())
    assert same(there["optimizer"].state_dict()["state"], trained["optimizer"].state_dict()["state"])
    assert there["place"] == {"epoch": 9}


def test_what_is_no_dcp_checkpoint_is_refused(tmp_path):
    """An import of something else is one clear error."""
    from powerguard.train.export import import_dcp

    with pytest.raises(CheckpointError, match="is no DCP checkpoint"):
        import_dcp(tmp_path, tmp_path / "run", step=1)
    assert not (tmp_path / "run").exists()


def test_the_durable_writer_overwrites_nothing(tmp_path):
    """dcp.save through our writer refuses a directory that holds a checkpoint, and stock dcp.load reads it."""
    import torch.distributed.checkpoint as dcp

    from powerguard.train.dcp import DurableWriter

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": torch.ones(3)}, storage_writer=DurableWriter(tmp_path / "ck"), no_dist=True)
        state = {"a": torch.zeros(3)}
        dcp.load(state, checkpoint_id=tmp_path / "ck", no_dist=True)
        assert torch.equal(state["a"], torch.ones(3))
        with pytest.raises(BaseException, match="already holds a checkpoint"):
            dcp.save({"a": torch.zeros(3)}, storage_writer=DurableWriter(tmp_path / "ck"), no_dist=True)
        dcp.load(state, checkpoint_id=tmp_path / "ck", no_dist=True)
    assert torch.equal(state["a"], torch.ones(3))


def test_names_lose_their_wrappers(flusher, save, tmp_path):
    """DDP's and torch.compile's prefixes are in our shards as state_dict has them, and not in an export."""
    from safetensors.torch import load_file

    from powerguard.train.export import export
    from powerguard.train.objects import DDP, clean_name

    assert clean_name(DDP, "module._orig_mod.0.weight") == "0.weight"
    assert clean_name("torch.nn.Linear", "module.weight") == "module.weight"
    compiled = torch.compile(torch.nn.Linear(2, 2), backend="eager")
    generation = save(flusher(), {"model": compiled}, 1)
    export(generation, tmp_path / "x.safetensors", "safetensors")
    assert sorted(load_file(tmp_path / "x.safetensors")) == ["model.bias", "model.weight"]


def files_of(folder: Path) -> set[str]:
    return {os.path.relpath(path, folder) for path in folder.rglob("*") if path.is_file()}


def test_an_export_that_fails_leaves_no_file(flusher, save, tmp_path, trained):
    """A target whose directory is missing is one clear error."""
    from powerguard.train.export import export

    generation = save(flusher(), trained, 7)
    before = files_of(tmp_path)
    for to in ("torch", "safetensors"):
        with pytest.raises(DirectoryError, match="can't export to"):
            export(generation, tmp_path / "missing" / "out", to)
    assert files_of(tmp_path) == before

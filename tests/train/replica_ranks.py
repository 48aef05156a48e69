"""Real ranks over gloo that hold a state alike: ``python replica_ranks.py DIRECTORY KIND:WORLD:STORAGE:WEIGHTS ...``.

Not a test. Each stage saves, loads and trains on, asserts on every rank, and prints one JSON line from rank 0.
"""

from __future__ import annotations

import json
import os
import random
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from powerguard.errors import CheckpointError
from powerguard.generations import generation_name, latest, verify
from powerguard.generations.names import SHARD, rank_name
from powerguard.generations.seal import seal_if_whole
from powerguard.train.export import export
from powerguard.train.flush import Flusher

WIDTH = 1400  # a weight of 3.4 MB, which is cut; the others aren't


def build(kind: str, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(600, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 30)
    )
    if kind == "ddp":
        model = DistributedDataParallel(model, broadcast_buffers=False)
    elif kind in ("fsdp", "hsdp"):
        world = dist.get_world_size()
        shape, names = ((2, world // 2), ("replicate", "shard")) if kind == "hsdp" else ((world,), ("shard",))
        fully_shard(model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}
    if kind == "said":  # alike by the training's own doing, which only the user knows
        state["ema"] = {name: value.detach().clone() for name, value in model.named_parameters()}
    state["mine"] = {"noise": torch.full((5000,), float(dist.get_rank())), "rank": dist.get_rank()}
    return state


def train(state: dict[str, Any], first: int, count: int) -> list[float]:
    """Batches of each rank's own, so that what should differ between ranks does."""
    losses = []
    for step in range(first, first + count):
        x = torch.randn(8, 600, generator=torch.Generator().manual_seed(100 * step + dist.get_rank()))
        loss = (state["model"](x) + torch.rand(1) * random.random()).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        losses.append(loss.item())
    return losses


def tensors(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """All that this rank holds, copied."""
    found = {f"model.{name}": value for name, value in state["model"].state_dict().items()}
    for index, held in state["optimizer"].state_dict()["state"].items():
        found |= {f"optimizer.{index}.{name}": value for name, value in held.items()}
    found |= {f"ema.{name}": value for name, value in state.get("ema", {}).items()}
    found["mine"] = state["mine"]["noise"]
    local = {name: value.to_local() if hasattr(value, "to_local") else value for name, value in found.items()}
    return {name: value.detach().clone() for name, value in local.items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def everywhere(value: Any) -> list[Any]:
    """What each rank has to say, by rank."""
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, value)
    return told


def stage(kind: str, storage: str, weights: tuple[float, ...], directory: Path) -> dict[str, Any]:
    rank, world = dist.get_rank(), dist.get_world_size()
    said = ["ema"] if kind == "said" else []
    state = build(kind)
    random.seed(rank)
    torch.manual_seed(rank)
    train(state, 0, 1)  # with "said" each for itself; the copy in "ema" stays what it was, on all alike
    flusher = Flusher(directory, rank=rank, world_size=world, storage=storage, replicated=said)  # type: ignore[arg-type]
    flusher.prepare(state, prove=False)
    capacity = flusher._slots.capacity
    name = generation_name(3, "x")
    at_save = tensors(state)
    staged = flusher.stage(state, 3, weights=weights)
    expected = train(state, 3, 1)  # no more: a new DDP's first buckets are others, and sums of four round otherwise
    written = flusher.write(staged, name)
    dist.barrier()
    if rank == 0:
        assert seal_if_whole(directory, name).sealed
    dist.barrier()
    found = latest(directory, verify_ranks=[rank]).generation
    assert found is not None
    fresh = build(kind, seed=5)
    report = flusher.load(found, fresh)
    assert same(at_save, tensors(fresh))
    assert fresh["mine"]["rank"] == rank
    assert train(fresh, 3, 1) == expected
    flusher.load(found, state)  # over what is there
    assert same(at_save, tensors(state))
    held = sum(value.nbytes for value in at_save.values())
    shard = (directory / name / rank_name(rank) / SHARD).stat().st_size
    told = everywhere((shard, held, report.bytes, flusher._slots.capacity == capacity, written.bytes >= shard))
    result: dict[str, Any] = {
        "shards": [each[0] for each in told],
        "held": [each[1] for each in told],
        "no_new_memory": all(each[3] for each in told),
    }
    if rank == 0:
        assert verify(found) == []
        if storage == "local" and kind in ("ddp", "hsdp"):
            check_export(found, directory, state)
    dist.barrier()
    result["lost"] = everywhere(damage(flusher, found, build(kind, seed=6)))
    flusher.close()
    return result


def check_export(found: Any, directory: Path, state: dict[str, Any]) -> None:
    """Other tools get every tensor whole; of what differs between ranks, rank 0's."""
    export(found, directory / "out.pt", "torch")
    exported = torch.load(directory / "out.pt", weights_only=True)["model"]
    for name, value in state["model"].state_dict().items():
        if not hasattr(value, "full_tensor"):
            assert torch.equal(exported[name.removeprefix("module.")], value), name


def damage(flusher: Flusher, found: Any, state: dict[str, Any]) -> str:
    """Rank 1's shard is spoilt at its end; what each rank says when it loads."""
    if flusher.rank == 0:
        path = found.path / rank_name(1) / SHARD
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    dist.barrier()
    try:
        flusher.load(found, state)
    except CheckpointError as error:
        return error.message
    return ""


def main(rank: int, world: int, texts: list[str], directory: Path) -> None:
    """All stages of one world size, in one process group: starting those is most of the time."""
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{directory}/.store-{world}", rank=rank, world_size=world)
    for text in texts:
        kind, _, storage, given = text.split(":")
        near = world // 2 if storage == "apart" else world  # "apart": two nodes of equal size
        os.environ.update(LOCAL_RANK=str(rank % near), LOCAL_WORLD_SIZE=str(near))
        place = directory / text.replace(":", "-").replace(",", "_")
        place.mkdir(exist_ok=True)
        weights = tuple(float(part) for part in given.split(",") if part)
        result = stage(kind, "shared" if storage == "shared" else "local", weights, place)
        if rank == 0:
            print(json.dumps({"stage": text, **result}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)  # no pool of torch's threads may exist when we fork
    for world in (2, 4):
        texts = [text for text in sys.argv[2:] if text.split(":")[1] == str(world)]
        mp.start_processes(main, (world, texts, Path(sys.argv[1])), nprocs=world, start_method="fork")

"""Real ranks over gloo, for the tests of sharded state: ``python ranks.py DIRECTORY WHAT:KIND:WORLD ...``.

Each stage forks its ranks and prints one JSON line from rank 0. Under torchrun, ``ranks.py DIRECTORY`` is one rank of
`started`. The model, its data and its training depend on the step alone, so that stages can be compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from powerguard.checkpoint import Checkpointer
from powerguard.errors import DirectoryError
from powerguard.generations import generation_name, latest
from powerguard.generations.seal import seal_if_whole
from powerguard.train import one_place
from powerguard.train.dcp import DurableWriter
from powerguard.train.dcp_reader import GenerationReader
from powerguard.train.export import export, import_dcp
from powerguard.train.flush import Flusher

WIDTH = 10  # no multiple of 4: shards are uneven


def build(kind: str, world: int, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model: Any = torch.nn.Sequential(
        torch.nn.Linear(6, WIDTH), torch.nn.LayerNorm(WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 3)
    )
    if kind == "fsdp":
        mesh = init_device_mesh("cpu", (world,))
        for layer in model:
            if list(layer.parameters()):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "ddp":
        model = DistributedDataParallel(model)
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.01)}


def train(state: dict[str, Any], first: int, count: int) -> list[float]:
    """The same batches on every rank and at every world size."""
    losses = []
    for step in range(first, first + count):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(step))
        loss = state["model"](x).square().mean()
        state["optimizer"].zero_grad()
        loss.backward()
        state["optimizer"].step()
        losses.append(loss.item())
    return losses


def full(value: Any) -> Any:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def whole_state(state: dict[str, Any]) -> dict[str, list[float]]:
    """Everything, put together, under names without wrappers."""
    options = StateDictOptions(full_state_dict=True)
    model, optimizer = get_state_dict(state["model"], state["optimizer"], options=options)
    out = {name: full(value).flatten().tolist() for name, value in model.items()}
    for name, moments in optimizer["state"].items():
        out |= {f"{name}/{key}": full(value).flatten().tolist() for key, value in moments.items()}
    return out


def save_and_go_on(kind: str, rank: int, world: int, directory: Path) -> dict[str, Any]:
    """Saves at step 3, trains on; a fresh model that loads it trains on the same; rank 0 exports."""
    state = build(kind, world)
    train(state, 0, 3)
    flusher = Flusher(directory, rank=rank, world_size=world)
    flusher.prepare(state, prove=False)
    name = generation_name(3, "x")
    _, written = flusher.flush(state, 3, name)
    dist.barrier()
    if rank == 0:
        seal_if_whole(directory, name)
        generation = latest(directory).generation
        assert generation is not None
        export(generation, directory / "dcp", "dcp")
    dist.barrier()
    at_save = whole_state(state)
    expected = train(state, 3, 3)
    fresh = build(kind, world, seed=5)
    found = latest(directory, verify_ranks=[rank]).generation
    assert found is not None
    flusher.load(found, fresh)
    assert train(fresh, 3, 3) == expected
    flusher.load(found, state)  # over what is there
    assert train(state, 3, 3) == expected
    flusher.close()
    return {"losses": expected, "whole": at_save, "bytes": written.bytes}


def load_stock(kind: str, _rank: int, world: int, directory: Path) -> dict[str, Any]:
    """Stock dcp.load of the export, at this world size, goes on training; read as it lies, it is the same."""
    state = build(kind, world, seed=9)
    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=directory / "dcp")
    set_state_dict(state["model"], state["optimizer"], model_state_dict=model, optim_state_dict=optimizer)
    whole = whole_state(state)
    direct = build(kind, world, seed=8)
    model, optimizer = get_state_dict(direct["model"], direct["optimizer"])
    reader = GenerationReader(directory / generation_name(3, "x"))
    dcp.load({"model": model, "optimizer": optimizer}, storage_reader=reader)
    set_state_dict(direct["model"], direct["optimizer"], model_state_dict=model, optim_state_dict=optimizer)
    assert whole_state(direct) == whole
    return {"losses": train(state, 3, 3), "whole": whole}


def load_import(kind: str, rank: int, world: int, directory: Path) -> dict[str, Any]:
    """A generation imported from DCP, into this world size, goes on training."""
    if rank == 0:
        import_dcp(directory / "dcp", directory / f"imported-{kind}-{world}", step=3)
    dist.barrier()
    state = build(kind, world, seed=9)
    flusher = Flusher(directory / f"imported-{kind}-{world}", rank=rank, world_size=world, reserve=False)
    found = latest(flusher.directory, world_size=world).generation
    assert found is not None
    flusher.load(found, state)
    flusher.close()
    whole = whole_state(state)
    return {"losses": train(state, 3, 3), "whole": whole}


def periodic(kind: str, rank: int, world: int, directory: Path) -> dict[str, Any]:
    """The plain library, without a daemon: saved by all ranks, sealed by the last, damaged for one rank, resumed."""
    state = build(kind, world)
    with Checkpointer(directory, keep=3) as checkpointer:
        train(state, 0, 2)
        checkpointer.save(state, 2)
        train(state, 2, 1)
        checkpointer.save_async(state, 3).result()
        expected = train(state, 3, 3)
        dist.barrier()
        if rank == 0:
            newest = latest(directory).generation
            assert newest is not None
            assert newest.sealed
            assert newest.step == 3
            path = newest.path / "rank-00001" / "shard.safetensors"
            data = bytearray(path.read_bytes())
            data[-1] ^= 1
            path.write_bytes(data)
        dist.barrier()
        report = checkpointer.load(state)
        assert report is not None
        assert report.step == 2, report
        losses = train(state, 2, 1)
    return {"losses": expected, "step": report.step, "skipped": list(report.skipped), "again": losses}


def apart(kind: str, rank: int, world: int, directory: Path) -> dict[str, Any]:
    """One name, and behind it a folder of each rank's own, as on nodes that share nothing; what each is told."""
    one_place.WITHIN_S = 0.5
    own = directory / f"node-{rank}"
    own.mkdir()
    os.chdir(own)
    words = [""] * world
    try:
        Checkpointer("/proc/self/cwd/checkpoints").close()
    except DirectoryError as error:
        words[rank] = error.message
    told: list[Any] = [None] * world
    dist.all_gather_object(told, words[rank])
    return {"told": told}


def named_apart(kind: str, rank: int, world: int, directory: Path) -> dict[str, Any]:
    """A folder of each rank's own, of another name on each; what each is told."""
    one_place.WITHIN_S = 0.5
    words = [""] * world
    try:
        Checkpointer(directory / f"node-{rank}").close()
    except DirectoryError as error:
        words[rank] = error.message
    told: list[Any] = [None] * world
    dist.all_gather_object(told, words[rank])
    return {"told": told}


def many_names(kind: str, rank: int, world: int, directory: Path) -> dict[str, Any]:
    """One folder, which each rank has another name for: saved together, loaded together."""
    (directory / "shared").mkdir(exist_ok=True)
    own = directory / f"mount-{rank}"
    own.symlink_to(directory / "shared")
    with Checkpointer(own) as checkpointer:
        checkpointer.save({"rank": rank}, 4)
        dist.barrier()
        report = checkpointer.load({"rank": 0})
    values: list[Any] = [None] * world
    dist.all_gather_object(values, report and report.values)
    return {"values": values}


def sockets() -> set[str]:
    """This process's open connections."""
    links = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
    return {link for link in links if link.startswith("socket:")}


def started(directory: Path) -> None:
    """Under torchrun: agrees before torch.distributed is there, initialises it, agrees again.

    With a rank's number in DYING, that rank exits once it has agreed in its first life.
    """
    torch.set_num_threads(1)
    life = directory / f"life-{os.environ['RANK']}"
    lived = life.exists()
    life.touch()
    open_before, threads_before = sockets(), len(os.listdir("/proc/self/task"))
    with Checkpointer(directory / "shared") as saver:
        assert (sockets(), len(os.listdir("/proc/self/task"))) == (open_before, threads_before)
    rank = saver.rank
    if "DYING" in os.environ and not lived:
        if os.environ["DYING"] == str(rank):
            sys.exit(1)
        signal.pause()  # until the agent ends this life, before gloo's addresses are in the store
    dist.init_process_group("gloo")
    with Checkpointer(directory / "shared") as later:
        mine = [saver.attempt, later.attempt, os.environ["TORCHELASTIC_RESTART_COUNT"]]
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, mine)
    if rank == 0:
        attempts, afterwards, restarts = (list(each) for each in zip(*told, strict=True))
        print(json.dumps({"attempts": attempts, "afterwards": afterwards, "restarts": restarts}), flush=True)
    dist.destroy_process_group()


def durable_dcp(kind: str, rank: int, world: int, directory: Path) -> dict[str, Any]:
    """All ranks through our DCP writer, read by stock dcp.load."""
    state = build(kind, world)
    train(state, 0, 2)
    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    dcp.save({"model": model, "optimizer": optimizer}, storage_writer=DurableWriter(directory / "dcp"))
    expected = train(state, 2, 2)
    state = build(kind, world, seed=3)
    model, optimizer = get_state_dict(state["model"], state["optimizer"])
    dcp.load({"model": model, "optimizer": optimizer}, checkpoint_id=directory / "dcp")
    set_state_dict(state["model"], state["optimizer"], model_state_dict=model, optim_state_dict=optimizer)
    assert train(state, 2, 2) == expected
    return {"losses": expected}


def main(rank: int, what: str, kind: str, world: int, directory: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    warnings.simplefilter("ignore")
    store = f"file://{directory}/.store-{what}-{kind}-{world}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world)
    result = globals()[what](kind, rank, world, directory)
    if rank == 0:
        print(json.dumps(result), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "TORCHELASTIC_RUN_ID" in os.environ:
        started(Path(sys.argv[1]))
    torch.set_num_threads(1)  # no pool of torch's threads may exist when we fork
    for stage in sys.argv[2:]:
        what, kind, world = stage.split(":")
        arguments = (what, kind, int(world), Path(sys.argv[1]))
        mp.start_processes(main, arguments, nprocs=int(world), start_method="fork")

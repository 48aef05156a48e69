"""FSDP2 (`fully_shard`), guarded: each rank writes its own shards, no collective in a save.

torchrun --nproc-per-node 2 examples/fsdp2.py --dir /tmp/run    # again after a power failure: it goes on where it was
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import powerguard


def main() -> int:
    """Learns to add, on sharded parameters."""
    options = argparse.ArgumentParser()
    options.add_argument("--dir", type=Path, required=True, help="where checkpoints go, and are found again")
    options.add_argument("--save", type=Path, help="file for the trained parameters")
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--pace", type=float, default=0.0, help="seconds a step, to watch it")
    arguments = options.parse_args()

    gpu = torch.cuda.is_available() and torch.cuda.device_count() >= 2
    dist.init_process_group("nccl" if gpu else "gloo")
    rank = dist.get_rank()
    if gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    device = "cuda" if gpu else "cpu"
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.GELU(), torch.nn.Linear(64, 1)).to(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    guard = powerguard.attach({"model": model, "optimizer": optimizer}, arguments.dir)
    for step in range(guard.resume(), arguments.steps):
        source = torch.Generator().manual_seed(step * dist.get_world_size() + rank)
        x = torch.randn(16, 8, generator=source).to(device)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(arguments.pace)
        if guard.boundary(step):
            return guard.exit_code
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if arguments.save is not None and rank == 0:
        torch.save(whole, arguments.save)
    guard.close()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())

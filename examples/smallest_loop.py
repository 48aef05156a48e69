"""The smallest guarded training loop: one call a step.

    python examples/smallest_loop.py checkpoints/            # again: it goes on where it was
    torchrun --nproc-per-node 2 examples/smallest_loop.py checkpoints/

It runs with no powerguard daemon, and is guarded as soon as one is there.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

import powerguard


def main() -> None:
    """Fits a line, for ever if asked to."""
    options = argparse.ArgumentParser()
    options.add_argument("directory", help="where checkpoints go")
    options.add_argument("--steps", type=int, default=200)
    arguments = options.parse_args()

    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Linear(1, 1)
    if dist.is_initialized():
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    with powerguard.attach({"model": model, "optimizer": optimizer}, arguments.directory) as guard:
        loss = torch.zeros(())
        for step in range(guard.resume(), arguments.steps):
            x = torch.randn(64, 1)
            loss = (model(x) - (3 * x + 1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if guard.boundary(step):
                break
            if step % 50 == 49:
                guard.save(step)
    print(f"step {guard.step}: loss {loss.item():.6f}")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

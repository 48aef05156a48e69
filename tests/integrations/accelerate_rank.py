"""One of two ranks that train with Accelerate's DDP on gloo: a whole run, one that is stopped, and what follows it.

RANK=0 WORLD_SIZE=2 ... python accelerate_rank.py FOLDER SOCKET
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import accelerate
import torch
from accelerate.utils import DataLoaderConfiguration

from powerguard.integrations.accelerate import guarded
from powerguard.integrations.halted import Halted

RANK = int(os.environ["RANK"])
EPOCHS, STEPS_PER_EPOCH = 3, 4
AT = 5
"""The order comes when rank 1 is past this step's boundary and rank 0 isn't."""


def wait(folder: Path) -> None:
    """Until the test has given the order."""
    (folder / f"at-{RANK}").touch()
    end = time.monotonic() + 60.0
    while not (folder / "ordered").exists():
        assert time.monotonic() < end, "no order came"
        time.sleep(0.005)


def train(folder: Path, name: str, socket: Path, *, stopped: bool = False) -> tuple[dict[int, torch.Tensor], int]:
    """One life of a run: the weights after each step, and the step that it was stopped after; -1 if it wasn't."""
    torch.manual_seed(3 + RANK)  # each rank drops out others
    exact = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2, dataloader_config=exact)
    assert accelerator.num_processes == 2
    assert torch.distributed.get_backend() == "gloo"
    data = torch.utils.data.TensorDataset(torch.randn(48, 4, generator=torch.Generator().manual_seed(5)))
    net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.3), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    loader = torch.utils.data.DataLoader(data, batch_size=3, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    guard = guarded(accelerator, folder / name, loader=loader, socket=socket, exit_on_halt=False, reserve=False)
    seen: dict[int, torch.Tensor] = {}
    try:
        done = guard.resume()
        for _ in range(done // STEPS_PER_EPOCH, EPOCHS):
            for (batch,) in loader:
                with accelerator.accumulate(model):
                    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                if accelerator.sync_gradients:
                    done += 1
                    seen[done] = net[0].weight.detach().clone()
                here = stopped and accelerator.sync_gradients and done == AT
                if here and RANK == 0:
                    wait(folder)
                guard.boundary()
                if here and RANK == 1:
                    wait(folder)
    except Halted as halted:
        return seen, halted.step
    finally:
        guard.close()
    return seen, -1


def main(folder: Path, socket: Path) -> None:
    """Leaves what it saw in *folder*."""
    nobody = folder / "nobody"
    lives = {
        "whole": train(folder, "whole", nobody),
        "cut": train(folder, "run", socket, stopped=True),
        "again": train(folder, "run", nobody),
    }
    torch.save(lives, folder / f"lives-{RANK}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))

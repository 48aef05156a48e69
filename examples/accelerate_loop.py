"""A loop with Accelerate, guarded.

python examples/accelerate_loop.py --dir /tmp/run           # again after a power failure: it goes on where it was
accelerate launch examples/accelerate_loop.py --dir /tmp/run2
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration

from powerguard.integrations.accelerate import guarded


def main() -> None:
    """Learns to add, with two batches to a step."""
    options = argparse.ArgumentParser()
    options.add_argument("--dir", type=Path, required=True, help="where checkpoints go, and are found again")
    options.add_argument("--save", type=Path, help="file for the trained parameters")
    options.add_argument("--epochs", type=int, default=8)
    options.add_argument("--pace", type=float, default=0.0, help="seconds a batch, to watch it")
    arguments = options.parse_args()

    torch.manual_seed(1)
    exact = DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=True)
    accelerator = Accelerator(gradient_accumulation_steps=2, dataloader_config=exact)
    data = torch.randn(96, 8)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
    loader = torch.utils.data.DataLoader(list(data), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.01), loader)

    guard = guarded(accelerator, arguments.dir, loader=loader)
    done = guard.resume()
    for _ in range(done // (len(loader) // 2), arguments.epochs):
        for x in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            time.sleep(arguments.pace)
            guard.boundary()
    guard.close()
    if arguments.save is not None and accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), arguments.save)


if __name__ == "__main__":
    main()

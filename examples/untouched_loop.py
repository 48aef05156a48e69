"""A training loop that isn't edited: the hook sits on the optimizer and its schedule.

python examples/untouched_loop.py --dir /tmp/run            # again after a power failure: it goes on where it was
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from powerguard.integrations.optimizer_hook import guard_optimizer


def train(model, optimizer, schedule, loader, *, epochs: int, pace: float) -> None:  # noqa: ANN001
    """As it stood in the script before anybody thought of power failures."""
    for _ in range(epochs):
        for x in loader:
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            time.sleep(pace)


def main() -> None:
    """Makes everything, guards it, and trains."""
    options = argparse.ArgumentParser()
    options.add_argument("--dir", type=Path, required=True, help="where checkpoints go, and are found again")
    options.add_argument("--save", type=Path, help="file for the trained parameters")
    options.add_argument("--epochs", type=int, default=4)
    options.add_argument("--pace", type=float, default=0.0, help="seconds a step, to watch it")
    arguments = options.parse_args()

    torch.manual_seed(1)
    data = torch.randn(100, 8)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 25 * arguments.epochs)
    loader = StatefulDataLoader(list(data), batch_size=4, shuffle=True)

    state = {"model": model, "schedule": schedule, "loader": loader}
    guard = guard_optimizer(state, arguments.dir, optimizer, schedule=schedule)
    # The loop begins with the epoch that was interrupted; the loader goes on inside it, or at its very end.
    past = max(0, guard.resumed_steps - 1) // len(loader)
    train(model, optimizer, schedule, loader, epochs=arguments.epochs - past, pace=arguments.pace)
    guard.close()
    if arguments.save is not None:
        torch.save(model.state_dict(), arguments.save)


if __name__ == "__main__":
    main()

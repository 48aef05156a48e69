"""Lightning, guarded by a callback.

python examples/lightning_callback.py --dir /tmp/run        # again after a power failure: it goes on where it was
torchrun --nproc-per-node 2 examples/lightning_callback.py --dir /tmp/run2
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import lightning.pytorch as lightning
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from powerguard.integrations.lightning import PowerguardCallback


class Regression(lightning.LightningModule):
    """Learns to add."""

    def __init__(self, pace: float) -> None:
        super().__init__()
        self.pace = pace
        self.net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:  # noqa: ARG002
        time.sleep(self.pace)
        return (self.net(batch) - batch.sum(1, keepdim=True)).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def main() -> None:
    """Fits it."""
    options = argparse.ArgumentParser()
    options.add_argument("--dir", type=Path, required=True, help="where checkpoints go, and are found again")
    options.add_argument("--save", type=Path, help="file for the trained parameters")
    options.add_argument("--epochs", type=int, default=4)
    options.add_argument("--pace", type=float, default=0.0, help="seconds a step, to watch it")
    arguments = options.parse_args()

    lightning.seed_everything(1)
    data = torch.randn(100, 8)
    module = Regression(arguments.pace)
    guard = PowerguardCallback(arguments.dir)
    trainer = lightning.Trainer(
        accelerator="auto", devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")), max_epochs=arguments.epochs,
        callbacks=[guard], logger=False, enable_checkpointing=False, enable_progress_bar=False,
        default_root_dir=arguments.dir,
    )  # fmt: skip
    loader = StatefulDataLoader(list(data), batch_size=4, shuffle=True)
    trainer.fit(module, loader, ckpt_path=guard.resume(), weights_only=False)
    if arguments.save is not None and trainer.is_global_zero:
        torch.save(module.state_dict(), arguments.save)


if __name__ == "__main__":
    main()

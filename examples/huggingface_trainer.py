"""Hugging Face's Trainer, guarded by a callback.

python examples/huggingface_trainer.py --dir /tmp/run       # again after a power failure: it goes on where it was
torchrun --nproc-per-node 2 examples/huggingface_trainer.py --dir /tmp/run2
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

from powerguard.integrations.huggingface import PowerguardCallback


class Pace(TrainerCallback):
    """Makes a step last, to watch it."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def on_step_end(self, args, state, control, **kwargs) -> None:  # noqa: ANN001, ARG002
        time.sleep(self.seconds)


def main() -> None:
    """Trains a tiny GPT-2 on made-up tokens."""
    options = argparse.ArgumentParser()
    options.add_argument("--dir", type=Path, required=True, help="where checkpoints go, and are found again")
    options.add_argument("--save", type=Path, help="file for the trained parameters")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--pace", type=float, default=0.0, help="seconds a step, to watch it")
    arguments = options.parse_args()

    set_seed(1)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2))
    tokens = torch.randint(64, (200, 16))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    guard = PowerguardCallback(arguments.dir)
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(arguments.dir / "trainer"), max_steps=arguments.steps, per_device_train_batch_size=4, seed=1,
            save_strategy="no", report_to=[], use_cpu=not torch.cuda.is_available(), disable_tqdm=True,
        ),
        train_dataset=data,
        callbacks=[Pace(arguments.pace), guard],
    )  # fmt: skip
    trainer.train(resume_from_checkpoint=guard.resume(trainer))
    if arguments.save is not None and trainer.is_world_process_zero():
        torch.save(model.state_dict(), arguments.save)


if __name__ == "__main__":
    main()

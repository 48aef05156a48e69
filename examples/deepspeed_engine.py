"""A DeepSpeed engine, guarded.

torchrun --nproc-per-node 2 examples/deepspeed_engine.py --dir /tmp/run
torchrun --nproc-per-node 2 examples/deepspeed_engine.py --dir /tmp/run2 --stage 1 --bf16
torchrun --nproc-per-node 2 examples/deepspeed_engine.py --dir /tmp/run3 --stage 3
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import deepspeed
import torch

from powerguard.integrations.deepspeed import guarded


def main() -> None:
    """Learns to add."""
    options = argparse.ArgumentParser()
    options.add_argument("--dir", type=Path, required=True, help="where checkpoints go, and are found again")
    options.add_argument("--save", type=Path, help="file for the trained parameters")
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--pace", type=float, default=0.0, help="seconds a step, to watch it")
    options.add_argument("--stage", type=int, choices=(1, 2, 3), default=2, help="of ZeRO")
    options.add_argument("--bf16", action="store_true", help="compute in bfloat16, with fp32 weights in the optimizer")
    arguments = options.parse_args()

    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.1), torch.nn.Linear(32, 1))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "torch_adam": True}},
        "zero_optimization": {"stage": arguments.stage},
        "bf16": {"enabled": arguments.bf16},
    }
    engine, *_ = deepspeed.initialize(model=net, model_parameters=net.parameters(), config=config)
    guard = guarded(engine, arguments.dir)
    guard.resume()
    while engine.global_steps < arguments.steps:
        source = torch.Generator().manual_seed(1000 * engine.global_rank + engine.global_steps)
        x = torch.randn(4, 8, generator=source).to(engine.device)
        predicted = engine(x.bfloat16() if arguments.bf16 else x).float()
        engine.backward((predicted - x.sum(1, keepdim=True)).square().mean())
        engine.step()
        time.sleep(arguments.pace)
        guard.boundary()
    guard.close()
    with deepspeed.zero.GatheredParameters(list(net.parameters()), enabled=arguments.stage == 3):
        if arguments.save is not None and engine.global_rank == 0:
            weights = {name: weight.clone() for name, weight in net.state_dict().items()}  # without ZeRO's padding
            torch.save(weights, arguments.save)


if __name__ == "__main__":
    main()

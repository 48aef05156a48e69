"""A job: trains a weight with the hook, and writes where it began and what it ended with."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch

import powerguard

checkpoints, out = sys.argv[1], Path(sys.argv[2])
torch.manual_seed(1)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.Adam(model.parameters())
guard = powerguard.attach(state={"model": model, "optim": optimizer}, dir=checkpoints)
first = guard.resume()
with out.open("a") as file:
    file.write(f"began {first}\n")
for step in range(first, 250):
    with guard.mutating():
        optimizer.zero_grad()
        model(torch.full((1, 8), float(step))).square().mean().backward()
        optimizer.step()
    time.sleep(0.02 if (out.parent / "fast").exists() else 0.2)
    if guard.boundary(step):
        break
else:
    with out.open("a") as file:
        file.write(f"ended {float(model.weight.sum()):.9f}\n")

"""What trains in the virtual machine: a state whose every value says how many steps it has seen, guarded as usual.

python train.py DIRECTORY
"""

from __future__ import annotations

import sys
import time

import torch

import powerguard

FLOATS = 3_000_000  # 24 MB: long enough in writing to be hit in the middle
SAVED_STEP = 5


def right(weights: torch.Tensor, steps: int) -> bool:
    """Whether *weights* has seen the steps 0, 1, ... up to *steps* - 1, each once: sums of whole numbers are exact."""
    return bool(weights.eq(steps * (steps - 1) / 2).all())


def main() -> int:
    """Trains until the node halts; tells by lines that begin with TRAIN."""
    weights = torch.zeros(FLOATS, dtype=torch.float64)
    with powerguard.attach({"weights": weights}, sys.argv[1]) as guard:
        first = guard.resume()
        print(f"TRAIN resumed {first} {'right' if right(weights, first) else 'WRONG'}", flush=True)
        for step in range(first, 10**7):
            with guard.mutating():
                weights += step
            if guard.boundary(step):
                print(f"TRAIN stopped {step} {'right' if right(weights, step + 1) else 'WRONG'}", flush=True)
                break
            if step == first + SAVED_STEP:
                guard.save(step, wait=True)
                print(f"TRAIN saved {step}", flush=True)
            print(f"TRAIN step {step}", flush=True)
            time.sleep(0.3)
        return guard.exit_code


if __name__ == "__main__":
    sys.exit(main())

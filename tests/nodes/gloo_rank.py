"""A rank of a real job: DDP over gloo with the real hook. Run by the tests, on a host of its own; not a test.

`python gloo_rank.py LOG DIR SOCKET [WISH]`: one JSON line an event. WISH is JSON: {"hog": [step, seconds]}.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist

import powerguard

torch.set_num_threads(1)


def main(log_path: str, folder: str, socket: str, wish: dict) -> None:
    """Trains until it is told to leave, and leaves with the exit code for it."""
    log = open(log_path, "a", buffering=1)  # noqa: SIM115

    def note(**facts: object) -> None:
        log.write(json.dumps(facts) + "\n")

    rank = int(os.environ["RANK"])
    note(pid=os.getpid())
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    torch.manual_seed(7)
    model = torch.nn.Linear(256, 256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    guard = powerguard.attach(
        {"model": model, "optimizer": optimizer}, folder, socket=socket, exit_on_halt=False, prove=True
    )
    first = guard.resume()
    note(first=first)
    for step in range(first, 1_000_000):
        time.sleep(float(wish.get("step_s", 0.05)))
        with guard.mutating():
            generator = torch.Generator().manual_seed(1000 * step + rank)
            loss = model(torch.randn(8, 256, generator=generator)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
        if wish.get("hog") and step == wish["hog"][0] and rank == wish["hog"][2]:
            hog(wish["hog"][1])
        verdict = guard.boundary(step)
        note(step=step, t=time.monotonic())
        if verdict:
            note(verdict=verdict.reason, code=guard.exit_code, at=step)
            break
    guard.close()
    log.close()
    os._exit(guard.exit_code)


def hog(seconds: float) -> None:
    """Keeps the GIL, as a C extension does that never lets go of it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(3600.0)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        pass
    sys.setswitchinterval(before)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3], json.loads(sys.argv[4]) if len(sys.argv) > 4 else {})

"""A rank to be guarded: a tiny model whose weights say which steps were applied. Run by the tests, not a test."""

from __future__ import annotations

import json
import os
import sys
import time

import torch

import powerguard
from powerguard.errors import UsageError

torch.set_num_threads(1)


def main() -> None:
    """Trains as the wish says, and writes what happened, one JSON line each."""
    log = open(LOG, "a", buffering=1)  # noqa: SIM115
    wish = json.loads(WISH)

    def note(**facts: object) -> None:
        log.write(json.dumps(facts) + "\n")

    model = torch.nn.Linear(int(wish.get("width", 64)), 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with torch.no_grad():
        model.weight.zero_()
    history = {"steps": []}
    guard = powerguard.attach(
        {"model": model, "optimizer": optimizer, "history": history},
        wish["dir"],
        job="job",
        rank=wish["rank"],
        world_size=wish["world"],
        local_rank=wish["rank"],
        socket=wish["socket"],
        exit_grace_s=wish.get("exit_grace_s", 5.0),
        stage_every=wish.get("stage_every", 0),
    )
    first = guard.resume()
    history = guard.resumed.values["history"] if guard.resumed is not None else history
    note(first=first, weight=float(model.weight.detach()[0, 0]), history=list(history["steps"])[-3:])
    for step in range(first, wish.get("steps", 100_000)):
        time.sleep(3600.0 if step == wish.get("hang_at") else wish.get("step_s", 0.02))
        if wish.get("together"):
            all_reduce(step, wish)
        with guard.mutating(), torch.no_grad():
            model.weight += step
        if step == wish.get("hog_at"):
            hog(wish["hog_s"])
        if step == wish.get("fork_at"):
            fork(guard, note)
        began = time.monotonic()
        verdict = guard.boundary(step)
        note(step=step, waited=round(time.monotonic() - began, 3))
        if verdict:
            note(verdict=verdict.reason, code=guard.exit_code)
            break
    if wish.get("teardown_s"):
        time.sleep(wish["teardown_s"])
    if wish.get("raise"):
        raise RuntimeError("teardown failed")
    guard.close()
    note(closed=True)


def all_reduce(step: int, wish: dict[str, object]) -> None:
    """Waits until all ranks have come to *step*, as a collective does: for ever, if one of them never comes."""
    rank, world = int(str(wish["rank"])), int(str(wish["world"]))
    places = [f"{wish['dir']}.{other}" for other in range(world)]
    aside = f"{places[rank]}.part"
    with open(aside, "w") as file:
        file.write(str(step))
    os.replace(aside, places[rank])
    for place in places:
        while not os.path.exists(place) or int(open(place).read()) < step:  # noqa: SIM115
            time.sleep(0.005)


def hog(seconds: float) -> None:
    """Keeps the GIL, as a C extension does that never lets go of it."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(3600.0)
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        pass
    sys.setswitchinterval(before)


def fork(guard: powerguard.Guard, note: object) -> None:
    """A child that uses the guard and ends normally, as a DataLoader worker might."""
    child = os.fork()
    if child == 0:
        try:
            guard.boundary(10**6)
        except UsageError as error:
            note(child=str(error))
        guard.close()
        sys.exit(0)
    os.waitpid(child, 0)
    note(forked=True)


if __name__ == "__main__":
    LOG, WISH = sys.argv[1:]
elif "ERR" in globals():  # given by runpy, in a child of the nursery
    os.dup2(os.open(globals()["ERR"], os.O_WRONLY | os.O_CREAT), 2)
if "LOG" in globals():
    main()

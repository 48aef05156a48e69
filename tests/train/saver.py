"""A process that saves for ever and tells what is durable; killed at random by the tests.

``python saver.py DIRECTORY COUNT SEED``: COUNT times forks a child that saves generation after generation, kills it
with SIGKILL at a random instant, and checks what is left. Prints one line a kill; exits 1 at the first broken promise.
"""

from __future__ import annotations

import os
import random
import select
import signal
import sys
from pathlib import Path

import torch

from powerguard.generations import generation_name, latest, retire, scan, seal
from powerguard.train.flush import Flusher
from powerguard.train.load import load_state

SIZE = 2_500_000  # floats: one chunk and a bit


def state_of(step: int) -> dict[str, object]:
    return {"w": torch.full((SIZE,), float(step)), "step": step}


def save_for_ever(directory: Path, first: int, tell: int, kill_number: int) -> None:
    """Saves in all ways by turns: staged and overlapped, sealed and not, with retirement."""
    flusher = Flusher(directory, rank=0, world_size=1)
    flusher.prepare(state_of(0), prove=False)
    os.write(tell, b"r")
    step = first
    while True:
        step += 1
        name = generation_name(step, f"k{kill_number}")
        if step % 2:
            _, written = flusher.flush(state_of(step), step, name)
        else:
            written = flusher.write(flusher.stage(state_of(step), step), name)
        if step % 5:
            seal(directory, name, step=step, world_size=1, shards=[written.record])
        os.write(tell, b"d" + step.to_bytes(4, "big"))
        retire(directory, 2)
        flusher.settle()


def run_and_kill(directory: Path, first: int, kill_number: int, after_s: float) -> int:
    """The newest step that was reported durable, or *first*."""
    hear, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(hear)
            save_for_ever(directory, first, tell, kill_number)
        except BaseException as error:
            print("child:", repr(error), file=sys.stderr, flush=True)
        finally:
            os._exit(3)
    os.close(tell)
    assert os.read(hear, 1) == b"r", "the child never started saving"
    select.select([], [], [], after_s)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), f"the child ended by itself: {status}"
    heard = b""
    while data := os.read(hear, 65536):
        heard += data
    os.close(hear)
    reports = [int.from_bytes(heard[at + 1 : at + 5], "big") for at in range(0, len(heard), 5)]
    return reports[-1] if reports else first


def main() -> None:
    directory, count, dice = Path(sys.argv[1]), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    torch.set_num_threads(1)  # no pool of torch's threads may exist when we fork
    step, within_s = 0, 0.15
    for number in range(count):
        durable = run_and_kill(directory, step, number, dice.random() * within_s)
        within_s = min(5.0, 2.0 * within_s) if durable == step else max(0.15, within_s / 1.5)  # by the machine's pace
        found = latest(directory, verify=False)  # every byte is checked below, while it is loaded
        if durable:
            assert found.generation is not None, found.describe()
            assert found.generation.step >= durable, f"{durable} was durable: {found.describe()}"
        if found.generation is not None:
            step = found.generation.step
            there = state_of(0)
            report = load_state(found.generation, 0, there)
            assert report.values["step"] == step
            assert there["w"].eq(step).all()  # type: ignore[attr-defined]
        print(f"kill {number}: durable {durable}, newest {step}, {len(scan(directory))} there", flush=True)


if __name__ == "__main__":
    main()

"""Snapshots change nothing about a training run, and a resumed run is the run."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Torch's threads wait for each other at every small tensor; on busy cores that is most of the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Run:
    """A small model with dropout, momentum and a schedule, and a data order that is drawn."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(64, 256), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.Linear(256, 64)
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 200)
        self.place = {"step": 0}
        self.losses: list[float] = []

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "place": self.place,
        }

    def step(self) -> None:
        x = torch.randn(16, 64)
        loss = (self.model(x) - x).square().mean()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.place["step"] += 1
        self.losses.append(loss.item())


def test_two_hundred_steps_with_a_snapshot_each_ten(flusher, record_property):
    """Every loss is bit-equal to the run without snapshots; each was blocked for the copy only."""
    from concurrent.futures import ThreadPoolExecutor

    from powerguard.generations import generation_name, latest, retire
    from powerguard.generations.seal import seal_if_whole

    plain = Run()
    for _ in range(200):
        plain.step()

    watched = Run()
    f = flusher()
    f.prepare(watched.state, prove=False)
    blocked = []

    def make_durable(staged: Any) -> None:
        name = generation_name(staged.step, "p")
        f.write(staged, name)
        seal_if_whole(f.directory, name)
        retire(f.directory, 2)
        f.settle()

    with ThreadPoolExecutor(1) as background:
        writes = []
        for step in range(1, 201):
            watched.step()
            if step % 10 == 0:
                if len(writes) > 1:
                    writes[-2].result()  # two slots: a copy that waits to be written isn't replaced
                staged = f.stage(watched.state, step)
                blocked.append(staged.stage_s)
                writes.append(background.submit(make_durable, staged))
        for write in writes:
            write.result()
    assert watched.losses == plain.losses
    record_property("blocked_s_median", statistics.median(blocked))
    assert len(blocked) == 20
    assert latest(f.directory).generation.step == 200


def test_the_resumed_run_is_the_run(flusher, save):
    """Stopped at step 70 and resumed in new objects: steps 71 to 120 have bit-equal losses."""
    plain = Run()
    for _ in range(120):
        plain.step()
    first = Run()
    for _ in range(70):
        first.step()
    f = flusher()
    save(f, first.state, 70)
    del first
    torch.manual_seed(99)
    second = Run()
    torch.manual_seed(98)
    report = f.resume(second.state)
    assert report.step == second.place["step"] == 70
    for _ in range(50):
        second.step()
    assert second.losses == plain.losses[70:]


def test_a_damaged_newest_is_passed_over_while_resuming(flusher, save):
    """One flipped byte in the newest: the one before is loaded whole, and one line says why."""
    run = Run()
    f = flusher()
    for step in (10, 20):
        for _ in range(10):
            run.step()
        save(f, run.state, step)
    path = f.directory / "step-0000000020.t-1" / "rank-00000" / "shard.safetensors"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 16
    path.write_bytes(data)
    plain = Run()
    for _ in range(15):
        plain.step()
    report = f.resume(run.state)
    assert report.step == run.place["step"] == 10
    assert report.describe().startswith("resumed from step-0000000010.t-1; step-0000000020.t-1 skipped: ")
    for _ in range(5):
        run.step()
    assert run.losses[-5:] == plain.losses[-5:]


def test_nothing_but_damage_is_an_error(flusher, save):
    """If every generation is damaged, the run doesn't silently start from scratch."""
    from powerguard.errors import CheckpointError

    f = flusher()
    assert f.resume({"a": 0}) is None
    save(f, {"a": 1}, 1)
    path = f.directory / "step-0000000001.t-1" / "rank-00000" / "shard.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="can be trusted"):
        f.resume({"a": 0})


def test_a_generation_that_kills_its_run_is_left_after_some_tries(flusher, save):
    """Resumed from without end and without getting further, it gives way to the one before."""
    from powerguard.generations import resumes

    f = flusher()
    save(f, {"a": 1}, 1)
    save(f, {"a": 2}, 2)
    steps = [f.resume({"a": 0}).step for _ in range(resumes.CAP + 2)]
    assert steps == [2] * resumes.CAP + [1, 1]

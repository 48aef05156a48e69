"""The disk's own limit by fio, states of the usual shape, and measuring with the traps known.

In virtual machines whose free memory goes back to the host, the first touch of a cold page was measured at 0.4 GB/s
and of a warm one at 7.5: whatever writes through the page cache is measured only after `warm`.
"""

from __future__ import annotations

import json
import math
import os
import random
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

GB = 1e9


def language_model(total_bytes: float) -> dict[str, Any]:
    """688 tensors: bf16 weights, fp32 master weights and two moments, as a mixed-precision run holds them."""
    layers = 172
    per = int(total_bytes / (layers * 14))
    torch.manual_seed(0)
    return {
        name: {f"layer{i}.weight": torch.randn(per).to(dtype) for i in range(layers)}
        for name, dtype in (
            ("model", torch.bfloat16),
            ("master", torch.float32),
            ("exp_avg", torch.float32),
            ("exp_avg_sq", torch.float32),
        )
    }


def many_tensors(total_bytes: float, count: int = 3000) -> dict[str, Any]:
    """*count* fp32 tensors whose sizes spread evenly over four decades of their logarithm."""
    dice = random.Random(0)
    sizes = [math.exp(dice.uniform(0, math.log(4096))) for _ in range(count)]
    scale = total_bytes / 4 / sum(sizes)
    torch.manual_seed(0)
    return {"model": {f"p{i}": torch.randn(max(1, int(size * scale))) for i, size in enumerate(sizes)}}


STATES: dict[str, Callable[[float], dict[str, Any]]] = {
    "700 tensors": language_model,
    "3000 tensors": many_tensors,
    "small": lambda total: many_tensors(min(total, 0.37 * GB)),
}


def state_bytes(state: dict[str, Any]) -> int:
    return sum(t.numel() * t.element_size() for part in state.values() for t in part.values())


def warm(nbytes: int) -> None:
    """Leaves at least *nbytes* of touched pages free in the guest."""
    code = f"b = b'x' * {nbytes + 512 * 1024 * 1024}"
    subprocess.run([sys.executable, "-c", code], check=True)


def fsync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


def fio(directory: Path, nbytes: int, *, direct: bool, read: bool = False, jobs: int = 1) -> float:
    """Seconds that fio takes for *nbytes* in all; writes end with an fsync and go to freshly allocated files."""
    each = max(1, nbytes // jobs // (8 << 20)) * (8 << 20)
    how = ["--ioengine=libaio", "--iodepth=8", "--bs=8M", "--direct=1"]
    if not direct:
        how = ["--ioengine=psync", "--bs=1M", "--direct=0"]
    mode = ["--rw=read"] if read else ["--rw=write", "--end_fsync=1", "--fallocate=native"]
    if read and not direct:
        mode.append("--invalidate=1")
    what = ["fio", "--name=fio", f"--directory={directory}", f"--size={each}", f"--numjobs={jobs}"]
    command = [*what, *how, *mode, "--group_reporting", "--output-format=json"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    for path in directory.glob("fio.*"):
        if not read:
            path.unlink()
    return float(json.loads(done.stdout)["jobs"][0]["job_runtime"]) / 1000 / jobs * (nbytes / (each * jobs))


class Budget:
    """Time for several series of rounds: each gets its share of what is left."""

    def __init__(self, minutes: float, series: int) -> None:
        self.ends = time.monotonic() + 60.0 * minutes if minutes else math.inf
        self.series = series

    def rounds(self, most: int) -> Iterator[int]:
        """Up to *most* round numbers of the next series, fewer where the share is used up; at least one."""
        begun = time.monotonic()
        share = (self.ends - begun) / max(1, self.series)
        self.series -= 1
        for number in range(most):
            took = time.monotonic() - begun
            if number and took + took / number > share:  # the next one would take as long as those before
                return
            yield number


@dataclass
class Sample:
    """One run of one method."""

    wall_s: float
    cpu_s: float = 0.0
    peak_bytes: int = 0  # above what was resident before
    blocked_s: float | None = None


@dataclass
class Results:
    """All runs, by method; medians and ratios."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def add(self, name: str, sample: Sample) -> None:
        self.samples.setdefault(name, []).append(sample)

    def median(self, name: str, what: str = "wall_s") -> float:
        return statistics.median(getattr(sample, what) or 0.0 for sample in self.samples[name])

    def table(self, limit: str, nbytes: int) -> dict[str, dict[str, float]]:
        """Per method: seconds, GB/s, ratio to *limit*, CPU seconds, peak bytes, blocked seconds."""
        return {
            name: {
                "s": round(self.median(name), 3),
                "best_s": round(min(sample.wall_s for sample in runs), 3),
                "gb_s": round(nbytes / GB / self.median(name), 2),
                "ratio": round(self.median(limit) / self.median(name), 3),
                "cpu_s": round(self.median(name, "cpu_s"), 2),
                "peak_gb": round(self.median(name, "peak_bytes") / GB, 2),
                "blocked_s": round(self.median(name, "blocked_s"), 3),
            }
            for name, runs in self.samples.items()
        }


def measure(call: Callable[[], float | None]) -> Sample:
    """Wall, CPU and peak memory of *call*, which may return for how long the training thread was blocked."""
    before = resource.getrusage(resource.RUSAGE_SELF)
    Path("/proc/self/clear_refs").write_text("5")
    resident = _status("VmRSS")
    begun = time.monotonic()
    blocked = call()
    wall = time.monotonic() - begun
    after = resource.getrusage(resource.RUSAGE_SELF)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Sample(wall, cpu, max(0, _status("VmHWM") - resident), wall if blocked is None else blocked)


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def progress(text: str) -> None:
    """How far it is, for whoever waits."""
    print(f"  {time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def other_load() -> float:
    """The machine's load average of the last minute: figures taken above 0.5 say little."""
    return os.getloadavg()[0]


def fresh(directory: Path) -> Path:
    """*directory*, empty."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def print_table(title: str, table: dict[str, dict[str, float]]) -> None:
    print(f"\n{title}")
    print(f"{'':28}" + "".join(f"{key:>11}" for key in next(iter(table.values()))))
    for name, row in sorted(table.items(), key=lambda item: item[1]["s"]):
        print(f"{name:28}" + "".join(f"{value:>11}" for value in row.values()))

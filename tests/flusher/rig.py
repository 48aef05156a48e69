"""A rank without torch that stages, its real deputy, and a bus that gives it orders."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec

from powerguard.core.messages import (
    Ack,
    Decide,
    Failed,
    FromRank,
    Held,
    Plan,
    Purpose,
    Seal,
    SealWritten,
    Shard,
    ToRank,
)
from powerguard.core.types import RankReport
from powerguard.generations.ledger import Facts, Ledger
from powerguard.node.bus import Bus

RANK = Path(__file__).with_name("staging_rank.py")
SIZE = 1 << 20


def data_of(step: int, rank: int, size: int = SIZE) -> bytes:
    """What the ranks here stage."""
    return bytes([(step * 7 + rank) % 251]) * size


class Rank:
    """A process that stages and has started a deputy; `staged` are the steps that it has said so of."""

    def __init__(self, folder: Path, bus_path: Path, rank: int, world: int, **options: object) -> None:
        facts = Facts("job", rank, world, 0, str(bus_path), str(folder / "ckpt"), "optimizer_step")
        facts = msgspec.structs.replace(facts, **{k: v for k, v in options.items() if k in Facts.__struct_fields__})
        shm = folder / "shm"
        shm.mkdir(exist_ok=True)
        self.rank = rank
        self.log = folder / f"rank-{rank}.{time.monotonic_ns()}.log"
        wish = json.dumps({"facts": msgspec.to_builtins(facts), "shm": str(shm), "size": SIZE, **options})
        self.child = subprocess.Popen(
            [sys.executable, str(RANK), str(self.log), wish], stdin=subprocess.PIPE, start_new_session=True
        )

    def stage(self, *steps: int) -> None:
        """Has it stage these, one after the other."""
        assert self.child.stdin is not None
        self.child.stdin.write("".join(f"{step}\n" for step in steps).encode())
        self.child.stdin.flush()

    @property
    def ledger(self) -> Path | None:
        with contextlib.suppress(FileNotFoundError):
            for line in self.log.read_text().splitlines():
                if line.startswith("ledger "):
                    return Path(line.removeprefix("ledger "))
        return None

    @property
    def deputy(self) -> int:
        """The deputy's pid; 0 = none yet."""
        if self.ledger is None:
            return 0
        try:
            ledger = Ledger.open(self.ledger)
        except OSError:
            return 0
        pid = ledger.deputy
        ledger.close()
        return pid

    def end(self) -> None:
        deputy = self.deputy
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.child.pid, signal.SIGKILL)
        self.child.wait(30)
        assert self.child.stdin is not None
        self.child.stdin.close()
        if deputy and lives(deputy):
            os.kill(deputy, signal.SIGKILL)


def lives(pid: int) -> bool:
    """The process runs and isn't a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Node:
    """The daemon's end: a real bus, and what came in."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "ranks.sock"
        self.folder = folder
        self.reports: list[RankReport] = []
        self.bus = Bus(self.path, put=self.reports.append, clock=time.monotonic)
        self.ranks: list[Rank] = []
        self.acks = True

    def rank(self, rank: int = 0, world: int = 1, **options: object) -> Rank:
        self.ranks.append(Rank(self.folder, self.path, rank, world, **options))
        return self.ranks[-1]

    def said(self, kind: type[FromRank], rank: int = 0) -> list[FromRank]:
        """What came of *rank*, acknowledged on the way as a daemon does."""
        found = [r.message for r in list(self.reports) if r.rank == rank and isinstance(r.message, kind)]
        for message in found:
            if self.acks and isinstance(message, (Shard, Failed, SealWritten)):
                self.bus.send("job", rank, Ack(message.seq, type(message).__name__))
        return found

    def held(self, rank: int = 0) -> tuple[int, ...]:
        """The steps that the deputy of *rank* last said."""
        said = self.said(Held, rank)
        return said[-1].steps if said else ()  # type: ignore[union-attr]

    def decide(self, rank: int, seq: int, step: int, tag: str = "ev") -> str:
        """Orders plan STAGED; the generation's name."""
        name = f"step-{step:010d}.{tag}-{seq}"
        self.bus.send("job", rank, Decide(seq, Purpose.STOP, Plan.STAGED, step, name))
        return name

    def tell(self, rank: int, message: ToRank) -> None:
        self.bus.send("job", rank, message)

    def seal(self, rank: int, seq: int, step: int, name: str, world: int) -> None:
        shards = tuple(self.said(Shard, r)[-1].record for r in range(world))  # type: ignore[union-attr]
        self.bus.send("job", rank, Seal(seq, step, name, world, shards))

    def close(self) -> None:
        for rank in self.ranks:
            rank.end()
        self.bus.close(0.0)

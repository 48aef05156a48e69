"""Staged states of one rank: copies in shared memory, which its deputy can make durable when the rank can't.

The training thread copies its state to the shelf every so many steps (`generations/shelf.py`); the deputy, a process of
its own (`powerguard/flusher`), writes one out when the daemon decides for plan STAGED: a rank hangs or is dead, or the
time is too short for a fresh save. Memory: two copies of the state in /dev/shm, beside the flusher's arena.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import powerguard
from powerguard.errors import PowerguardError
from powerguard.generations.ledger import Facts
from powerguard.generations.names import home, rank_name
from powerguard.generations.record import ALIGN
from powerguard.generations.shelf import SHM, Shelf, SlotFile
from powerguard.train.flush import Flusher
from powerguard.train.identity import Identity
from powerguard.train.log import Log, explain
from powerguard.train.metered import MeteredFlusher

DEPUTY_STARTS = 3
"""So often a deputy that ended by itself is started anew."""
DEPUTY_WAIT_S = 60.0
"""An interpreter on a busy node may take so long to start."""


def facts_of(flusher: MeteredFlusher, identity: Identity, socket: str) -> Facts:
    """What the deputy of this rank must know."""
    pace = flusher.meter.pace()
    return Facts(
        job=identity.job,
        rank=identity.rank,
        world_size=identity.world_size,
        pid=os.getpid(),
        socket=os.path.abspath(socket),
        directory=str(flusher.directory),
        unit=flusher.unit,
        attempt=flusher.attempt,
        portable=flusher.portable,
        reserve=flusher.reserves,
        write_s=pace.write_s + pace.fsync_s,
    )


class Spot:
    """A slot of the shelf as a place for a copy; pinned where there is CUDA."""

    def __init__(self, held: SlotFile) -> None:
        self.held = held
        self.capacity, self.view = held.capacity, held.view
        self.tensor = torch.frombuffer(held.map, dtype=torch.uint8)
        assert self.tensor.data_ptr() % ALIGN == 0
        self.pinned = torch.cuda.is_available() and not self._register()

    def _register(self) -> int:
        cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return int(cudart.cudaHostRegister(self.tensor.data_ptr(), self.capacity, 0))

    def release(self) -> None:
        """Undoes the pinning; to be called before the slot is unmapped."""
        if self.pinned:
            cudart: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cudart.cudaHostUnregister(self.tensor.data_ptr())
            self.pinned = False


class Staging:
    """The shelf and the deputy of one rank; all but `close` belongs to the training thread."""

    def __init__(
        self, flusher: Flusher, state: Mapping[str, object], facts: Facts, *, log: Log, folder: Path = SHM
    ) -> None:
        """Makes room for two copies and starts the deputy; raises StateError, with the numbers, where there is none."""
        self.flusher, self.log, self.facts = flusher, log, facts
        self.copies = 0
        self.skipped = 0
        self.copy_s = 0.0  # of the newest copy
        self._spots: dict[Path, Spot] = {}
        self._starts = 0
        self._started_at = 0.0
        self._child: subprocess.Popen[bytes] | None = None
        self._said = ""
        self.shelf = Shelf(facts, folder=folder)
        try:
            self.shelf.make(*flusher.foreseen(state))
            self._start()
        except BaseException:
            self.shelf.close()
            raise

    def stage(self, state: Mapping[str, object], step: int) -> bool:
        """Copies *state* as that of *step*. False, with a warning said once, where it can't be: training goes on."""
        try:
            self._care()
            done = self._copy(state, step)
        except (PowerguardError, OSError) as error:
            self._warn("a state couldn't be staged", explain(error))
            done = False
        self.copies += done
        self.skipped += not done
        return done

    def _copy(self, state: Mapping[str, object], step: int) -> bool:
        found: list[int] = []

        def place(data_bytes: int, content_bytes: int) -> Spot | None:
            opened = self.shelf.open(data_bytes, content_bytes)
            if opened is None:
                return None
            found.append(opened[0])
            return self._spot(opened[1])

        copied = self.flusher.copy(state, place)
        if copied is None:
            return False
        self.copy_s = copied.copy_s
        self.shelf.fill(found[0], step=step, data_bytes=copied.size, content=copied.content)
        return True

    def _spot(self, held: SlotFile) -> Spot:
        if held.path not in self._spots:
            for path in [path for path in self._spots if not path.exists()]:
                self._spots.pop(path).release()
            self._spots[held.path] = Spot(held)
        return self._spots[held.path]

    # ---- the deputy --------------------------------------------------------------------------------

    def _start(self) -> None:
        """Starts a deputy, in a session of its own, that is nobody's child: neither a signal to this rank's group nor
        the end of its descendants ends it. It holds none of our files: whoever reads our output isn't kept waiting.
        """
        self._starts += 1
        self._started_at = time.monotonic()
        package = str(Path(powerguard.__file__).resolve().parent.parent)
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        with open(self._log_path(), "ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "powerguard.flusher", str(self.shelf.ledger.path)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=log,
                cwd="/",
                env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
                start_new_session=True,
            )

    def _log_path(self) -> Path:
        folder = home(self.flusher.directory) / "deputies"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{rank_name(self.facts.rank)}.log"
        with contextlib.suppress(OSError):
            if path.stat().st_size > 1 << 20:
                path.unlink()
        return path

    def _care(self) -> None:
        """A deputy that has ended is started anew, a few times, and what it kept is let go."""
        if self._child is not None and self._child.poll() is not None:
            self._child = None  # it has left its child behind
        pid = self.shelf.ledger.deputy
        if pid and _lives(pid):
            return
        if not pid and time.monotonic() - self._started_at < DEPUTY_WAIT_S:
            return
        self.shelf.ledger.keep = -1
        self.shelf.ledger.deputy = 0
        if self._starts < DEPUTY_STARTS:
            self._warn("the deputy of this rank has ended and is started anew", f"see {self._log_path()}")
            self._start()
        else:
            self._warn("this rank has no deputy: a staged state can't be made durable", f"see {self._log_path()}")

    def _warn(self, text: str, why: str) -> None:
        if text != self._said:
            self._said = text
            self.log.warning(text, why=why)

    def close(self) -> None:
        """The deputy leaves, the memory is given back."""
        for spot in self._spots.values():
            spot.release()
        self._spots.clear()
        self.shelf.close()
        if self._child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._child.wait(5.0)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True

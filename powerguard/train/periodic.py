"""Saves of a training loop by itself: names without agreement, sealing by the last rank, saving in the background."""

from __future__ import annotations

import hashlib
import itertools
import os
import uuid
from collections.abc import Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from powerguard.errors import CheckpointError, StateError
from powerguard.generations import resumes
from powerguard.generations.names import generation_name
from powerguard.generations.scan import Generation, Skipped, latest, look
from powerguard.generations.seal import seal_if_whole
from powerguard.train.flush import Flusher, LoadReport, Staged, Written
from powerguard.train.load import refuse_others
from powerguard.train.one_place import find_mark, leave_mark
from powerguard.train.rendezvous import agent_store, ask, tell
from powerguard.train.replicas import Storage

_KEY = "powerguard/checkpoint"


class Saving:
    """A save that is under way."""

    def __init__(self, path: Path, stage_s: float, future: Future[Written]) -> None:
        self.path = path
        self.stage_s = stage_s  # for so long the training thread was blocked
        self._future = future

    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._future.done()

    def result(self, wait_s: float | None = None) -> Path:
        """The generation's path once this rank's part is durable; raises what the save raised, or TimeoutError."""
        self._future.result(wait_s)
        return self.path


class Checkpointer:
    """Saves into and loads from one directory, as one rank of a run; keeps memory and threads between saves."""

    def __init__(
        self,
        directory: str | Path,
        *,
        rank: int | None = None,
        world_size: int | None = None,
        keep: int | None = None,
        attempt: str = "",
        allow_pickle: bool = False,
        unit: str = "optimizer_step",
        storage: Storage = "local",
        replicated: Collection[str] = (),
        flusher: Flusher | None = None,
    ) -> None:
        """*rank* and *world_size* are torch.distributed's or torchrun's, if not given.

        With *keep*, older sealed generations are deleted after each save. *attempt* must differ from start to start
        and be the same on all ranks; it is found by itself where torch.distributed is initialised or torchrun started
        the ranks: then all ranks make their Checkpointers in the same order, and wait for each other. Raises
        StateError where it can't be found, or a rank doesn't come, DirectoryError where this rank sees another
        directory than rank 0 does. A *flusher* that is given is shared, and stays its owner's.
        """
        self.rank = _rank() if rank is None else rank
        self.world_size = _world_size() if world_size is None else world_size
        self.keep = keep
        self.attempt = attempt or _attempt(str(directory), self.rank, self.world_size)
        self._own_flusher = flusher is None
        self._flusher = flusher or Flusher(
            directory,
            rank=self.rank,
            world_size=self.world_size,
            allow_pickle=allow_pickle,
            reserve=False,
            unit=unit,
            attempt=self.attempt,
            storage=storage,
            replicated=replicated,
        )
        self._names: dict[int, int] = {}
        one_of_many = f"{_digest(str(self.directory))}/" if attempt else ""  # which may all have the attempt given
        self._key = f"{_KEY}/load/{one_of_many}{self.attempt}"
        self._rounds = 0
        self._background = ThreadPoolExecutor(1, "powerguard-save")
        self.savings: list[Saving] = []  # under way, or not asked after yet

    @property
    def directory(self) -> Path:
        """Where generations go, absolute."""
        return self._flusher.directory

    def save(self, state: Mapping[str, object], step: int) -> Path:
        """Saves *state*; this rank's part is durable on return, and the generation sealed if all ranks are done."""
        self.wait()
        name = self._name(step)
        self._flusher.flush(state, step, name)
        self._finish(name)
        return self.directory / name

    def save_async(self, state: Mapping[str, object], step: int) -> Saving:
        """Copies *state*, and makes the copy durable in the background. Waits for the save before the last one.

        An error of an earlier save that nobody asked for is raised here.
        """
        while len(self.savings) > 1:
            self.savings.pop(0).result()
        name = self._name(step)
        staged = self._flusher.stage(state, step)
        future = self._background.submit(self._write, staged, name)
        self.savings.append(Saving(self.directory / name, staged.stage_s, future))
        return self.savings[-1]

    def wait(self) -> None:
        """Until no save is under way; raises the first error of one."""
        while self.savings:
            self.savings.pop(0).result()

    def _write(self, staged: Staged, name: str) -> Written:
        written = self._flusher.write(staged, name)
        self._finish(name)
        return written

    def _finish(self, name: str) -> None:
        sealed = seal_if_whole(self.directory, name).sealed
        self._flusher.settle(self.keep if sealed else None)  # each rank's own space is reserved anew

    def _name(self, step: int) -> str:
        """Unique to this attempt; the same on all ranks, as they save the same steps equally often."""
        number = self._names[step] = self._names.get(step, 0) + 1
        return generation_name(step, f"p{self.attempt}" + (f"-{number}" if number > 1 else ""))

    def load(
        self, state: Mapping[str, object], *, strict: bool = True, cap: int | None = resumes.CAP
    ) -> LoadReport | None:
        """Loads the newest generation that all ranks find whole and undamaged; None where there is none.

        With several ranks, torch.distributed must be initialised, for its store: ranks tell each other there what they
        found. It counts as a resume: a generation loaded *cap* times with none newer written since is passed over; with
        None nothing is counted, which is right for who only reads. Raises StateError where *state* doesn't fit or all
        is of another number of ranks, CheckpointError where every generation is damaged.
        """
        if self.world_size == 1:
            return self._flusher.resume(state, strict=strict, cap=cap)
        store = _store()
        if store is None:
            raise StateError("ranks can't agree on a generation", todo="initialise torch.distributed before loading")
        return self._load_together(store, state, strict, cap)

    def _load_together(
        self, store: Any, state: Mapping[str, object], strict: bool, cap: int | None
    ) -> LoadReport | None:
        """Rank 0 names a candidate, all load it, all tell; another one if anybody met damage."""
        damaged: dict[str, str] = {}
        while True:
            self._rounds += 1
            key = f"{self._key}/{self._rounds}"
            if self.rank == 0:
                found = latest(self.directory, verify=False, world_size=self.world_size, cap=cap, exclude=damaged)
                reasons = "; ".join(map(str, found.skipped))
                store.set(f"{key}/candidate", f"{found.generation.name if found.generation else ''}|{reasons}")
            name, _, reasons = store.get(f"{key}/candidate").decode().partition("|")
            if not name:
                break
            report, problem = self._try(look(self.directory / name), state, strict)
            store.set(f"{key}/{self.rank}", problem)
            told = [store.get(f"{key}/{rank}").decode() for rank in range(self.world_size)]
            problems = [f"rank {rank}: {text[1:]}" for rank, text in enumerate(told) if text]
            if any(text.startswith("s") for text in told):
                raise StateError("; ".join(problems[:3]))
            if report is not None and not problems:
                if self.rank == 0 and cap is not None:
                    resumes.count(self.directory, name)
                skipped = [str(Skipped(bad, why)) for bad, why in damaged.items()] + [
                    text for text in [reasons] if text
                ]
                return msgspec.structs.replace(report, skipped=tuple(skipped))
            damaged[name] = problems[0]
        if damaged:
            raise CheckpointError(f"no generation in {self.directory} can be trusted: {damaged}")
        refuse_others(self.directory, self.world_size)
        return None

    def _try(self, generation: Generation, state: Mapping[str, object], strict: bool) -> tuple[LoadReport | None, str]:
        """(report, "") or (None, what went wrong): "s" before what is wrong with the state, "c" with the checkpoint."""
        try:
            return self._flusher.load(generation, state, strict=strict), ""
        except CheckpointError as error:
            return None, f"c{error.message}"
        except StateError as error:
            return None, f"s{error}"

    def close(self) -> None:
        """Waits for running saves, raises their error, gives memory back."""
        try:
            self.wait()
        finally:
            self._background.shutdown()
            if self._own_flusher:
                self._flusher.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


_made = itertools.count(1)
"""Numbers this process's Checkpointers of several ranks: all ranks make theirs in the same order."""


def _attempt(directory: str, rank: int, world_size: int) -> str:
    """A name that all ranks of this start have and no other start has.

    Raises StateError where they have no store to agree on it, DirectoryError where this rank sees another *directory*
    than rank 0.
    """
    if world_size == 1:
        return uuid.uuid4().hex[:8]
    key = f"{_KEY}/attempt/{next(_made)}"  # without the directory: each rank may have another name for it
    store = _store() or agent_store()
    if store is None:
        raise StateError(
            "ranks have no name in common for this start of the run",
            todo="initialise torch.distributed before this, or start the ranks with torchrun "
            "(a Checkpointer can be given attempt= instead)",
        )
    if rank == 0:
        name = uuid.uuid4().hex[:8]
        tell(store, key, world_size, name if leave_mark(Path(directory), name) else f"{name}!")
        return name
    name, unmarked, _ = ask(store, key, rank, world_size).partition("!")
    del store  # torchrun's is connected to for no longer than that
    if not unmarked:
        find_mark(Path(directory), name, rank=rank)
    return name


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _store() -> Any:
    """torch.distributed's store, or None where it isn't initialised."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return None
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _rank() -> int:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))


def _world_size() -> int:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1"))

"""Power limits of the GPUs, through NVML: lowered, restored, and remembered over a crash in between.

The limits found are made durable before the first of them is changed, so that whoever starts next can put them back.
A reboot puts them back by itself (NVML's limits don't outlive the driver): a note of another boot is dropped.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from powerguard.errors import MissingDependency, PowerguardError
from powerguard.generations.disk import DISK, Disk
from powerguard.generations.durable import fsync_path, make_directory, write_file

SAME_MW = 1000
"""Limits that differ by less than a watt are the same: drivers round."""


class Gpu(Struct, frozen=True):
    """One GPU. Watts; None = it has no such figure."""

    index: int
    uuid: str
    name: str
    draw_w: float | None
    limit_w: float | None  # in force
    default_w: float | None
    least_w: float | None

    def lowered_w(self, pct: float) -> float | None:
        """The limit that *pct* of its default would be: never above the one in force, never below its least."""
        if self.limit_w is None or self.default_w is None:
            return None
        return min(self.limit_w, max(self.default_w * pct / 100.0, self.least_w or 0.0))

    def saved_w(self, pct: float) -> float:
        """What lowering its limit would take off its draw now."""
        target = self.lowered_w(pct)
        return 0.0 if target is None or self.draw_w is None else max(0.0, self.draw_w - target)


class Limit(Struct, frozen=True):
    """What was found, and what was put in its place. Milliwatts, as NVML counts."""

    found_mw: int
    lowered_mw: int


class Note(Struct, frozen=True):
    """The file: limits by the GPU's UUID, and the boot that they belong to."""

    boot: str
    limits: dict[str, Limit] = field(default_factory=dict)


class Outcome(Struct, frozen=True):
    """What was done, and what couldn't be, in words."""

    done: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()


def library() -> Any:
    """The module `pynvml`. Raises MissingDependency."""
    try:
        import pynvml
    except ImportError:
        raise MissingDependency("nvidia-ml-py isn't installed", todo="pip install 'powerguard[gpu]'") from None
    return pynvml


def look(nvml: Any) -> tuple[Gpu, ...]:
    """The GPUs of this node, those that are lost left out. Raises PowerguardError where there is no driver."""
    with _session(nvml):
        return tuple(gpu for _, gpu in _gpus(nvml))


class Limits:
    """The limits of this node's GPUs; *path* holds the note, *boot* names this boot."""

    def __init__(self, path: Path, boot: str, nvml: Any, disk: Disk = DISK) -> None:
        self.path, self._boot, self._nvml, self._disk = path, boot, nvml, disk

    def lower(self, pct: float) -> Outcome:
        """Every GPU's limit to *pct* of its default. A repeat changes nothing.

        Raises PowerguardError where there is no driver, or where the note can't be written: then nothing is changed.
        """
        done: list[str] = []
        failed: list[str] = []
        with _session(self._nvml):
            known = self._read().limits
            plan = dict(known)
            handles = list(_gpus(self._nvml))
            for _, gpu in handles:
                found_w = known[gpu.uuid].found_mw / 1000 if gpu.uuid in known else gpu.limit_w
                target_w = replace(gpu, limit_w=found_w).lowered_w(pct)
                if target_w is None or found_w is None:
                    done.append(f"GPU {gpu.index} stays as it is: its power can't be limited")
                    continue
                plan[gpu.uuid] = Limit(round(found_w * 1000), round(target_w * 1000))
            if plan != known:
                self._write(Note(self._boot, plan))
            for handle, gpu in handles:
                if gpu.uuid in plan:
                    self._set(handle, gpu, plan[gpu.uuid].lowered_mw, done, failed)
        return Outcome(tuple(done), tuple(failed))

    def restore(self) -> Outcome:
        """Every limit as it was found, unless somebody has changed it since. Without a note nothing is done.

        What can't be restored stays in the note. Raises PowerguardError where there is no driver.
        """
        known = self._read().limits
        if not known:
            self._forget()
            return Outcome()
        done: list[str] = []
        failed: list[str] = []
        left = dict(known)
        absent = set(known)
        with _session(self._nvml):
            for handle, gpu in _gpus(self._nvml):
                absent.discard(gpu.uuid)
                limit = known.get(gpu.uuid)
                if limit is None or gpu.limit_w is None:
                    continue
                if abs(gpu.limit_w * 1000 - limit.lowered_mw) < SAME_MW:
                    if not self._set(handle, gpu, limit.found_mw, done, failed):
                        continue
                elif abs(gpu.limit_w * 1000 - limit.found_mw) >= SAME_MW:
                    done.append(f"GPU {gpu.index} stays at {gpu.limit_w:.0f} W: somebody has changed it")
                del left[gpu.uuid]
        failed += [f"{uuid} isn't there" for uuid in sorted(absent)]
        if left:
            self._write(Note(self._boot, left))
        else:
            self._forget()
        return Outcome(tuple(done), tuple(failed))

    @property
    def lowered(self) -> bool:
        """Whether limits of this boot are to be restored."""
        return bool(self._read().limits)

    def _set(self, handle: Any, gpu: Gpu, limit_mw: int, done: list[str], failed: list[str]) -> bool:
        if gpu.limit_w is not None and abs(gpu.limit_w * 1000 - limit_mw) < SAME_MW:
            return True
        try:
            self._nvml.nvmlDeviceSetPowerManagementLimit(handle, limit_mw)
        except self._nvml.NVMLError as err:
            failed.append(f"GPU {gpu.index}: {err}")
            return False
        done.append(f"GPU {gpu.index}: {gpu.limit_w:.0f} W -> {limit_mw / 1000:.0f} W")
        return True

    def _read(self) -> Note:
        """The note; an empty one if there is none of this boot, or none that can be read."""
        try:
            note = msgspec.json.decode(self.path.read_bytes(), type=Note)
        except (OSError, msgspec.MsgspecError, ValueError):
            return Note(self._boot)
        return note if note.boot == self._boot else Note(self._boot)

    def _write(self, note: Note) -> None:
        try:
            make_directory(self._disk, self.path.parent)
            write_file(self._disk, self.path, msgspec.json.encode(note))
        except OSError as err:
            raise PowerguardError(
                f"{self.path} can't be written: {err.strerror}", todo="GPU limits aren't changed without it"
            ) from None

    def _forget(self) -> None:
        with contextlib.suppress(OSError):
            self._disk.unlink(self.path)
            fsync_path(self._disk, self.path.parent)


@contextlib.contextmanager
def _session(nvml: Any) -> Iterator[None]:
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as err:
        raise PowerguardError(f"NVML: {err}", todo="install the NVIDIA driver, or drop [shed]") from None
    try:
        yield
    finally:
        with contextlib.suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _gpus(nvml: Any) -> Iterator[tuple[Any, Gpu]]:
    """Each GPU with its handle; one that is lost is left out."""
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            uuid, name = nvml.nvmlDeviceGetUUID(handle), nvml.nvmlDeviceGetName(handle)
        except nvml.NVMLError:
            continue
        yield (
            handle,
            Gpu(
                index=index,
                uuid=str(uuid),
                name=str(name),
                draw_w=_watts(nvml, nvml.nvmlDeviceGetPowerUsage, handle),
                limit_w=_watts(nvml, nvml.nvmlDeviceGetPowerManagementLimit, handle),
                default_w=_watts(nvml, nvml.nvmlDeviceGetPowerManagementDefaultLimit, handle),
                least_w=_watts(nvml, nvml.nvmlDeviceGetPowerManagementLimitConstraints, handle),
            ),
        )


def _watts(nvml: Any, ask: Any, handle: Any) -> float | None:
    try:
        answer = ask(handle)
    except nvml.NVMLError:
        return None
    return float(answer[0] if isinstance(answer, (list, tuple)) else answer) / 1000.0

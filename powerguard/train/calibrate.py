"""One rank's part in `powerguard calibrate`: writes a state-sized shard as a save would, whenever it is told to.

``python -m powerguard.train.calibrate DIRECTORY RANK BYTES``: makes memory and room, says so, and for each line on
standard input copies and writes once. Answers are lines of JSON on standard output. Nothing of it ever is a checkpoint.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import msgspec
import torch
from msgspec import Struct

from powerguard.errors import DirectoryError, PowerguardError
from powerguard.generations.disk import DISK
from powerguard.generations.paces import Save
from powerguard.generations.record import CHUNK_BYTES
from powerguard.generations.storage import counter, written_bytes
from powerguard.train.arena import Slot, make_slots
from powerguard.train.prove import prove
from powerguard.train.reserve import Reserve
from powerguard.train.writer import FILL_THREADS

SOURCE_BYTES = 8 * CHUNK_BYTES
"""Random bytes, copied as often as it takes: a disk that compresses mustn't look fast."""


class Said(Struct, omit_defaults=True):
    """One line to the parent: ready, one save, or why not."""

    save: Save | None = None
    writer: str = ""
    source: str = ""
    error: str = ""
    todo: str = ""
    code: int = 0


def main(arguments: list[str]) -> int:
    """Returns the exit code."""
    try:
        return _measure(Path(arguments[0]), int(arguments[1]), int(arguments[2]))
    except BrokenPipeError:  # who asked has gone: what is still to be said can't be, at exit neither
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _measure(directory: Path, rank: int, size: int) -> int:
    try:
        with ThreadPoolExecutor(FILL_THREADS, "powerguard-calibrate") as pool:
            _serve(directory, rank, size, pool)
    except PowerguardError as error:
        _say(Said(error=error.message, todo=error.todo, code=error.exit_code))
        return error.exit_code
    return 0


def _say(said: Said) -> None:
    sys.stdout.write(msgspec.json.encode(said).decode() + "\n")
    sys.stdout.flush()


def _serve(directory: Path, rank: int, size: int, pool: ThreadPoolExecutor) -> None:
    on_gpu = torch.cuda.is_available()
    (slot,), _ = make_slots(1, size, pool, pin=on_gpu)
    source = _source(rank, on_gpu)
    disk_counter = counter(directory)
    reserve = Reserve(DISK, directory, rank)
    reserve.open(wait_s=0.0)
    try:
        _make_room(reserve, size)
        _say(Said(source=source.device.type))
        for _ in sys.stdin:
            before = written_bytes(disk_counter)
            proof = prove(DISK, reserve, slot, size, stage=partial(_copy, slot, size, source, pool), pool=pool)
            after = written_bytes(disk_counter)
            taken = after - before if before is not None and after is not None else 0
            stage_s, write_s, fsync_s = proof.stage_s or 0.0, proof.write_s or 0.0, proof.fsync_s or 0.0
            save = Save(size, write_s, fsync_s, taken, stage_s, time.time())
            _make_room(reserve, size)
            _say(Said(save=save, writer=proof.mode.value))
    finally:
        reserve.close()
        slot.release()


def _make_room(reserve: Reserve, size: int) -> None:
    """Room for one more; raises DirectoryError where there is none."""
    reserve.fill(1, size, 1)
    if reserve.count < 1 and reserve.short:
        raise DirectoryError(reserve.reason, todo="free space, or give a smaller --state-bytes")


def _source(rank: int, on_gpu: bool) -> torch.Tensor:
    source = torch.frombuffer(bytearray(os.urandom(SOURCE_BYTES)), dtype=torch.uint8)
    return source.to(torch.device("cuda", rank % torch.cuda.device_count())) if on_gpu else source


def _copy(slot: Slot, size: int, source: torch.Tensor, pool: ThreadPoolExecutor) -> None:
    """Fills the slot as staging does: from the GPU where there is one, else from host memory by several threads."""
    pieces = [(at, min(SOURCE_BYTES, size - at)) for at in range(0, size, SOURCE_BYTES)]
    if source.device.type == "cpu":
        base = slot.tensor.data_ptr()
        list(pool.map(lambda piece: ctypes.memmove(base + piece[0], source.data_ptr(), piece[1]), pieces))
        return
    for at, length in pieces:
        slot.tensor[at : at + length].copy_(source[:length], non_blocking=True)
    torch.cuda.synchronize(source.device)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What the flusher answers."""

from __future__ import annotations

from msgspec import Struct

from powerguard.core.messages import ShardRecord


class Readiness(Struct, frozen=True):
    """What `prepare` made and measured; the times are None where nothing was written."""

    state_bytes: int
    capacity_bytes: int  # of one slot, in memory and on disk
    memory_bytes: int  # of the arena
    slots: int
    reserved: int  # saves that disk space is reserved for
    writer: str
    stage_s: float | None = None
    write_s: float | None = None
    fsync_s: float | None = None
    warnings: tuple[str, ...] = ()


class Written(Struct, frozen=True):
    """A durable rank folder. *fsync_s* is all that came after the data was handed to the kernel."""

    record: ShardRecord
    write_s: float
    fsync_s: float
    bytes: int


class Copied(Struct, frozen=True):
    """A copy that lies outside the arena, and what its record is to say (`record.Content` as JSON)."""

    size: int
    content: bytes
    copy_s: float

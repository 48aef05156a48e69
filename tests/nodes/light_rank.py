"""A rank without torch: the real link and agreement, real files of a real format, a training that only sleeps.

`python light_rank.py LOG DIR SOCKET [WISH]`: as gloo_rank.py. Its ranks meet at no collective.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path

from msgspec import Raw
from msgspec.structs import replace

from powerguard import wire
from powerguard.core import follow
from powerguard.core.messages import Beat, Failed, FromRank, Hello, SealWritten, Shard, ShardRecord, ToRank
from powerguard.core.page import CELL
from powerguard.generations import seal
from powerguard.generations.disk import DISK
from powerguard.generations.durable import fsync_path, make_directory, write_file
from powerguard.generations.names import RECORD, SHARD, rank_name
from powerguard.generations.record import CHUNK_BYTES, RECORD_FORMAT, Record, ShardFile, checksum, encode
from powerguard.sim.rank import Disk, RankSpec, SimRank
from powerguard.train.link import Link
from powerguard.train.page import SharedPage

SPEC = {"step_s": 0.1, "stage_s": 0.02, "write_s": 0.3, "fsync_s": 0.05}
EMPTY = b'{"__metadata__":{}}'


class LightRank(SimRank):
    """Its disk is real, its listener is the link's thread."""

    def __init__(self, rank: int, world_size: int, folder: Path, wish: dict) -> None:
        super().__init__("job", rank, world_size, RankSpec(**{**SPEC, **wish}), Disk(), (), seed=rank)
        self.pid = os.getpid()
        self.folder = folder
        self.page = SharedPage(f"light.{rank}")
        self.lock = threading.RLock()
        self.left = threading.Event()

    # ---- the listener's side, on the link's thread -----------------------------------------------------

    def hello(self) -> Hello:
        with self.lock:
            said = self._hello()
        return replace(
            said,
            master=os.environ["MASTER_ADDR"],
            directory=str(self.folder),
            local_rank=self.rank % 2,
            page=self.page.path,
        )

    def beat(self) -> Beat:
        with self.lock:
            return Beat(self.step, self._pace(), self._busy)

    def hear(self, message: ToRank, now: float | None = None) -> tuple[FromRank, ...]:  # type: ignore[override]
        with self.lock:
            return tuple(super().hear(message, now or time.monotonic()))

    def due(self) -> tuple[FromRank, ...]:
        with self.lock:
            self.follower, ripe = follow.due(self.follower, time.monotonic())
            return ripe

    def next_due(self) -> float | None:
        with self.lock:
            return follow.next_due(self.follower)

    def connected(self, *, yes: bool) -> None:
        """Nothing to do."""

    def alone(self, path: str) -> None:
        """Nothing to do."""

    def trouble(self, error: Exception) -> None:
        print(error, file=sys.stderr)

    # ---- the training thread ---------------------------------------------------------------------------

    def live(self, now: float) -> bool:
        """One moment of its life; whether there is something to say."""
        with self.lock:
            before = self.follower.unheard
            if not self.started:
                self.started, self._ends_at = True, now + self.spec.step_s
            self._disk_work(now)
            self._train(now, [])
            self.page.cells[CELL] = self.step
            return self.follower.unheard is not before

    def _disk_work(self, now: float) -> None:
        for done_at, one in [item for item in self._sealing if item[0] <= now]:
            self._sealing.remove((done_at, one))
            deed: SealWritten | Failed = SealWritten(one.seq, one.step, one.generation)
            try:
                seal(self.folder, one.generation, step=one.step, world_size=one.world_size, shards=one.shards)
            except Exception as error:
                deed = Failed(one.seq, one.step, str(error))
            self.follower = follow.say(self.follower, deed, now)
        super()._disk_work(now)

    def _durable(self, save: follow.Save, now: float) -> None:
        shard = Shard(save.seq, save.step, save.generation, self._written(save), self.spec.write_s)
        self.follower = follow.say(self.follower, shard, now)

    def _written(self, save: follow.Save) -> ShardRecord:
        name = rank_name(self.rank)
        folder = self.folder / save.generation / name
        make_directory(DISK, folder)
        data = len(EMPTY).to_bytes(8, "little") + EMPTY + os.urandom(4096)
        write_file(DISK, folder / SHARD, data)
        record, digest = encode(
            Record(
                format=RECORD_FORMAT, digest="", generation=save.generation, step=save.step, unit="optimizer_step",
                rank=self.rank, world_size=self.world_size, attempt="", portable=False, written_at=time.time(),
                created_by="light rank", file=ShardFile(SHARD, len(data), CHUNK_BYTES, (checksum(data),)),
                state=Raw(b"null"),
            )
        )  # fmt: skip
        write_file(DISK, folder / RECORD, record)
        fsync_path(DISK, folder)
        fsync_path(DISK, folder.parent)
        return ShardRecord(self.rank, name, len(data) + len(record), digest)


def main(log_path: str, folder: str, socket: str, wish: str = "{}") -> int:
    """Trains until it is told to leave; its exit code."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    Path(folder).mkdir(parents=True, exist_ok=True)
    one = LightRank(rank, world, Path(folder), json.loads(wish))
    link = Link(socket, wire.identity("job", rank), one)
    step = -1
    with open(log_path, "a", buffering=1) as log:
        log.write(json.dumps({"pid": os.getpid(), "first": 0}) + "\n")
        link.start()
        while one.alive:
            if one.live(time.monotonic()):
                link.wake()
            if one.step > step:
                step = one.step
                log.write(json.dumps({"step": step, "t": time.monotonic()}) + "\n")
            time.sleep(0.01)
        log.write(json.dumps({"verdict": "told to leave", "code": one.left_with, "at": one.step}) + "\n")
    link.stop("left")
    one.page.close()
    return one.left_with or 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

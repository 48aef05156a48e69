"""A rank in a process of its own: the simulated one, on the real bus and in real time.

`python scripted_rank.py SOCKET JOB RANK WORLD LOG`: every message is a line of LOG; it exits as it is told.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import zmq

from powerguard import wire
from powerguard.sim.rank import Disk, RankSpec, SimRank

SPEC = RankSpec(step_s=0.1, stage_s=0.05, write_s=0.8, fsync_s=0.05)


def main(socket_path: str, job: str, rank: int, world_size: int, log: Path) -> int:
    """Lives until it is told to leave; its exit code is the one that it was told."""
    one = SimRank(job, rank, world_size, SPEC, Disk(), (), seed=rank)
    context = zmq.Context()
    dealer: zmq.Socket[bytes] = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.IDENTITY, wire.identity(job, rank))
    dealer.setsockopt(zmq.LINGER, 500)
    dealer.setsockopt(zmq.RECONNECT_IVL, 50)
    dealer.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
    dealer.connect(f"ipc://{socket_path}")
    with log.open("a", buffering=1) as out:
        while one.alive:
            said = one.tick(time.monotonic(), [])
            if dealer.poll(10):
                message = wire.decode_to_rank(dealer.recv_multipart())
                named = {"t": time.monotonic(), "is": type(message).__name__}
                for name in ("seq", "purpose", "event", "step", "generation", "code"):
                    if hasattr(message, name):
                        named[name] = getattr(message, name)
                out.write(json.dumps(named) + "\n")
                said += one.hear(message, time.monotonic())
            for answer in said:
                dealer.send_multipart(wire.encode(answer))
        out.write(json.dumps({"is": "left", "code": one.left_with, "step": one.step}) + "\n")
    context.destroy(linger=500)
    return one.left_with or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), Path(sys.argv[5])))

"""Gloo ranks on several hosts from one process: torch is imported once, then each rank forks and moves to its host.

`python nursery.py SPEC`: SPEC is a JSON list of {host, env, log, err, exit, folder, socket, wish}. The exit code of a
rank is written to *exit* once it has left. SIGTERM ends them all.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed

import powerguard.train.attach
import powerguard.train.saver  # noqa: F401
from tests.nodes import gloo_rank
from tests.nodes.hosts import CLONE_NEWNET

torch.set_num_threads(1)


def born(spec: dict) -> int:
    """A rank; returns in the parent only."""
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        os.dup2(os.open(spec["err"], os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
        with open(f"/var/run/netns/{spec['host']}") as there:
            if ctypes.CDLL(None, use_errno=True).setns(there.fileno(), CLONE_NEWNET):
                raise OSError(ctypes.get_errno(), "setns")
        os.environ.update(spec["env"])
        gloo_rank.main(spec["log"], spec["folder"], spec["socket"], spec["wish"])
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


def main(specs: list[dict]) -> None:
    """Until all have left."""
    ranks = {born(spec): Path(spec["exit"]) for spec in specs}

    def end(*_: object) -> None:
        for pid in ranks:
            os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    while ranks:
        pid, status = os.wait()
        ranks.pop(pid).write_text(str(os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

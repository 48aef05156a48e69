"""A rank that stages what its stdin says, and starts a deputy as the training process does. Not a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import msgspec
from msgspec import Raw

from powerguard.generations.ledger import Facts
from powerguard.generations.record import Content
from powerguard.generations.shelf import Shelf


def main() -> None:
    """Stages until its stdin ends; then closes its shelf."""
    log = open(sys.argv[1], "a", buffering=1)  # noqa: SIM115
    wish = json.loads(sys.argv[2])
    facts = msgspec.structs.replace(msgspec.convert(wish["facts"], Facts), pid=os.getpid())
    shelf = Shelf(facts, folder=Path(wish["shm"]))
    content = msgspec.json.encode(Content(Raw(b"{}")))
    shelf.make(wish["size"], len(content))
    log.write(f"ledger {shelf.ledger.path}\n")
    subprocess.run(
        [sys.executable, "-m", "powerguard.flusher", str(shelf.ledger.path)],
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        check=True,
    )
    for line in sys.stdin:
        step = int(line)
        opened = shelf.open(wish["size"], len(content))
        if opened is None:
            log.write(f"kept {step}\n")
            continue
        slot, held = opened
        held.view[: wish["size"]] = bytes([(step * 7 + facts.rank) % 251]) * wish["size"]
        if step == wish.get("torn_at"):
            log.write(f"torn {step}\n")
            time.sleep(600)
        shelf.fill(slot, step=step, data_bytes=wish["size"], content=content)
        log.write(f"staged {step}\n")
    shelf.close()


main()

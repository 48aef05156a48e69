"""What things are called on disk.

::

    DIRECTORY/                              given by the user
        step-0000000123.<tag>/              one generation; the tag is unique to the attempt
            rank-00000/                     appears by one rename, complete and durable
                shard.safetensors
                record.json
            seal.json                       last
        .powerguard/                        ours; nothing in it is ever a checkpoint
            reserve/                        space kept for the next flush
            trash/                          generations on their way out
            resumes/                        how often each generation was resumed from
            pace/                           what saves have taken
            seen/                           marks by which ranks know that they see one directory
"""

from __future__ import annotations

import re
from pathlib import Path

from powerguard.errors import StateError

SHARD = "shard.safetensors"
RECORD = "record.json"
SEAL = "seal.json"
HOME = ".powerguard"
RESERVE = "reserve"
BALLAST = "ballast"
TRASH = "trash"
RESUMES = "resumes"
PACE = "pace"
SEEN = "seen"

RANK_MAX = 10**7
STEP_MAX = 10**15

_GENERATION = re.compile(r"step-(\d{10,15})\.([A-Za-z0-9][A-Za-z0-9_+-]{0,63})\Z")
_RANK = re.compile(r"rank-(\d{5,7})\Z")
_TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9_+-]{0,63}\Z")


def generation_name(step: int, tag: str) -> str:
    """The folder of the state at *step*; raises StateError where the two can't make a name."""
    if not 0 <= step < STEP_MAX:
        raise StateError(f"step {step} can't be saved", todo="count optimizer steps from 0")
    if not _TAG.match(tag):
        raise StateError(f"generation tag {tag!r} is not a name", todo="use letters, digits, '_', '+' and '-'")
    return f"step-{step:010d}.{tag}"


def parse_generation(name: str) -> tuple[int, str] | None:
    """(step, tag) of a generation's folder name, or None where it is none."""
    match = _GENERATION.match(name)
    return (int(match[1]), match[2]) if match else None


def rank_name(rank: int) -> str:
    """The folder of *rank* inside a generation."""
    assert 0 <= rank < RANK_MAX
    return f"rank-{rank:05d}"


def parse_rank(name: str) -> int | None:
    """The rank of a folder name, or None."""
    match = _RANK.match(name)
    return int(match[1]) if match else None


def home(directory: Path) -> Path:
    """Where powerguard keeps what isn't a checkpoint."""
    return directory / HOME

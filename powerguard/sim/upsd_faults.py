"""What can go wrong between upsd and its clients, as values."""

from __future__ import annotations

from dataclasses import dataclass

STATES = ("wait", "stale", "driver-gone")
"""Faults of one UPS, as upsd reports them."""

HITCHES = ("silent", "cut", "late", "drip", "garbage", "drop", "reset", "wrong")
"""Faults of one answer: none; cut *after* bytes; late by *seconds*; *seconds* between bytes; *data* in its place;
connection closed; connection reset *after* bytes; an answer about another UPS. *data* given with any of them takes the
answer's place."""

OUTAGES = ("half-open", "refuse")
"""Faults of the whole server: it accepts and never reads (as a stopped process does); nobody listens."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong. *ups* and *on* (a question's first words) narrow a hitch, *times* limits it."""

    kind: str
    ups: str = ""
    on: str = ""
    times: int | None = None
    after: int = 0
    seconds: float = 0.0
    data: bytes = b""

    def __post_init__(self) -> None:
        if self.kind not in (*STATES, *HITCHES, *OUTAGES):
            raise ValueError(f"no such fault: {self.kind!r}; there are {', '.join((*STATES, *HITCHES, *OUTAGES))}")

    @classmethod
    def parse(cls, text: str) -> Fault:
        """From words like `cut after=40 ups=demo times=1`. Raises ValueError."""
        kind, *options = text.split()
        given = dict(option.split("=", 1) for option in options)
        unknown = set(given) - {"ups", "on", "times", "after", "seconds", "data"}
        if unknown:
            raise ValueError(f"no such option of a fault: {', '.join(sorted(unknown))}")
        return cls(
            kind,
            ups=given.get("ups", ""),
            on=given.get("on", "").replace("_", " "),
            times=int(given["times"]) if "times" in given else None,
            after=int(given.get("after", "0")),
            seconds=float(given.get("seconds", "0")),
            data=given.get("data", "").encode(),
        )

    def meets(self, question: list[str]) -> bool:
        """Whether a hitch is due at *question*."""
        words = [word.casefold() for word in question]
        head = self.on.casefold().split()
        return words[: len(head)] == head and (not self.ups or self.ups.casefold() in words)

"""What others may cost: how often they may speak, and what refusing them writes to the log."""

from __future__ import annotations

REASONS_MAX = 100
TELL_S = 60.0


class Rates:
    """A bucket for each sender: *burst* at once, then *per_s*. At most *names_max* are told apart."""

    def __init__(self, per_s: float, burst: float, names_max: int) -> None:
        self._per_s, self._burst, self._names_max = per_s, burst, names_max
        self._buckets: dict[object, tuple[float, float]] = {}

    def within(self, name: object, now: float, cost: float = 1.0) -> bool:
        """Whether *name* may be heard at *now*; takes *cost* from its bucket."""
        tokens, at = self._buckets.get(name, (self._burst, now))
        tokens = min(self._burst, tokens + (now - at) * self._per_s) - cost
        if len(self._buckets) >= self._names_max and name not in self._buckets:
            self._buckets.clear()
        self._buckets[name] = (max(tokens, -cost), now)
        return tokens >= 0.0


class Refusals:
    """Counts what was refused, by reason; each reason is told at most once in `TELL_S`, with how often it came."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}
        self._told: dict[str, tuple[int, float]] = {}

    def note(self, why: str) -> None:
        """One more. Beyond `REASONS_MAX` reasons they are counted together."""
        if why not in self.counts and len(self.counts) >= REASONS_MAX:
            why = "other refusals"
        self.counts[why] = self.counts.get(why, 0) + 1

    def news(self, now: float) -> list[str]:
        """What is to be told now."""
        said: list[str] = []
        for why, times in dict(self.counts).items():
            told, at = self._told.get(why, (0, now - TELL_S))
            if times > told and now - at >= TELL_S:
                said.append(f"{why} ({times - told} times)")
                self._told[why] = (times, now)
        return said

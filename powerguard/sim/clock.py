"""A clock that only moves when it is told to."""

from __future__ import annotations


class FakeClock:
    """Seconds that stand still between `advance` and `jump`; calling it reads it, as a real clock is read."""

    __slots__ = ("_now",)

    def __init__(self, now: float = 0.0) -> None:
        self._now = now

    def __call__(self) -> float:
        return self._now

    def now(self) -> float:
        """The instant."""
        return self._now

    def advance(self, seconds: float) -> float:
        """Let *seconds* pass; the new instant. A clock never goes back: ValueError."""
        if seconds < 0.0:
            raise ValueError(f"a clock doesn't go back by {-seconds} s")
        self._now += seconds
        return self._now

    def jump(self, to: float) -> float:
        """Move on to the instant *to*; earlier ones are refused as in `advance`."""
        return self.advance(to - self._now)

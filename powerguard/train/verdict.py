"""Small values of the hook: what a boundary answers, and the mark of a mutation."""

from __future__ import annotations

from msgspec import Struct


class Verdict(Struct, frozen=True):
    """Falsy for "go on", truthy for "stop now", with the reason and the exit code."""

    stop: bool = False
    reason: str = ""
    code: int = 0

    def __bool__(self) -> bool:
        return self.stop


GO = Verdict()


class Mutating:
    """`with guard.mutating():` marks the window in which the state is being changed; `active` says whether it is."""

    __slots__ = ("active",)

    def __init__(self) -> None:
        self.active = False

    def __enter__(self) -> None:
        self.active = True

    def __exit__(self, *exc: object) -> None:
        self.active = False

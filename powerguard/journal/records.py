"""The lines of a journal, as values. One JSON object a line; the key "k" says which kind.

Every line but the head has a number *n* that only grows. The order of numbers is the order of events; the order in the
file isn't (what the flight recorder kept is written later than what was written at once).
"""

from __future__ import annotations

import msgspec
from msgspec import Struct

from powerguard.core.learn import Lesson
from powerguard.core.policy import Policy
from powerguard.core.state import State
from powerguard.core.types import Actions, Observation, Phase

FORMAT = 1
LINE_MAX_BYTES = 16 << 20


class Head(Struct, frozen=True, tag_field="k", tag="head", omit_defaults=True):
    """First line of a file. *at* and *created* are one instant on two clocks, to date the rest."""

    format: int
    version: str
    node: str
    boot: str
    at: float
    created: str  # ISO 8601, UTC
    segment: int = 0


class Rules(Struct, frozen=True, tag_field="k", tag="rules", omit_defaults=True):
    """The policy in force from here on."""

    n: int
    at: float
    policy: Policy


class Base(Struct, frozen=True, tag_field="k", tag="base", omit_defaults=True):
    """The state before the record of the next higher number: where a replay can start."""

    n: int
    at: float
    state: State


class Tick(Struct, frozen=True, tag_field="k", tag="tick", omit_defaults=True):
    """One decision: what was seen, what was ordered and why, and now and then the state after it."""

    n: int
    at: float
    phase: Phase  # after the decision
    reason: str
    seen: Observation = Observation()
    actions: tuple[Actions, ...] = ()
    state: State | None = None


class Fault(Struct, frozen=True, tag_field="k", tag="fault", omit_defaults=True):
    """A law was broken: the state is not to be trusted, and *seq* is the last number given to an order."""

    n: int
    at: float
    seq: int
    text: str


class Done(Struct, frozen=True, tag_field="k", tag="done", omit_defaults=True):
    """What became of one attempt to carry the ordered halt out."""

    n: int
    at: float
    what: str
    done: bool = False
    real: bool = False  # not a dry run


class Learnt(Struct, frozen=True, tag_field="k", tag="learnt", omit_defaults=True):
    """One discharge that is over: what was promised, what happened, and what it was taken for."""

    n: int
    at: float
    feed: str
    lesson: Lesson
    phi: float | None = None  # measured and proven capacity of the battery after it, as shares of rated
    proven: float | None = None


Record = Rules | Base | Tick | Fault | Done | Learnt
Line = Head | Rules | Base | Tick | Fault | Done | Learnt

encode = msgspec.json.Encoder().encode
decode_line = msgspec.json.Decoder(Line).decode

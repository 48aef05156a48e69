"""All that the daemon knows, as one frozen value: `decide` makes the next one of it, the journal keeps it.

It survives a round trip through JSON, so a daemon that was killed goes on exactly where it was.
"""

from __future__ import annotations

from msgspec import Struct, field

from powerguard.core.feeds import Feed, Power
from powerguard.core.job import Job
from powerguard.core.need import Need
from powerguard.core.phase import PhaseView
from powerguard.core.types import Actions, Phase


class Trouble(Struct, frozen=True):
    """Something that was announced, and isn't over."""

    text: str
    seen_at: float


class State(Struct, frozen=True, omit_defaults=True):
    """What one decision leaves to the next. Instants are CLOCK_BOOTTIME seconds of boot *boot*."""

    boot: str
    node: str = ""
    addresses: tuple[str, ...] = ()  # names and addresses of this node; the first is where others reach its daemon
    view: PhaseView = PhaseView()
    event: str = ""  # names the event in generations; "" = ONLINE
    event_n: int = 0  # events of this boot, orders by the operator in between included
    seq: int = 0  # of the newest order; grows only
    deadline_at: float | None = None  # the instant that ranks under a STOP were given; None = none
    stops: dict[str, int] = field(default_factory=dict)  # STOP orders to each job in this event
    feeds: dict[str, Feed] = field(default_factory=dict)
    jobs: dict[str, Job] = field(default_factory=dict)
    power: Power | None = None  # as seen at the last decision
    need: Need = Need()
    troubles: dict[str, Trouble] = field(default_factory=dict)  # by their text without numbers

    @property
    def phase(self) -> Phase:
        """The phase of the node."""
        return self.view.phase

    @property
    def phase_since(self) -> float:
        """When the phase was entered."""
        return self.view.phase_since

    def concerns(self, job: str) -> bool:
        """The phase is *job*'s too: a drill of another one leaves it alone."""
        return self.view.only in ("", job)

    @property
    def halted_at(self) -> float | None:
        """When the power-off was ordered; None = it wasn't."""
        return self.view.halted_at


class Decision(Struct, frozen=True):
    """What follows from one observation: the next state, what to do in this order, and why."""

    state: State
    actions: tuple[Actions, ...]
    reason: str


def initial(boot: str, now: float, *, node: str = "", addresses: tuple[str, ...] = ()) -> State:
    """The state of a daemon with nothing to remember.

    *seq* begins at the seconds since boot: it grows over restarts of the daemon even if the journal is lost,
    unless it gave more than one order a second.
    """
    return State(boot=boot, node=node, addresses=addresses, view=PhaseView(phase_since=now), seq=int(now))


def memorable(before: State, after: State) -> bool:
    """A restart must know of it, whatever was sent: who is registered, what was ordered and decided, who leads."""
    return after.phase is not before.phase or (
        after.jobs is not before.jobs and _remembered(before) != _remembered(after)
    )


def _remembered(state: State) -> dict[str, tuple[object, ...]]:
    return {
        name: (
            job.term,
            job.lead,
            job.resumed,
            None if job.order is None else (job.order.seq, job.order.step, job.order.stage, job.order.over),
            job.quiesce is None,
            job.leave is None,
            tuple((rank, member.pid, member.alive) for rank, member in job.members.items()),
        )
        for name, job in state.jobs.items()
    }


def event_id(boot: str, n: int) -> str:
    """The name of event *n* of a boot, fit for a file name and unique over boots."""
    plain = "".join(char for char in boot.lower() if char.isascii() and char.isalnum())
    return f"{plain[:8] or 'boot'}-{n}"

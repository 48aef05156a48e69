"""The instants and the log of an outage, from the decisions of its journal."""

from __future__ import annotations

from powerguard.core.messages import Decide, Prepare, Purpose, Resume, SealWritten
from powerguard.core.types import Announce, Halt, Phase, Send
from powerguard.drill.moments import Moment
from powerguard.drill.story import Event, Mark, Save
from powerguard.journal import Tick

_QUIET_ORDERS = ("Welcome", "Notice", "Sealed", "Ack")


def marks(shown: list[Moment], zero: float, begins: str = "") -> tuple[Mark, ...]:
    """The instants that matter, in order, each once. *begins*: what happened at *zero*, if it is no outage."""
    found = [Mark(zero, "stop", begins) if begins else Mark(zero, "mains_cut", "mains fail")]
    orders: dict[int, tuple[Purpose, int]] = {}
    done: set[str] = set()

    def once(key: str, at: float, kind: str, text: str) -> None:
        if key not in done:
            done.add(key)
            found.append(Mark(at, kind, text))

    for before, moment in zip([None, *shown[:-1]], shown, strict=True):
        tick = moment.tick
        for action in tick.actions:
            message = action.message if isinstance(action, Send) else None
            if isinstance(message, Decide):
                orders[message.seq] = (message.purpose, message.step)
            elif isinstance(message, Prepare) and message.purpose is Purpose.STOP:
                once(f"stop {message.seq}", tick.at, "stop", "stop ordered")
            elif isinstance(message, Resume) and tick.phase is Phase.ONLINE and "stop" in " ".join(done):
                once("resumed", tick.at, "resumed", "resumed in place")
            elif isinstance(action, Halt):
                once("halt", tick.at, "halt", "halt")
        for report in tick.seen.reports:
            if isinstance(report.message, SealWritten) and report.message.seq in orders:
                purpose, step = orders[report.message.seq]
                what = "snapshot" if purpose is Purpose.SNAPSHOT else "flush"
                kind = "snapshot" if purpose is Purpose.SNAPSHOT else "sealed"
                once(f"sealed {report.message.seq}", report.at, kind, f"{what} sealed, step {step}")
        if before is not None and tick.phase is Phase.PARKED and before.tick.phase is not Phase.PARKED:
            once(f"parked {tick.n}", tick.at, "parked", "parked")
        back = _back_at(before, moment)
        if back is not None and back > zero:
            once(f"back {back:.1f}", back, "mains_back", "mains back")
    return tuple(sorted(found, key=lambda mark: mark.at))


def _back_at(before: Moment | None, moment: Moment) -> float | None:
    """When the mains came back, at the first decision that knows it."""
    if before is None or before.state is None or moment.state is None:
        return None
    was, now = before.state.power, moment.state.power
    if was is None or now is None or was.on_battery is not True or now.on_battery is not False:
        return None
    return moment.tick.at if now.online_since is None else now.online_since


class Log:
    """The lines of the log: each turn of the phase, each announcement, each order once for all its ranks.

    What is said twice in a row is said once: orders and announcements often carry the reason of the turn.
    """

    def __init__(self) -> None:
        self._phase: Phase | None = None
        self._ordered: set[tuple[str, int]] = set()
        self._reason = ""

    def lines(self, moment: Moment) -> list[Event]:
        """What there is to say of *moment*; to be asked of each in order."""
        tick, found = moment.tick, list[Event]()
        if self._phase not in (None, tick.phase):
            self._reason = tick.reason
            found.append(Event(tick.at, tick.phase.value, tick.phase.value.replace("_", " "), tick.reason))
        self._phase = tick.phase
        for action in tick.actions:
            if isinstance(action, Announce) and action.text != self._reason:
                found.append(Event(tick.at, tick.phase.value, action.text, "", action.level))
            elif isinstance(action, Halt):
                found.append(Event(tick.at, tick.phase.value, "power off", self._new(action.reason), "warning"))
            elif isinstance(action, Send):
                found += self._order(tick, action)
        return found

    def _new(self, reason: str) -> str:
        """*reason*, unless it was the last one given."""
        if reason == self._reason:
            return ""
        self._reason = reason
        return reason

    def _order(self, tick: Tick, action: Send) -> list[Event]:
        message = action.message
        kind, seq = type(message).__name__, getattr(message, "seq", 0)
        if kind in _QUIET_ORDERS or (kind, seq) in self._ordered:
            return []
        self._ordered.add((kind, seq))
        ranks = sorted({a.rank for a in tick.actions if isinstance(a, Send) and type(a.message).__name__ == kind})
        text = f"{kind.upper()} #{seq}"
        if isinstance(message, Prepare | Decide):
            text += f" {message.purpose.value}"
        if isinstance(message, Decide):
            text += f" at step {message.step}, plan {message.plan.value}"
        reason = self._new(getattr(message, "reason", ""))
        return [Event(tick.at, tick.phase.value, f"{text} to rank {', '.join(map(str, ranks))}", reason)]


def events(shown: list[Moment]) -> tuple[Event, ...]:
    """The whole log."""
    log = Log()
    return tuple(line for moment in shown for line in log.lines(moment))


def saves(shown: list[Moment]) -> tuple[Save, ...]:
    """Every order whose generation was sealed, in order."""
    ordered: dict[int, float] = {}
    decided: dict[int, Decide] = {}
    sealed: dict[int, Save] = {}
    for moment in shown:
        for action in moment.tick.actions:
            message = action.message if isinstance(action, Send) else None
            if isinstance(message, Prepare):
                ordered.setdefault(message.seq, moment.tick.at)
            elif isinstance(message, Decide):
                decided[message.seq] = message
        for report in moment.tick.seen.reports:
            order = decided.get(report.message.seq) if isinstance(report.message, SealWritten) else None
            if order is not None and order.seq not in sealed:
                began = ordered.get(order.seq, moment.tick.at)
                sealed[order.seq] = Save(order.purpose.value, order.step, began, report.at)
    return tuple(sealed.values())


def stops(shown: list[Moment]) -> int:
    """How many STOP orders were given."""
    sent = (action.message for m in shown for action in m.tick.actions if isinstance(action, Send))
    return len({message.seq for message in sent if isinstance(message, Prepare) and message.purpose is Purpose.STOP})

"""The instants and the log of an outage, from the decisions of its journal."""

from __future__ import annotations

from powerguard.core.messages import Decide, Prepare, Purpose, Resume, SealWritten
from powerguard.core.types import Announce, Halt, Phase, Send
from powerguard.drill.moments import Moment
from powerguard.drill.story import Event, Mark
from powerguard.journal import Tick

_QUIET_ORDERS = ("Welcome", "Notice", "Sealed")


def marks(shown: list[Moment], zero: float) -> tuple[Mark, ...]:
    """The instants that matter, in order, each once."""
    found = [Mark(zero, "mains_cut", "mains fail")]
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


def events(shown: list[Moment]) -> tuple[Event, ...]:
    """Each turn of the phase, each announcement, and each order once, however many ranks it went to."""
    found: list[Event] = []
    ordered: set[tuple[str, int]] = set()
    for before, moment in zip([None, *shown[:-1]], shown, strict=True):
        tick = moment.tick
        phase = tick.phase.value
        if before is not None and tick.phase is not before.tick.phase:
            found.append(Event(tick.at, phase, f"{before.tick.phase.value} → {phase}", tick.reason))
        for action in tick.actions:
            if isinstance(action, Announce):
                found.append(Event(tick.at, phase, action.text, "", action.level))
            elif isinstance(action, Halt):
                found.append(Event(tick.at, phase, "halt", action.reason, "warning"))
            elif isinstance(action, Send):
                _order(found, ordered, tick, action)
    return tuple(found)


def _order(found: list[Event], ordered: set[tuple[str, int]], tick: Tick, action: Send) -> None:
    kind, seq = type(action.message).__name__, getattr(action.message, "seq", 0)
    if kind in _QUIET_ORDERS or (kind, seq) in ordered:
        return
    ordered.add((kind, seq))
    ranks = sorted({a.rank for a in tick.actions if isinstance(a, Send) and type(a.message).__name__ == kind})
    text = f"{kind.upper()} #{seq}"
    if isinstance(action.message, Prepare | Decide):
        text += f" {action.message.purpose.value}"
    if isinstance(action.message, Decide):
        text += f" at step {action.message.step}, plan {action.message.plan.value}"
    reason = getattr(action.message, "reason", "")
    found.append(Event(tick.at, tick.phase.value, f"{text} to rank {', '.join(map(str, ranks))}", reason))


def flush_times(shown: list[Moment]) -> dict[Purpose, tuple[int, float, float]]:
    """For the newest sealed order of each purpose: its step, when it was ordered, when it was sealed."""
    ordered: dict[int, float] = {}
    decided: dict[int, tuple[Purpose, int]] = {}
    sealed: dict[Purpose, tuple[int, float, float]] = {}
    for moment in shown:
        for action in moment.tick.actions:
            message = action.message if isinstance(action, Send) else None
            if isinstance(message, Prepare):
                ordered.setdefault(message.seq, moment.tick.at)
            elif isinstance(message, Decide):
                decided[message.seq] = (message.purpose, message.step)
        for report in moment.tick.seen.reports:
            if isinstance(report.message, SealWritten) and report.message.seq in decided:
                seq = report.message.seq
                purpose, step = decided[seq]
                sealed[purpose] = (step, ordered.get(seq, moment.tick.at), report.at)
    return sealed

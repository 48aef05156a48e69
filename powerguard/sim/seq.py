"""A scenario's UPS as a `.seq` file, so that real dummy-ups and upsd tell the same story.

dummy-ups reads `variable: value` lines and `TIMER seconds`; it begins anew at the end of the file, so the last TIMER
is a day. What only a link can do (DATA-STALE and the like) is named in a comment: stop the driver there.
"""

from __future__ import annotations

from powerguard.sim.feed import ON_MAINS
from powerguard.sim.scenario import SHORT, Line, Scenario, ScenarioError

LAST_TIMER_S = 86400


def to_seq(scenario: Scenario, feed: str) -> str:
    """The sequence of *feed*. Raises ScenarioError for a feed that isn't there or has a simulated battery."""
    names = [line.words[1] if len(line.words) > 1 else "ups" for line in scenario.setup if line.words[0] == "feed"]
    if feed not in (names or ["ups"]):
        raise ScenarioError(f"there is no feed {feed} in {scenario.name}")
    if any(line.words[0] == "feed" and feed in line.words and "battery" in line.options for line in scenario.setup):
        raise ScenarioError(f"{feed} has a simulated battery: serve it with powerguard.sim.upsd")
    changes: dict[float, dict[str, str]] = {0.0: dict(ON_MAINS)}
    remarks: dict[float, list[str]] = {}
    for act in scenario.acts:
        for line in act.lines:
            if line.begin is None or not line.words:
                continue
            if line.words[0] == "ups" and line.options.get("feed", feed) == feed:
                _ups(line, line.begin, changes, remarks)
            elif line.words[0] == "fault":
                words = " ".join([*line.words[1:], *(f"{key}={value}" for key, value in line.options.items())])
                remarks.setdefault(line.begin, []).append(f"fault {words}")
    return _text(scenario, changes, remarks)


def _ups(line: Line, at: float, changes: dict[float, dict[str, str]], remarks: dict[float, list[str]]) -> None:
    options = {key: value for key, value in line.options.items() if key not in ("feed", "every", "detail", "mains")}
    comm = options.pop("comm", "")
    if comm:
        remarks.setdefault(at, []).append(f"comm={comm}")
    for key, value in options.items():
        name = SHORT.get(key, key)
        if line.end is None:
            changes.setdefault(at, {})[name] = value
            continue
        begin, _, end = value.partition("..")
        every = float(line.options.get("every", "10"))
        steps = max(1, int((line.end - at) / every))
        for i in range(steps + 1):
            share = i / steps
            moved = float(begin) + share * (float(end) - float(begin))
            changes.setdefault(round(at + share * (line.end - at), 1), {})[name] = f"{moved:g}"


def _text(scenario: Scenario, changes: dict[float, dict[str, str]], remarks: dict[float, list[str]]) -> str:
    lines = [f"# {scenario.title}", f"# from the scenario {scenario.name}"]
    instants = sorted({*changes, *remarks})
    for instant, following in zip(instants, [*instants[1:], None], strict=True):
        lines += [f"# t={instant:g} {remark}" for remark in remarks.get(instant, [])]
        lines += [f"{name}: {value}" for name, value in sorted(changes.get(instant, {}).items()) if value]
        wait_s = LAST_TIMER_S if following is None else max(1, round(following - instant))
        lines.append(f"TIMER {wait_s}")
    return "\n".join(lines) + "\n"

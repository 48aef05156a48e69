"""The runway over time as a picture: an SVG that needs nothing to be drawn and any browser to be looked at."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from msgspec import Struct

WIDTH, HEIGHT = 960, 480
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 64, 52

BANDS = {
    "on_battery": "#fff3d6",
    "flushing": "#ffe0cc",
    "parked": "#f6d5d5",
    "halting": "#e3c1c1",
}
"""Background by phase; on line it stays white."""

BOUND, TRUTH, NEED = "#1f5fa8", "#8a8a8a", "#b3261e"
STEPS_S = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 28800, 86400)


class Point(Struct, frozen=True):
    """One instant: what was left by the bound, what was needed, what was really left. None = not known."""

    at: float
    runway_s: float | None
    phase: str = "online"
    need_s: float | None = None
    truth_s: float | None = None
    event: str = ""


def svg(title: str, subtitle: str, points: Sequence[Point]) -> str:
    """The picture of *points*, which are in order of time; at least one."""
    begin, end = points[0].at, max(points[-1].at, points[0].at + 1.0)
    top = _top(points)
    plot = _Plot(begin, end, top)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="22" font-size="15" font-weight="bold">{escape(title)}</text>',
        f'<text x="{LEFT}" y="40" fill="#555">{escape(subtitle)}</text>',
        *_bands(plot, points),
        *_axes(plot),
        *_line(plot, [(p.at, p.truth_s) for p in points], TRUTH, 'stroke-dasharray="6 4"'),
        *_line(plot, [(p.at, p.need_s) for p in points], NEED, 'stroke-dasharray="2 3"'),
        *_line(plot, [(p.at, p.runway_s) for p in points], BOUND, ""),
        *_events(plot, points),
        *_legend(points),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class _Plot:
    """From seconds to pixels."""

    def __init__(self, begin: float, end: float, top: float) -> None:
        self.begin, self.end, self.top = begin, end, top

    def x(self, at: float) -> float:
        return LEFT + (at - self.begin) / (self.end - self.begin) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - min(1.0, max(0.0, value) / self.top) * (HEIGHT - TOP - BOTTOM)


def _top(points: Sequence[Point]) -> float:
    """The largest value that is worth the paper: what is told on line may be hours."""
    on = [p for p in points if p.phase != "online"] or list(points)
    values = [value for p in on for value in (p.runway_s, p.need_s, p.truth_s) if value is not None]
    return 1.08 * max([*values, 10.0])


def _bands(plot: _Plot, points: Sequence[Point]) -> Iterable[str]:
    begun = points[0]
    for i, point in enumerate(points):
        last = i == len(points) - 1
        if point.phase != begun.phase or last:
            if begun.phase in BANDS:
                x, wide = plot.x(begun.at), plot.x(point.at) - plot.x(begun.at)
                yield (
                    f'<rect x="{x:.1f}" y="{TOP}" width="{max(1.0, wide):.1f}" height="{HEIGHT - TOP - BOTTOM}" '
                    f'fill="{BANDS[begun.phase]}"/>'
                )
            begun = point


def _axes(plot: _Plot) -> Iterable[str]:
    bottom = HEIGHT - BOTTOM
    every = _every(plot.end - plot.begin, 8)
    at = math.ceil(plot.begin / every) * every
    while at <= plot.end:
        x = plot.x(at)
        yield f'<line x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{bottom}" stroke="#00000014"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 18}" text-anchor="middle">{_short(at, plot.end - plot.begin)}</text>'
        at += every
    rung = _every(plot.top, 6)
    value = 0.0
    while value <= plot.top:
        y = plot.y(value)
        yield f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#00000014"/>'
        yield f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_short(value, plot.top)}</text>'
        value += rung
    wide, high, middle = WIDTH - LEFT - RIGHT, bottom - TOP, (TOP + bottom) / 2
    yield f'<rect x="{LEFT}" y="{TOP}" width="{wide}" height="{high}" fill="none" stroke="#555"/>'
    yield f'<text x="{LEFT + wide / 2}" y="{HEIGHT - 12}" text-anchor="middle">time</text>'
    yield f'<text x="18" y="{middle}" text-anchor="middle" transform="rotate(-90 18 {middle})">left</text>'


def _every(span: float, most: int) -> float:
    return float(next((step for step in STEPS_S if span / step <= most), STEPS_S[-1]))


def _short(value: float, most: float) -> str:
    """*value* in the unit that suits an axis up to *most*."""
    divisor, unit = (1.0, "s") if most < 300 else (60.0, "min") if most < 10800 else (3600.0, "h")
    return f"{value / divisor:.3g} {unit}" if value else "0"


def _line(plot: _Plot, values: list[tuple[float, float | None]], colour: str, style: str) -> Iterable[str]:
    """A line that is broken where nothing is known."""
    run: list[str] = []
    for at, value in [*values, (0.0, None)]:
        if value is not None:
            run.append(f"{plot.x(at):.1f},{plot.y(value):.1f}")
        elif run:
            yield f'<polyline points="{" ".join(run)}" fill="none" stroke="{colour}" stroke-width="2" {style}/>'
            run = []


def _events(plot: _Plot, points: Sequence[Point]) -> Iterable[str]:
    """A line and a word where something happens; where it happens again, a tick."""
    row, before, bottom = 0, "", HEIGHT - BOTTOM
    for point in points:
        if not point.event:
            continue
        x, y = plot.x(point.at), TOP + 14 + 15 * (row % 3)
        top = TOP if point.event != before else bottom - 8
        yield f'<line x1="{x:.1f}" y1="{top}" x2="{x:.1f}" y2="{bottom}" stroke="#333"/>'
        if point.event != before:
            anchor, shift = ("end", -4) if x > WIDTH * 0.8 else ("start", 4)
            yield f'<text x="{x + shift:.1f}" y="{y}" text-anchor="{anchor}">{escape(point.event)}</text>'
            row, before = row + 1, point.event


def _legend(points: Sequence[Point]) -> Iterable[str]:
    entries = [("bound", BOUND, "")]
    if any(p.need_s is not None for p in points):
        entries.append(("need and margin", NEED, 'stroke-dasharray="2 3"'))
    if any(p.truth_s is not None for p in points):
        entries.append(("really left", TRUTH, 'stroke-dasharray="6 4"'))
    x = WIDTH - RIGHT - 150 * len(entries)
    for text, colour, style in entries:
        yield f'<line x1="{x}" y1="54" x2="{x + 26}" y2="54" stroke="{colour}" stroke-width="2" {style}/>'
        yield f'<text x="{x + 32}" y="58">{text}</text>'
        x += 150

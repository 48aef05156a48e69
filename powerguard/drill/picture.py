"""The picture of an outage: phases, charge, runway against need, and the steps of the ranks, on one axis of time.

Drawn by matplotlib as SVG, once for light and once for dark paper, wide for a desk and narrow for a phone.
"""

from __future__ import annotations

import io
from typing import Any

from msgspec import Struct

from powerguard.drill.story import Points, Story
from powerguard.errors import MissingDependency


class Theme(Struct, frozen=True):
    """Colours of one kind of paper."""

    paper: str
    ink: str
    faint: str
    grid: str
    curves: dict[str, str]
    phases: dict[str, str]
    marks: dict[str, str]


_CURVES = {"charge": "#2f7d32", "load": "#8a8f98", "runway": "#0b66c3", "need": "#c2410c", "truth": "#0b66c3"}
_PHASES = {
    "online": "#a7d9ab",
    "on_battery": "#ffd479",
    "flushing": "#8fc1f5",
    "parked": "#cdbdf0",
    "halting": "#f3a6a0",
    "off": "#4b4f56",
    "starting": "#d9dce1",
}
_MARKS = {"bad": "#b3261e", "good": "#2f7d32", "save": "#0b66c3", "plain": "#5f6670"}

LIGHT = Theme("#ffffff", "#1d2127", "#5f6670", "#e4e7eb", _CURVES, _PHASES, _MARKS)
DARK = Theme(
    "#15181c",
    "#e8eaed",
    "#a2a9b3",
    "#2d3238",
    {"charge": "#7bc67e", "load": "#7d848e", "runway": "#6db3f8", "need": "#ff9457", "truth": "#6db3f8"},
    {
        "online": "#2c5e31",
        "on_battery": "#7a5a10",
        "flushing": "#1f4f82",
        "parked": "#52418a",
        "halting": "#84302a",
        "off": "#000000",
        "starting": "#3a4048",
    },
    {"bad": "#ff8a80", "good": "#7bc67e", "save": "#6db3f8", "plain": "#a2a9b3"},
)
MARKS = {
    "mains_cut": "bad",
    "mains_back": "good",
    "snapshot": "save",
    "stop": "plain",
    "sealed": "save",
    "parked": "plain",
    "halt": "plain",
    "killed": "bad",
    "power_cut": "bad",
    "resumed": "good",
    "finished": "good",
}
_PHASE_NAMES = {"online": "on line", "on_battery": "on battery", "off": "no power", "starting": "starting"}


class Shape(Struct, frozen=True):
    """Inches and points of one layout; *words*: marks carry their text, else only their number."""

    width: float
    height: float
    font: float
    glyph: float  # width of a character as a share of the axis
    words: bool


WIDE = Shape(11.0, 6.9, 9.5, 0.0081, words=True)
NARROW = Shape(5.0, 8.2, 9.5, 0.0185, words=False)
_OTHERS_MOST = 2.5
"""The bound that decides is what the panel is for: what is beyond so many times its height is cut off."""
_WRITE_IN = 0.9  # height of the panel of what was written, where anything was
_ROW_IN = 0.2  # height of one row of marks
_HEIGHTS = (0.42, 1.5, 2.3, 1.7)  # of the panels: phases, charge, runway, steps


def draw(story: Story, theme: Theme = LIGHT, shape: Shape = WIDE, *, form: str = "svg") -> bytes:
    """The picture as *form* ("svg" or "png"). Raises MissingDependency without matplotlib."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingDependency(
            "pictures need matplotlib, which isn't installed", todo="pip install 'powerguard[drill]'"
        ) from None
    rc: Any = {
        "svg.fonttype": "none",
        "svg.hashsalt": "powerguard",
        "font.family": ["DejaVu Sans"],
        "font.size": shape.font,
        "text.color": theme.ink,
        "axes.labelcolor": theme.ink,
        "axes.edgecolor": theme.grid,
        "xtick.color": theme.faint,
        "ytick.color": theme.faint,
    }
    with mpl.rc_context(rc):
        rows = _rows(story, shape)
        strip = _ROW_IN * (max(rows, default=0) + 1)
        writes = bool(story.series.write_mbps)
        height = shape.height + strip + (_WRITE_IN if writes else 0.0)
        figure = Figure(figsize=(shape.width, height), facecolor=theme.paper, layout="constrained")
        heights = (strip, *_HEIGHTS, *((_WRITE_IN,) if writes else ()))
        axes = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
        for axis in axes:
            _plain(axis, theme)
        _labels(axes[0], story, theme, shape, rows)
        _phases(axes[1], story, theme, shape)
        _charge(axes[2], story, theme, shape)
        _runway(axes[3], story, theme, shape)
        _steps(axes[4], story, theme, shape)
        if writes:
            _writing(axes[5], story, theme, shape)
        for axis in axes[2:]:
            _verticals(axis, story, theme)
        last = axes[len(axes) - 1]
        last.set_xlabel(f"seconds since {story.zero}")
        last.set_xlim(story.start - story.zero_at, story.end - story.zero_at)
        out = io.BytesIO()
        # no date: the same story gives the same bytes
        figure.savefig(out, format=form, dpi=150, metadata={"Date": None} if form == "svg" else None)
    return out.getvalue()


def _plain(axis: Any, theme: Theme) -> None:
    axis.set_facecolor(theme.paper)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    axis.tick_params(length=0)
    axis.grid(axis="y", color=theme.grid, linewidth=0.7)
    axis.set_axisbelow(True)


def _across(story: Story, points: Points) -> tuple[list[float], list[float]]:
    """The points that the picture shows, on its own axis."""
    shown = [(at - story.zero_at, value) for at, value in points if story.start <= at <= story.end]
    return [x for x, _ in shown], [y for _, y in shown]


def label(story: Story, i: int, shape: Shape) -> str:
    """What stands at mark *i* in the picture."""
    return story.marks[i].text if shape.words else str(i + 1)


def _rows(story: Story, shape: Shape) -> list[int]:
    """For each mark the row of its label, 0 next to the picture.

    Labels run to the right of their stem, so a label is above every later stem that it reaches: a falling staircase,
    in which no stem crosses a word.
    """
    width = max(story.end - story.start, 1e-9)
    rows = [0] * len(story.marks)
    for i in reversed(range(len(rows))):
        reach = story.marks[i].at + width * shape.glyph * (len(label(story, i, shape)) + 2)
        rows[i] = max((rows[j] + 1 for j in range(i + 1, len(rows)) if story.marks[j].at < reach), default=0)
    return rows


def _labels(axis: Any, story: Story, theme: Theme, shape: Shape, rows: list[int]) -> None:
    """The words of the marks, above the picture, each with a stem down to its line."""
    axis.axis("off")
    axis.set_ylim(0, max(rows, default=0) + 1)
    for i, row in enumerate(rows):
        x = story.marks[i].at - story.zero_at
        colour = theme.marks[MARKS.get(story.marks[i].kind, "plain")]
        axis.plot([x, x], [-0.3, row + 0.9], color=colour, linewidth=1.0, clip_on=False)
        text = axis.annotate(
            label(story, i, shape), (x, row + 0.5), (4, 0), textcoords="offset points", color=colour, va="center"
        )
        text.set_in_layout(False)  # the last ones may run on above the legends


def _phases(axis: Any, story: Story, theme: Theme, shape: Shape) -> None:
    axis.set_ylim(0, 1)
    axis.set_yticks([])
    axis.grid(visible=False)
    width = story.end - story.start
    for span in story.spans:
        start, end = max(span.start, story.start), min(span.end, story.end)
        if end <= start:
            continue
        colour = theme.phases.get(span.phase, theme.grid)
        axis.axvspan(start - story.zero_at, end - story.zero_at, color=colour, linewidth=0)
        name = _PHASE_NAMES.get(span.phase, span.phase)
        if (end - start) / width > shape.glyph * (len(name) + 1):
            ink = "#ffffff" if span.phase == "off" else theme.ink
            axis.text((start + end) / 2 - story.zero_at, 0.48, name, ha="center", va="center", color=ink)


def _charge(axis: Any, story: Story, theme: Theme, shape: Shape) -> None:
    x, y = _across(story, story.series.load_pct)
    if x:
        axis.plot(x, y, color=theme.curves["load"], linewidth=1.2, drawstyle="steps-post", label="load")
    x, y = _across(story, story.series.charge_pct)
    if x:
        axis.plot(x, y, color=theme.curves["charge"], linewidth=2.0, drawstyle="steps-post", label="charge")
    axis.set_ylim(0, 105)
    axis.set_yticks([0, 50, 100])
    axis.set_ylabel("percent")
    _legend(axis, theme, shape)


def _runway(axis: Any, story: Story, theme: Theme, shape: Shape) -> None:
    """Runway over need, the spare between them filled: what the decision was made by."""
    series = story.series
    x, y = _across(story, series.truth_s)
    if x:
        axis.plot(x, y, color=theme.curves["truth"], linewidth=1.0, linestyle=(0, (4, 3)), label="true runway")
    for points, dashes, name in (
        (series.reported_s, (0, (1, 2)), "as the UPS says"),
        (series.idle_s, (0, (3, 1, 1, 1)), "once parked"),
    ):
        x, y = _across(story, points)
        if x:
            axis.plot(x, y, color=theme.faint, linewidth=1.1, linestyle=dashes, label=name)
    need_x, need_y = _across(story, series.need_s)
    runway_x, runway_y = _across(story, series.runway_s)
    if runway_x:
        axis.plot(runway_x, runway_y, color=theme.curves["runway"], linewidth=2.0, label="runway")
    if need_x:
        axis.plot(need_x, need_y, color=theme.curves["need"], linewidth=1.8, drawstyle="steps-post", label="need")
    floor = dict(zip(need_x, need_y, strict=True))
    both = [(a, b, floor[a]) for a, b in zip(runway_x, runway_y, strict=True) if a in floor]
    if both:
        at, above, below = zip(*both, strict=True)
        axis.fill_between(
            at,
            above,
            below,
            where=[a > b for a, b in zip(above, below, strict=True)],
            color=theme.curves["runway"],
            alpha=0.13,
            linewidth=0,
            label="spare",
        )
    # the truth jumps when the load falls; what matters is the start, and where runway and need meet
    top = max([*runway_y, *(2.0 * value for value in need_y), *_truth_at_zero(story), 1.0])
    others = [y for points in (series.idle_s, series.reported_s) for y in _across(story, points)[1]]
    axis.set_ylim(0, 1.1 * max([top, *(value for value in others if value <= _OTHERS_MOST * top)]))
    axis.set_ylabel("seconds")
    _legend(axis, theme, shape)


def _truth_at_zero(story: Story) -> list[float]:
    return [value for at, value in story.series.truth_s if at >= story.zero_at][:1]


def _steps(axis: Any, story: Story, theme: Theme, shape: Shape) -> None:
    lines = ("-", (0, (5, 2)), (0, (2, 2)), (0, (1, 1)))
    for steps in story.steps:
        x, y = _across(story, steps.points)
        colour = theme.curves["charge" if steps.life else "runway"]
        name = f"rank {steps.rank}" if not steps.life else "resumed" if not steps.rank else ""
        known = name if steps.rank < len(lines) else ""
        axis.plot(x, y, color=colour, linewidth=1.8, linestyle=lines[steps.rank % len(lines)], label=known or None)
    axis.set_ylabel("step")
    axis.set_ylim(bottom=0)
    _legend(axis, theme, shape)


def _writing(axis: Any, story: Story, theme: Theme, shape: Shape) -> None:
    """What the ranks wrote, all together."""
    x, y = _across(story, story.series.write_mbps)
    if x:
        axis.fill_between(x, y, step="post", color=theme.curves["need"], alpha=0.35, linewidth=0, label="written")
        axis.plot(x, y, color=theme.curves["need"], linewidth=1.2, drawstyle="steps-post")
    axis.set_ylim(bottom=0)
    axis.set_ylabel("MB/s")
    _legend(axis, theme, shape)


def _verticals(axis: Any, story: Story, theme: Theme) -> None:
    for mark in story.marks:
        colour = theme.marks[MARKS.get(mark.kind, "plain")]
        axis.axvline(mark.at - story.zero_at, color=colour, linewidth=1.0, alpha=0.75, zorder=0.5)
    for span in story.spans:
        if span.phase == "off":
            axis.axvspan(
                span.start - story.zero_at,
                min(span.end, story.end) - story.zero_at,
                color=theme.faint,
                alpha=0.18,
                linewidth=0,
            )


def _legend(axis: Any, theme: Theme, shape: Shape) -> None:
    """Beside the panel where there is room, else above it."""
    if not axis.get_legend_handles_labels()[0]:
        return
    look: dict[str, Any] = {"frameon": False, "labelcolor": theme.ink, "handlelength": 1.5, "borderaxespad": 0.4}
    if shape.words:
        axis.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), **look)
    else:
        axis.legend(loc="lower left", bbox_to_anchor=(-0.02, 0.98), ncols=4, columnspacing=0.8, **look)

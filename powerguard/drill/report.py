"""The page of an outage: one HTML file that needs nothing else, for a phone and a desk, on light and dark paper."""

from __future__ import annotations

import base64
from html import escape
from pathlib import Path

from powerguard import __version__
from powerguard.drill.picture import DARK, LIGHT, MARKS, NARROW, WIDE, Shape, Theme, draw
from powerguard.drill.story import Event, Story
from powerguard.errors import DirectoryError

_NARROW_PX = 720  # screens up to this width get the picture made for a phone

_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1d2127; --faint: #5f6670; --line: #e4e7eb; --box: #f6f7f9;
  --good: #2f7d32; --bad: #b3261e; --save: #0b66c3; --plain: #5f6670; --some: #9a6700; }
@media (prefers-color-scheme: dark) { :root { --paper: #15181c; --ink: #e8eaed; --faint: #a2a9b3; --line: #2d3238;
  --box: #1c2025; --good: #7bc67e; --bad: #ff8a80; --save: #6db3f8; --plain: #a2a9b3; --some: #f0b429; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem; max-width: 72rem; background: var(--paper); color: var(--ink);
  font: 16px/1.45 system-ui, "DejaVu Sans", Verdana, Arial, sans-serif; }
h1 { font-size: 1.35rem; margin: 0 0 .2rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .5rem; }
.faint { color: var(--faint); } .verdict { border-left: .45rem solid; padding: .2rem 0 .2rem .9rem; margin: 1rem 0; }
.verdict b { font-size: 1.6rem; } .verdict ul { margin: .3rem 0 0; padding-left: 1.2rem; color: var(--ink); }
.good { color: var(--good); } .bad { color: var(--bad); } .some { color: var(--some); } .save { color: var(--save); }
.plain { color: var(--plain); }
img { width: 100%; height: auto; display: block; }
table { border-collapse: collapse; width: 100%; }
td, th { text-align: left; vertical-align: top; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line);
  overflow-wrap: anywhere; }
th { overflow-wrap: normal; }
td.number { white-space: nowrap; font-variant-numeric: tabular-nums; }
td.word { white-space: nowrap; }
ol { margin: 0; padding: 0 0 0 1.6rem; columns: 19rem; } ol span { font-variant-numeric: tabular-nums; }
pre { background: var(--box); padding: .8rem; overflow-x: auto; font-size: .85rem; }
summary { cursor: pointer; font-weight: 600; margin: 1.2rem 0 .5rem; }
"""


def html(story: Story) -> str:
    """The whole page. Raises MissingDependency without matplotlib."""
    parts = (
        _head(story),
        _picture(story),
        _marks(story),
        _numbers(story),
        _late(story),
        _events(story),
        _configuration(story),
    )
    body = "\n".join(part for part in parts if part)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(story.title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n"
        f'<p class="faint">powerguard {__version__}</p>\n</body>\n</html>\n'
    )


def write(story: Story, path: Path, *, other: str = "file") -> Path:
    """The page at *path*, and its picture as PNG beside it; the path of the page. DirectoryError as of `put`."""
    put(path, html(story).encode(), other=other)
    put(path.with_suffix(".png"), draw(story, LIGHT, WIDE, form="png"), other=other)
    return path


def put(path: Path, data: bytes, *, other: str = "file") -> None:
    """A file of a report. DirectoryError: it can't be written; *other* says what else can be named."""
    try:
        path.write_bytes(data)
    except OSError as err:
        todo = f"name another {other} with --out"
        raise DirectoryError(f"{path} can't be written: {err.strerror or err}", todo=todo) from None


_TONES = {
    "survived": "good",
    "trained through": "good",
    "stopped, and went on in place": "good",
    "resumed in place": "good",
    "halted with everything durable": "good",
    "survived with loss": "some",
    "gave way": "some",
    "the journal ends in the outage": "some",
}
"""Of verdicts; every other one is bad."""


def _head(story: Story) -> str:
    place = " · ".join(escape(part) for part in (story.node, story.date) if part)
    lines = [f"<h1>{escape(story.title)}</h1>", f'<p class="faint">{place}</p>' if place else ""]
    if story.verdict:
        tone = _TONES.get(story.verdict, "bad")
        why = "".join(f"<li>{escape(reason)}</li>" for reason in story.why)
        lines.append(
            f'<div class="verdict {tone}"><b>{escape(story.verdict)}</b>{f"<ul>{why}</ul>" if why else ""}</div>'
        )
    return "\n".join(lines)


def _picture(story: Story) -> str:
    phone = f"(max-width: {_NARROW_PX}px)"
    dark = "(prefers-color-scheme: dark)"
    sources = (
        (f"{dark} and {phone}", _image(story, DARK, NARROW)),
        (phone, _image(story, LIGHT, NARROW)),
        (dark, _image(story, DARK, WIDE)),
    )
    tags = "".join(f'<source media="{media}" srcset="{data}">\n' for media, data in sources)
    words = f"{story.title}: " + "; ".join(f"{m.at - story.zero_at:.1f} s {m.text}" for m in story.marks)
    return f'<picture>\n{tags}<img alt="{escape(words)}" src="{_image(story, LIGHT, WIDE)}">\n</picture>'


def _image(story: Story, theme: Theme, shape: Shape) -> str:
    svg = draw(story, theme, shape).replace(b"'DejaVu Sans'", b"'DejaVu Sans', Verdana, Arial, sans-serif")
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


def _marks(story: Story) -> str:
    """Numbered as in the picture for phones."""
    rows = (
        f'<li><span class="{MARKS.get(mark.kind, "plain")}">{_time(mark.at, story)}</span> {escape(mark.text)}</li>'
        for mark in story.marks
    )
    return f"<h2>What happened</h2>\n<ol>{''.join(rows)}</ol>" if story.marks else ""


def _numbers(story: Story) -> str:
    rows = (
        f'<tr><th>{escape(number.name)}</th><td class="number">{escape(number.value)}</td>'
        f'<td class="faint">{escape(number.note)}</td></tr>'
        for number in story.numbers
    )
    return f"<h2>Numbers</h2>\n<table>{''.join(rows)}</table>" if story.numbers else ""


def _late(story: Story) -> str:
    rows = "".join(f'<li class="some">{escape(text)}</li>' for text in story.late)
    body = f"<ul>{rows}</ul>" if rows else '<p class="faint">Nothing that was planned.</p>'
    return f"<h2>What was late</h2>\n{body}"


def _events(story: Story) -> str:
    rows = "".join(_event(event, story) for event in story.events)
    if not rows:
        return ""
    return f"<details open><summary>Log, with reasons</summary>\n<table>{rows}</table></details>"


def _event(event: Event, story: Story) -> str:
    tone = {"error": "bad", "warning": "some"}.get(event.level, "")
    text = event.reason if event.reason.startswith(event.text) else event.text
    reason = f'<br><span class="faint">{escape(event.reason)}</span>' if event.reason not in ("", text) else ""
    return (
        f'<tr><td class="number">{_time(event.at, story)}</td><td class="faint word">{escape(event.phase)}</td>'
        f'<td class="{tone}">{escape(text)}{reason}</td></tr>'
    )


def _configuration(story: Story) -> str:
    if not story.configuration:
        return ""
    return f"<details><summary>Configuration</summary>\n<pre>{escape(story.configuration)}</pre></details>"


def _time(at: float, story: Story) -> str:
    return f"{at - story.zero_at:+.1f} s"

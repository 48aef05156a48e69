"""The page of an outage: whole in one file, readable without its colours, and it says what was decided and why."""

import base64
import re
from html.parser import HTMLParser

import pytest

from powerguard.drill import report
from powerguard.drill.picture import DARK, LIGHT, NARROW, WIDE, _rows, draw, label
from powerguard.drill.story import Event, Mark, Number, Series, Span, Steps, Story

pytest.importorskip("matplotlib")

ZERO = 1000.0


def line(start, end, first, slope):
    return tuple((ZERO + t, first + slope * (t - start)) for t in range(start, end + 1))


@pytest.fixture
def story():
    return Story(
        title="Drill: blackout",
        zero_at=ZERO,
        start=ZERO - 5,
        end=ZERO + 60,
        verdict="survived",
        why=("the flush was sealed <16.4 s> before the power was cut",),
        spans=(
            Span(ZERO - 5, ZERO + 1, "online"),
            Span(ZERO + 1, ZERO + 19, "on_battery"),
            Span(ZERO + 19, ZERO + 21, "flushing"),
            Span(ZERO + 21, ZERO + 40, "parked"),
            Span(ZERO + 40, ZERO + 60, "off"),
        ),
        marks=(
            Mark(ZERO, "mains_cut", "mains fail"),
            Mark(ZERO + 19, "stop", "stop ordered"),
            Mark(ZERO + 20, "sealed", "flush sealed, step 197"),
            Mark(ZERO + 40, "power_cut", "power cut"),
        ),
        series=Series(
            charge_pct=line(-5, 40, 100, -2),
            load_pct=line(-5, 40, 70, 0),
            runway_s=line(0, 40, 30, -0.7),
            need_s=line(-5, 40, 6, 0),
            truth_s=line(0, 40, 40, -1),
        ),
        steps=(Steps(0, 0, line(-5, 20, 0, 8)), Steps(1, 0, line(-5, 20, 0, 8))),
        events=(Event(ZERO + 19, "flushing", "STOP ordered", "runway 7 s <= need 6 s & margin", "warning"),),
        numbers=(Number("spare", "6.0 s", "halted to power cut"),),
        configuration='[policy]\nsnapshot = "always"',
    )


class Reader(HTMLParser):
    """Collects the text, and every address that the page refers to."""

    def __init__(self):
        super().__init__()
        self.text, self.addresses, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "img", "source", "br"):
            self.open.append(tag)
        self.addresses += [value for name, value in attrs if name in ("src", "srcset", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


@pytest.fixture
def page(story):
    reader = Reader()
    reader.feed(report.html(story))
    assert reader.open == []
    return reader


@pytest.mark.slow
def test_the_page_needs_nothing_else(page):
    """Every picture is in the page itself: it can be mailed, and opened where there is no network."""
    assert len(page.addresses) == 4
    assert all(address.startswith("data:image/svg+xml;base64,") for address in page.addresses)


@pytest.mark.slow
def test_the_page_says_the_verdict_its_reason_the_numbers_and_the_log(page):
    """All of it as text, escaped, so that a reader of text or of colours misses nothing."""
    text = " ".join(page.text)
    for words in (
        "survived",
        "the flush was sealed <16.4 s> before",
        "mains fail",
        "+19.0 s",
        "runway 7 s <= need 6 s & margin",
        "halted to power cut",
        'snapshot = "always"',
    ):
        assert words in text


@pytest.mark.slow
def test_pictures_differ_for_light_dark_phone_and_desk(page):
    """Four pictures, all different, each an SVG with its words as text."""
    svgs = [base64.b64decode(address.partition(",")[2]).decode() for address in page.addresses]
    assert len(set(svgs)) == 4
    for svg in svgs:
        assert svg.startswith("<?xml")
        assert "on battery" in svg
    assert [("stop ordered" in svg) for svg in svgs] == [False, False, True, True]


@pytest.mark.slow
def test_the_same_story_gives_the_same_page(story):
    """Nothing in it depends on the clock or on chance."""
    assert report.html(story) == report.html(story)


@pytest.mark.slow
def test_a_story_of_almost_nothing_is_still_a_page(tmp_path):
    """No curve, no mark, no verdict: an empty picture, never an error; the PNG lies beside it."""
    path = report.write(Story(title="nothing", zero_at=0.0, start=0.0, end=1.0), tmp_path / "report.html")
    assert "nothing" in path.read_text()
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("shape", [WIDE, NARROW])
def test_no_stem_crosses_a_label(story, shape):
    """A label is above every later stem that it reaches."""
    rows = _rows(story, shape)
    width = story.end - story.start
    for i, mark in enumerate(story.marks):
        reach = mark.at + width * shape.glyph * (len(label(story, i, shape)) + 1)
        for j in range(i + 1, len(rows)):
            if story.marks[j].at < reach:
                assert rows[j] < rows[i]


@pytest.mark.slow
def test_unknown_values_are_gaps(story):
    """A runway that was never known is not drawn as zero."""
    from msgspec.structs import replace

    blind = replace(story, series=replace(story.series, runway_s=()))
    for theme in (LIGHT, DARK):
        svg = draw(blind, theme).decode()
        assert not re.search(r">spare<", svg)

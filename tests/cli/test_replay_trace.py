"""`powerguard replay` of a discharge that somebody recorded, and the picture of a replay."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from powerguard.cli import run, trace
from powerguard.cli.chart import Point, svg
from powerguard.core.policy import Policy
from powerguard.errors import JournalError

PUBLIC = Path(__file__).parents[1] / "data" / "upsplus_full_discharge.csv"
SVG = "{http://www.w3.org/2000/svg}"


def written(folder: Path, text: str) -> Path:
    """A trace on disk."""
    path = folder / "trace.csv"
    path.write_text(text)
    return path


@pytest.mark.slow
def test_a_public_trace_is_told_and_drawn(tmp_path, capsys):
    """The bound over four hours: under what was left at 99 % of the instants, not absurdly low, and drawn beside it."""
    picture = tmp_path / "trace.svg"
    lithium = ["--set", "battery.type=li-ion", "--set", "ups.load=20"]
    code = run(["replay", str(PUBLIC), "--dark", *lithium, "--plot", str(picture)])
    lines = capsys.readouterr().out.splitlines()
    told = re.fullmatch(
        r"2896 rows, (\d+) bounds, ([\d.]+) % not above what was left, in the median ([\d.]+) of it", lines[-1]
    )
    drawing = ElementTree.parse(picture).getroot()
    drawn = [len(line.get("points", "").split()) for line in drawing.iter(f"{SVG}polyline")]

    assert code == 0
    assert 30 < len(lines) < 120
    assert sum(re.search(r"\d s of \d+ s ", line) is not None for line in lines) > 20
    assert told is not None
    assert int(told[1]) > 2880
    assert float(told[2]) >= 99.0
    assert 0.2 < float(told[3]) < 0.6
    assert max(drawn) == 2896
    assert int(told[1]) in drawn


def test_a_stop_is_told_once_with_its_reason(tmp_path, capsys):
    """An honest UPS that runs down: riding through, the snapshot, the stop while more than the need is left."""
    rows = "\n".join(f"{t},OB,{100 - t / 6:.0f},{600 - t},25.{5 - t // 120},60" for t in range(0, 600, 2))
    path = written(
        tmp_path, f"# somebody's\nt_s,status,charge_pct,runtime_s,batt_V,load_pct\n-4,OL,100,600,27.3,60\n{rows}\n"
    )
    code = run(["replay", str(path), "--json", "--dark", "--flush", "60", "--set", "battery.voltage.nominal=24"])
    *lines, summary = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    events = [line for line in lines if "event" in line]

    assert code == 0
    assert ["snapshot", "stop"] == [line["event"] for line in events]
    assert 130.0 <= events[1]["truth_s"]
    assert "need" in events[1]["reason"]
    assert summary["not_above_the_truth"] >= 0.99 * summary["bounds"] - 1


def test_columns_are_known_by_many_names(tmp_path):
    """Units in the name, words of apcupsd, clocks past midnight, missing fields, variables that stand for the trace."""
    path = written(
        tmp_path,
        "time,status,charge_pct,timeleft_min,volts_mV,nonsense\n"
        "23:59:58,ONLINE,100.0,10.5,13500,x\n"
        "00:00:02,ONBATT,,9.5,12900,x\n"
        "00:00:04,OB LB,97,,,x\n",
    )
    first, second, third = trace.read(path, {"ups.load": "40", "battery.charge": "50"})

    assert [0.0, 4.0, 6.0] == [first.at, second.at, third.at]
    assert {
        "ups.status": "OL", "battery.charge": "100.0", "battery.runtime": "630", "battery.voltage": "13.5",
        "ups.load": "40",
    } == first.variables  # fmt: skip
    assert {
        "ups.status": "OB", "battery.charge": "50", "battery.runtime": "570", "battery.voltage": "12.9",
        "ups.load": "40",
    } == second.variables  # fmt: skip
    assert "OB LB" == third.variables["ups.status"]
    assert "battery.runtime" not in third.variables


def test_the_variables_of_nut_are_their_own_names(tmp_path):
    """A column named as in `upsc` is that variable; without a status everything is on battery; dates are times."""
    path = written(
        tmp_path,
        "timestamp,battery.charge,battery.runtime,ups.load\n"
        "2026-03-05 13:49:38,90,600,50\n2026-03-05 13:49:40,89,590,50\n",
    )
    rows = trace.read(path, {})

    assert [0.0, 2.0] == [row.at for row in rows]
    assert {"OB"} == {row.variables["ups.status"] for row in rows}
    assert "590" == rows[1].variables["battery.runtime"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("a,b\n1,2\n", "no column is a time"),
        ("t_s,b\n1,2\n", "no column is a value"),
        ("t_s,charge_pct\nsoon,99\n", "'soon' is no time"),
        ("t_s,charge_pct\n", "has no rows"),
        ("", "no column is a time"),
    ],
)
def test_what_is_no_trace_is_refused(tmp_path, text, says):
    """With what it lacks."""
    with pytest.raises(JournalError, match=says):
        trace.read(written(tmp_path, text), {})


@pytest.mark.parametrize(
    ("arguments", "code"), [(["--plot", "x.png"], 2), (["--set", "load"], 2), (["--plot", "/nowhere/x.svg"], 8)]
)
def test_a_mistake_has_its_code(tmp_path, arguments, code, capsys):
    """A picture of another kind, a variable without a value, a picture that can't be written."""
    path = written(tmp_path, "t_s,charge_pct\n0,99\n2,98\n")

    assert run(["replay", str(path), *arguments]) == code
    assert "Traceback" not in capsys.readouterr().err


def test_mains_back_end_the_stop(tmp_path):
    """After the stop only the bound is told, until mains are back and a second outage begins."""
    rows = [trace.Row(float(t), {"ups.status": "OB", "battery.runtime": "100"}) for t in range(0, 30, 2)]
    rows += [trace.Row(float(t), {"ups.status": "OL"}) for t in range(30, 50, 2)]
    rows += [trace.Row(float(t), {"ups.status": "OB", "battery.runtime": "100"}) for t in range(50, 70, 2)]
    said = trace.play(rows, Policy(), flush_s=60.0, dark=False)

    assert 2 == [each.event for each in said].count("stop")
    assert "mains are back" in [each.reason for each in said]
    assert all(each.truth_s is None for each in said)


def test_a_picture_breaks_its_line_where_nothing_is_known():
    """Unknown is a gap, not a zero; phases are bands; text is escaped; one point alone is drawn too."""
    points = [
        Point(0.0, 100.0),
        Point(2.0, None, "on_battery", 30.0),
        Point(4.0, 80.0, "on_battery", 30.0),
        Point(6.0, 60.0, "flushing", 30.0, event="stop <now>"),
    ]
    drawing = ElementTree.fromstring(svg("a & b", "", points))
    lines = [line.get("points") for line in drawing.iter(f"{SVG}polyline")]
    texts = [text.text for text in drawing.iter(f"{SVG}text")]

    assert 3 == len(lines)
    assert {"a & b", "stop <now>", "need and margin"} <= set(texts)
    assert "really left" not in texts
    assert svg("", "", points[:1]).startswith("<svg")

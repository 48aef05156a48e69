"""`powerguard record` against a simulated upsd: a trace that `powerguard replay` reads."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from powerguard.cli import run, trace
from powerguard.cli.record import ABOUT, COLUMNS, FORMAT
from powerguard.errors import UpsUnknown, UpsUnreachable, UsageError
from powerguard.sim.upsd import HEALTHY, SimUpsd

DOC = Path(__file__).parents[2] / "docs" / "traces.md"


def _cut_after_rows(upsd: SimUpsd, out: Path, rows: int) -> None:
    """The mains fail once so many rows are on the disk."""
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
        if out.exists() and sum(line[:1].isdigit() for line in out.read_text().splitlines()) >= rows:
            break
        time.sleep(0.05)
    upsd.set("rack", {"ups.status": "OB DISCHRG", "battery.charge": "93"})


@pytest.mark.slow
def test_an_outage_is_recorded_and_replayed(tmp_path, capsys):
    """Rows before and in an outage, nothing that says whose UPS it is, and replay reads it back."""
    out = tmp_path / "trace.csv"
    with SimUpsd() as upsd:
        upsd.replace("rack", {**HEALTHY, "ups.serial": "SECRET-1", "ups.status": "OL"})
        cut = threading.Thread(target=_cut_after_rows, args=(upsd, out, 3))
        cut.start()
        code = run(["record", upsd.address("rack"), "--out", str(out), "--every", "0.5", "--for", "6"])
        cut.join()
    said = capsys.readouterr()

    assert 0 == code
    text = out.read_text()
    assert text.startswith(f"# {FORMAT}")
    assert "# ups.model: Simulated 3000" in text
    assert "SECRET" not in text
    rows = trace.read(out, {})
    assert [(row.variables["ups.status"], row.variables["battery.charge"]) for row in (rows[0], rows[-1])] == [
        ("OL", "100"),
        ("OB DISCHRG", "93"),
    ]
    assert 3.0 <= rows[-1].at <= 7.0
    assert "on battery, charge 93 %" in said.err
    assert f"{len(rows)} rows: {out}" in said.out
    assert 0 == run(["replay", str(out)])


def test_what_cannot_be_recorded_is_refused(tmp_path, capsys):
    """No server, no such UPS, too fast, and a file that is there already: each with its exit code, nothing written."""
    taken = tmp_path / "taken.csv"
    taken.write_text("mine")
    with SimUpsd() as upsd:
        upsd.replace("rack", HEALTHY)
        assert run(["record", upsd.address("other"), "--out", str(tmp_path / "a.csv")]) == UpsUnknown.exit_code
        assert run(["record", upsd.address("rack"), "--out", str(taken), "--for", "1"]) == UsageError.exit_code
        assert run(["record", upsd.address("rack"), "--every", "0.1"]) == UsageError.exit_code
        upsd.fault("refuse")
        assert run(["record", upsd.address("rack"), "--out", str(tmp_path / "b.csv")]) == UpsUnreachable.exit_code
    assert 4 == capsys.readouterr().err.count("powerguard: ")
    assert ["taken.csv"] == [path.name for path in tmp_path.iterdir()]
    assert taken.read_text() == "mine"


def test_the_page_names_every_column():
    """docs/traces.md knows what is recorded."""
    text = DOC.read_text()

    assert [] == [name for name in (*COLUMNS, *ABOUT) if f"`{name}`" not in text]

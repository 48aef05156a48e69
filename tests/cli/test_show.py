"""The status page and `status --watch`."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from powerguard.cli import show, watch
from powerguard.core.outlook import Expected, Outlook
from powerguard.errors import DaemonUnreachable
from powerguard.node.status import FeedStatus, JobStatus, NeedStatus, RankStatus, Status

AHEAD = Outlook(
    "if the mains stay away",
    (Expected("training stops at one step, all is saved", 409.0, "stop: runway 71 s (charge) <= need 61 s"),),
    840.0,
)


def status(**changed: object) -> Status:
    feed = FeedStatus("rack@10.0.0.5:3493", "ok", "", ("DISCHRG", "OB"), True, 87.0, 720.0, 40.0, 50.8, 1.2, True)
    lost = FeedStatus("pdu@[fd00::6]:3493", "stale", "data stale", (), None, None, None, None, None, 33.0, False, "no")
    ranks = tuple(RankStatus(n, n != 5, 1234 + n % 2, "", 0.1, 0.4, 0.2, 9.0, 10**9) for n in range(8))
    fields: dict[str, object] = {
        "node": "gpu-node-07",
        "version": "0",
        "pid": 1,
        "boot": "b",
        "up_s": 9999.0,
        "phase": "on_battery",
        "phase_s": 42.0,
        "reason": "riding through: runway 480 s (charge), need 61 s",
        "event": "b-1",
        "on_battery": True,
        "runway_s": 480.0,
        "idle_runway_s": 900.0,
        "spare_s": 409.0,
        "need": NeedStatus(61.0, 16.0, 14.0, 45.0, "rank 3", True),
        "feeds": (feed, lost),
        "jobs": (JobStatus("slurm-48121", 8, "/x", "snapshotted", "", ranks, 1200, "g", 12.0),),
        "halt": "logind",
        "troubles": ("pdu: no fresh value for 33 s",),
        "journal": "/j",
        "journal_trouble": "",
        "outlook": AHEAD,
    }
    return Status(**{**fields, **changed})  # type: ignore[arg-type]


def drawn(now: Status, width: int = 80) -> str:
    screen = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    screen.print(show.page(now, "12:03:11"))
    screen.file.close()
    return screen.export_text()


def test_the_page_holds_what_counts_in_80_columns():
    """Phase, reason, runway, need, spare, feeds, ranks, what comes next and when; no line is wider than 80."""
    text = drawn(status())
    assert max(map(len, text.splitlines())) <= 80
    for word in (
        "gpu-node-07  on battery for 42 s",
        "riding through",
        "8 min, 15 min with ranks parked",
        "7/8",
        "OB",
        "stale: data stale",
        "in 7 min",
        "training stops at one step",
        "power is presumed gone",
        "no fresh value",
    ):
        assert word in text


@pytest.mark.parametrize("width", [40, 60, 200])
def test_any_terminal_will_do(width: int):
    """Narrow ones fold, wide ones don't stretch."""
    assert max(map(len, drawn(status(), width).splitlines())) <= width


def test_what_is_unknown_is_called_unknown():
    """No runway: the word, not a bar or a zero; no job: said."""
    text = drawn(status(runway_s=None, idle_runway_s=None, spare_s=None, jobs=(), outlook=Outlook("")))
    assert text.count("unknown") >= 3
    assert "no training job" in text
    assert "next" not in text


def test_names_cannot_colour_the_page(capsys):
    """Square brackets in a job's name or a reason are shown, not obeyed."""
    job = JobStatus("[red]job[/]", 1, "/x", "idle", "", ())
    assert "[red]job[/]" in drawn(status(jobs=(job,), reason="[bold]x"))
    show.once(status(jobs=(job,)))
    assert "[red]job[/]" in capsys.readouterr().out


class Fetch:
    """A daemon that answers, goes away, and comes back; then somebody presses Ctrl-C."""

    def __init__(self) -> None:
        self.asked = 0

    def __call__(self) -> Status:
        self.asked += 1
        if self.asked == 2:
            raise DaemonUnreachable("it is being restarted")
        if self.asked == 4:
            raise KeyboardInterrupt
        return status(phase_s=float(self.asked))


@pytest.mark.slow
def test_watch_goes_on_until_ctrl_c(capsys):
    """A daemon that goes away is waited for; Ctrl-C is the way out and no error; --json gives a line each."""
    fetch = Fetch()
    watch.run(fetch, as_json=True)
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert fetch.asked == 4
    assert [line["phase_s"] for line in lines] == [1.0, 1.0, 3.0]


def test_watch_needs_a_daemon_to_begin_with():
    """None at the start is the operator's mistake, not something to wait for."""

    def nobody() -> Status:
        raise DaemonUnreachable("no daemon")

    with pytest.raises(DaemonUnreachable):
        watch.run(nobody)

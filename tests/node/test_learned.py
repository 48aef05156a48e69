"""What outages taught: kept whole over power cuts, below the operator's word, and never in the way of the loop."""

from __future__ import annotations

import errno
import io
import os
from datetime import date
from pathlib import Path

import msgspec
import pytest
import structlog
from msgspec.structs import replace

from powerguard.config import Config, loads
from powerguard.core.discharge import Discharge
from powerguard.core.draw import Draw, Runway
from powerguard.core.outages import DEFAULT, survival
from powerguard.core.phase import PhaseView
from powerguard.core.policy import Policy
from powerguard.core.state import State, initial
from powerguard.core.supply import Feed
from powerguard.core.types import Phase
from powerguard.errors import UsageError
from powerguard.node.batteries import about, put_in, which
from powerguard.node.learned import Learned, looked_at
from powerguard.node.learned_file import Book, read, write
from powerguard.node.logs import set_up

FEED = "rack@nut:3493"
BOOT = "boot-1"
START = initial(BOOT, 0.0)

WHOLE = Discharge(
    lasted_s=600.0, load_pct=60.0, used=0.60, basis="promised", basis_s=1000.0, volts_least=1.76, volts_last=1.76,
    knee_used=0.57,
)  # fmt: skip
BLIP = Discharge(lasted_s=105.0, load_pct=60.0, used=0.1, basis="promised", basis_s=1000.0, volts_last=2.0)


@pytest.fixture(autouse=True)
def _logs():
    """Log lines go nowhere."""
    set_up(json=True, stream=io.StringIO())
    yield
    structlog.reset_defaults()


def config(extra: str = "") -> Config:
    return loads(f'[[ups]]\nname = "{FEED}"\n{extra}', env={})


def open_(path: Path | None, extra: str = "", boot: str = BOOT, **how) -> tuple[Learned, Config]:
    learned = Learned(path, boot=boot, day=lambda: 20000.0, **how)
    return learned, learned.applied(config(extra))


def after(discharge: Discharge, ended_at: float = 700.0, **change) -> State:
    """On line, with *discharge* behind."""
    runway = replace(Runway(last=discharge, discharges=1, ended_at=ended_at), **change)
    return replace(START, feeds={FEED: Feed(FEED, runway=runway)})


def in_force(learned: Learned, before: Config):
    return learned.policy(before.policy).feeds[0]


def test_what_was_learned_survives_a_restart(tmp_path):
    """Written in the background, read by the next one, in force there from the start and not taught twice."""
    path = tmp_path / "learned.json"
    learned, _ = open_(path)
    (taught,) = learned.watch(START, after(WHOLE), 760.0, real=True)
    assert learned.stale
    learned.close()
    again, known = open_(path)

    assert "measured" == taught.lesson.what
    assert known.policy.feeds[0].learned_phi == pytest.approx(0.6)
    assert not again.stale
    assert [] == again.watch(START, after(WHOLE), 800.0, real=True)
    assert 1 == len(again.watch(START, after(WHOLE, ended_at=9000.0), 9100.0, real=True))
    again.close()
    assert 0o640 == path.stat().st_mode & 0o777
    assert ["learned.json"] == [p.name for p in tmp_path.iterdir()]


def test_instants_of_another_boot_mean_nothing(tmp_path):
    """A discharge that ends at the same second of the next boot is another one."""
    path = tmp_path / "learned.json"
    learned, _ = open_(path)
    learned.watch(START, after(WHOLE), 760.0, real=True)
    learned.close()
    again, _ = open_(path, boot="boot-2")

    assert 1 == len(again.watch(START, after(WHOLE), 760.0, real=True))
    again.close()


@pytest.mark.slow
def test_a_file_torn_anywhere_is_set_aside(tmp_path):
    """Cut at any byte the daemon begins anew with the default, and what was there is kept beside."""
    path, aside = tmp_path / "learned.json", tmp_path / "learned.json.bad"
    learned, _ = open_(path)
    learned.watch(START, after(WHOLE), 760.0, real=True)
    learned.close()
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        _, known = open_(path)
        assert known == config()
        assert aside.read_bytes() == whole[:cut]
        assert not path.exists()
        assert looked_at(path)[1] == ""


@pytest.mark.parametrize(
    "content",
    [
        b"{}",
        b"[]",
        b"\0" * 512,
        b"\xff\xfe",
        b"[" * 5000,
        b'{"k":"learned","format":2}',
        b'{"k":"learned","format":1,"outages":{"counts":[1,1,1]}}',
        b'{"k":"learned","format":1,"outages":{"counts":[1,1,1,-1]}}',
        b'{"k":"learned","format":1,"batteries":{"a":{"feed":"b"}}}',
        b'{"k":"learned","format":1,"batteries":{"a":{"feed":"a","phi":-1}}}',
        b'{"k":"learned","format":1,"batteries":{"a":{"feed":"a","phi":1e9}}}',
        b'{"k":"learned","format":1,"replaced":{"a":"soon"}}',
    ],
)
def test_a_foreign_file_is_set_aside(tmp_path, content):
    """What isn't ours, or holds values that can't be, teaches nothing and stops nothing; a look moves nothing."""
    path = tmp_path / "learned.json"
    path.write_bytes(content)
    assert looked_at(path)[1]
    assert path.exists()
    _, known = open_(path)

    assert known == config()
    assert content == (tmp_path / "learned.json.bad").read_bytes()


def test_a_file_that_cannot_be_read_stops_nothing(tmp_path):
    """A folder in its place, say."""
    (tmp_path / "learned.json").mkdir()

    assert open_(tmp_path / "learned.json")[1] == config()


def test_a_failing_disk_is_told_and_costs_only_the_memory(tmp_path):
    """Lessons go on, the trouble is said while it lasts, and the file is the old one."""
    full = [True]

    def put(path: Path, content: bytes) -> None:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, content)

    learned, before = open_(tmp_path / "learned.json", put=put)
    learned.watch(START, after(WHOLE), 760.0, real=True)
    learned.close()
    assert "No space left" in learned.trouble
    assert in_force(learned, before).learned_phi == pytest.approx(0.6)
    full[0] = False
    learned.watch(START, after(BLIP, 9000.0), 9100.0, real=True)
    learned.close()

    assert "" == learned.trouble
    assert 2 == len(read(tmp_path / "learned.json").batteries[FEED].lessons)


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    """No half file, no temporary one."""
    path = tmp_path / "learned.json"
    write(path, b"old")
    (tmp_path / f".learned.json.{os.getpid()}").mkdir()
    with pytest.raises(OSError, match="directory"):
        write(path, b"new")

    assert b"old" == path.read_bytes()


def test_a_censored_blip_teaches_no_capacity(tmp_path):
    """105 s and mains again: proven for so long, and never a worse battery than before."""
    learned, before = open_(tmp_path / "learned.json")
    learned.watch(START, after(WHOLE), 760.0, real=True)
    (taught,) = learned.watch(START, after(BLIP, 9000.0), 9100.0, real=True)
    learned.close()

    assert "proven" == taught.lesson.what
    assert in_force(learned, before).learned_phi == pytest.approx(0.6)


def test_a_discharge_is_taught_once_it_cannot_go_on():
    """Neither in the outage, nor while a flap may make it the same one, nor off line."""
    learned, _ = open_(None)

    assert [] == learned.watch(START, after(WHOLE, draw=Draw()), 701.0, real=True)
    assert [] == learned.watch(START, after(WHOLE, ended=Draw()), 701.0, real=True)
    flushing = replace(after(WHOLE), view=PhaseView(phase=Phase.FLUSHING))
    assert [] == learned.watch(START, flushing, 761.0, real=True)
    assert 1 == len(learned.watch(START, after(WHOLE), 761.0, real=True))


def test_the_operators_capacity_wins(tmp_path):
    """`learned_phi` in the configuration stands, whatever discharges say; they are kept all the same."""
    learned, before = open_(tmp_path / "learned.json", "learned_phi = 0.9\n")
    learned.watch(START, after(WHOLE), 760.0, real=True)
    learned.close()

    assert before.policy.feeds[0] == in_force(learned, before)
    assert about(learned).batteries[0].operator
    assert open_(tmp_path / "learned.json")[1].policy.feeds[0].learned_phi == pytest.approx(0.6)


def test_the_later_date_of_installation_wins():
    """The command's over an older configuration, a newer configuration's over the command; each begins anew."""
    old = 'battery_installed = "2020-01-01"\n'
    learned, before = open_(None, old)
    learned.watch(START, after(WHOLE), 760.0, real=True)
    assert in_force(learned, before).learned_phi is not None
    learned.replaced(FEED, date(2023, 10, 5))
    feed = in_force(learned, before)
    assert (None, "2023-10-05") == (feed.learned_phi, feed.battery_installed)
    assert feed.age_y == pytest.approx(1.0, abs=0.01)
    learned.watch(START, after(WHOLE, 9000.0), 9100.0, real=True)
    assert in_force(learned, before).learned_phi is not None
    newer = learned.applied(config('battery_installed = "2024-01-01"\n')).policy.feeds[0]
    assert (None, "2024-01-01") == (newer.learned_phi, newer.battery_installed)
    (taught,) = learned.watch(START, after(BLIP, 9900.0), 9990.0, real=True)

    assert (None, pytest.approx(0.1)) == (taught.phi, taught.proven)


def test_shares_of_another_table_are_left_aside():
    """A table of rated runtimes that was configured since is another unit: learning begins anew."""
    learned, _ = open_(None)
    learned.watch(START, after(WHOLE), 760.0, real=True)
    table = config("rated = [[50, 2000], [100, 900]]\n")

    assert learned.applied(table) == table
    own = replace(WHOLE, basis="rated", basis_s=2000.0)
    learned.watch(START, after(own, 9000.0), 9100.0, real=True)
    assert learned.policy(table.policy).feeds[0].learned_phi == pytest.approx(0.6)
    bigger = config("rated = [[50, 4000], [100, 1800]]\n")
    assert learned.applied(bigger) == bigger


def test_outages_teach_how_long_they_last():
    """Short ones make the next one's end likelier; one that was halted in counts as longer than that."""
    began = replace(START, view=PhaseView(phase=Phase.ON_BATTERY, event_at=100.0))
    short, long = Learned(), Learned()
    for _ in range(20):
        short.watch(began, START, 140.0, real=True)
        halted = replace(began, view=replace(began.view, phase=Phase.HALTING, halted_at=700.0))
        long.watch(began, halted, 700.0, real=True)
    Learned().watch(began, halted, 700.0, real=False)

    assert survival(short.outages, 300.0) < survival(DEFAULT, 300.0) < survival(long.outages, 300.0)
    assert 20 == about(short).outages == about(long).outages
    assert () == Learned().policy(Policy()).outages
    assert short.outages.counts == short.policy(Policy()).outages


def test_only_outages_count():
    """A park by the operator is none, and a forced shutdown on mains isn't either."""
    learned = Learned()
    parked = replace(START, view=PhaseView(phase=Phase.PARKED, held=True))
    forced = replace(START, view=PhaseView(phase=Phase.PARKED, event_at=5.0, fsd_at=5.0))
    for before in (START, parked, forced):
        learned.watch(before, START, 50.0, real=True)

    assert 0 == about(learned).outages


def test_what_decays_is_followed_monthly():
    """A daemon that runs for years doesn't believe in the battery of its first day."""
    day = [20000.0]
    learned = Learned(day=lambda: day[0])
    before = learned.applied(config())
    learned.watch(START, after(WHOLE), 760.0, real=True)
    first = in_force(learned, before).learned_phi
    assert not learned.stale
    day[0] += 365.25
    assert learned.stale

    assert in_force(learned, before).learned_phi == pytest.approx(0.85 * first)


def test_a_round_trip_keeps_everything():
    """The file's value is what was written."""
    learned, _ = open_(None)
    learned.watch(START, after(WHOLE), 760.0, real=True)
    learned.replaced("other@nut:3493", date(2024, 1, 1))
    book = learned._book

    assert book == msgspec.json.decode(msgspec.json.encode(book), type=Book)


def test_a_ups_may_be_named_shortly():
    """As long as it is the only one; else the names are told."""
    names = [FEED, "b@one:3493", "b@two:3493"]

    assert FEED == which(names, "rack") == which(names, "Rack@nut") == which(names, FEED)
    assert "b@two:3493" == which(names, "b@two")
    for said in ("b", "c", ""):
        with pytest.raises(UsageError, match="b@one:3493"):
            which(names, said)


@pytest.mark.parametrize("said", ["soon", "2999-01-01", "2024-02-30"])
def test_a_day_that_is_none_is_refused(said):
    """Neither nonsense nor the future."""
    with pytest.raises(UsageError):
        put_in(said)

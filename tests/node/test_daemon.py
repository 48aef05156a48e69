"""The loop against simulated ranks, a scripted UPS and a clock that only moves when told."""

from __future__ import annotations

import errno
import io
import json
import os
import socket
import threading
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path

import msgspec
import pytest
import structlog
from msgspec.structs import replace

from powerguard.config import Config, loads
from powerguard.core.messages import Exit, Hello, Prepare, Purpose, Resume
from powerguard.core.state import State
from powerguard.core.types import Comm, Command, Halt, PageReport, Phase, RankReport, Sample
from powerguard.journal import File, Journal, Learnt, Tick, fold, read
from powerguard.node.daemon import Daemon
from powerguard.node.inbox import Inbox, Wish
from powerguard.node.inhibit import Shutdown
from powerguard.node.learned import LEARNED_FILE, Learned
from powerguard.node.logs import set_up
from powerguard.node.parts import Parts
from powerguard.node.poweroff import Poweroff
from powerguard.node.readers import Readers
from powerguard.node.sd_notify import Notifier
from powerguard.node.shed import Shedder
from powerguard.node.system import System
from powerguard.node.tell import Teller
from powerguard.node.wake import remembered
from powerguard.sim.clock import FakeClock
from powerguard.sim.rank import Disk, RankSpec, SimRank

BOOT = "5a0f0b5e-6f0e-4e62-8f0c-000000000001"
FEED = "rack@nut:3493"
TEXT = f'[node]\nname = "n"\n[[ups]]\nname = "{FEED}"\n[halt]\nmethod = "command"\ncommand = ["/bin/true"]\n'
SPEC = RankSpec(step_s=1.0, stage_s=0.2, write_s=3.0, fsync_s=0.2)
WAIT_S = 20.0


@pytest.fixture(autouse=True)
def _logs():
    """Log lines as the service writes them; structlog's own default draws each traceback, at half a second apiece."""
    set_up(json=True, stream=io.StringIO())
    yield
    structlog.reset_defaults()


class FakeReader:
    """A reader thread that isn't one."""

    def __init__(self) -> None:
        self.alive, self.poll_s, self.calm, self.closed = False, 0.0, False, None
        self.login_held, self.login_problem = True, ""

    def start(self) -> None:
        self.alive = True

    def is_alive(self) -> bool:
        return self.alive

    def trouble(self) -> str:
        return "" if self.alive else "it died"

    def set_poll(self, seconds: float, *, calm: bool) -> None:
        self.poll_s, self.calm = seconds, calm

    def close(self, *, logout: bool = True, within_s: float = 10.0) -> bool:  # noqa: ARG002
        self.closed, self.alive = logout, False
        return True


class FakeBus:
    """The bus with its ranks at the other end. *broken* makes every call fail."""

    def __init__(self, clock: FakeClock, put: Callable[[object], None], ranks: list[SimRank]) -> None:
        self.clock, self.put, self.ranks = clock, put, ranks
        self.sent: list[tuple[int, object]] = []
        self.broken, self.closed = False, False
        self.registered: set[int] = set()  # by HELLO, as on the real bus: a new daemon's knows nobody

    def send(self, job: str, rank: int, message) -> None:
        if self.broken:
            raise OSError("bus is broken")
        self.sent.append((rank, message))
        for one in self.ranks:
            if (one.job, one.rank) == (job, rank) and not one.deaf(self.clock()):
                self._say(one, one.hear(message, self.clock()))

    def pages(self, now: float) -> tuple[PageReport, ...]:
        if self.broken:
            raise OSError("pages are broken")
        known = [one for one in self.ranks if one.rank in self.registered]
        return tuple(PageReport(one.job, one.rank, now, one.step, one.alive, one.pid) for one in known)

    def care(self) -> str:
        if self.broken:
            raise OSError("no care")
        return ""

    def close(self, wait_s: float = 0.5) -> None:  # noqa: ARG002
        self.closed = True

    def live(self) -> None:
        for one in self.ranks:
            self._say(one, one.tick(self.clock(), [peer for peer in self.ranks if peer is not one]))

    def _say(self, one: SimRank, messages) -> None:
        for message in messages:
            if isinstance(message, Hello):
                self.registered.add(one.rank)
            self.put(RankReport(one.job, one.rank, self.clock(), message))


class FakeWay:
    """A halt that is only counted."""

    name, logs_out = "fake", False

    def __init__(self, real: bool = True) -> None:
        self.real, self.reasons, self.broken = real, [], False

    def prove(self) -> str:
        return "always"

    def halt(self, reason: str) -> str:
        self.reasons.append(reason)
        if self.broken:
            raise RuntimeError("no bus")
        return "halted"


class Bench:
    """A daemon with everything around it simulated; `restart` crashes it and starts the next one from its journal."""

    def __init__(
        self, directory: Path, *, ranks: int = 2, real: bool = True, text: str = TEXT, system=None, **how
    ) -> None:
        self.directory, self.text, self.how, self.system = directory, text, how, system
        self.clock = FakeClock(5000.0)
        self.disk = Disk()
        self.ranks = [SimRank("job", r, ranks, SPEC, self.disk, (), seed=r) for r in range(ranks)]
        self.way = FakeWay(real)
        self.readers: list[FakeReader] = []
        self.variables = {"ups.status": "OL", "battery.charge": "100", "battery.runtime": "900", "ups.load": "40"}
        self.comm = Comm.OK
        self.counted: list[str] = []
        self.pid1 = "systemd"
        self.day = 20000.0
        self.start()

    def start(self) -> None:
        self.inbox = Inbox()
        self.bus = FakeBus(self.clock, self.inbox.put, self.ranks)
        folded = fold(self.directory, BOOT)
        self.folded = folded
        state = remembered(folded, BOOT, "n", self.clock())
        self.power = Poweroff(self.way, self.inbox.put, retry_s=0.02)
        self.journal = Journal(self.directory, boot=BOOT, node="n", version="0", folded=folded, **self.how)
        self.parts = Parts(
            clock=self.clock,
            inbox=self.inbox,
            readers=Readers(self._reader, self.clock),
            bus=self.bus,
            journal=self.journal,
            notify=Notifier({}),
            teller=Teller((), "n"),
            power=self.power,
            reload=self.reload,
            way=lambda _config: self.way,
            count=self.counted.append,
            system=self.system(self.inbox) if self.system else None,
            pid1=lambda: self.pid1,
            learned=Learned(self.directory / LEARNED_FILE, boot=BOOT, day=lambda: self.day),
        )
        self.daemon = Daemon(self.config(), state, self.parts, halt_done=folded.halt_done)
        self.daemon.begin()

    def config(self) -> Config:
        return loads(self.text, env={})

    def reload(self) -> Config:
        return self.config()

    def _reader(self, _ups, poll_s: float) -> FakeReader:
        self.readers.append(FakeReader())
        self.readers[-1].poll_s = poll_s
        return self.readers[-1]

    def restart(self) -> None:
        """SIGKILL: nothing is said, nothing is closed but by the kernel."""
        self.power.close()
        self.journal.close()
        self.parts.learned.close()
        self.start()

    def step(self, seconds: float = 1.0) -> State:
        """The world lives on in small steps, then one poll and one decision."""
        for _ in range(5):
            self.clock.advance(seconds / 5)
            self.bus.live()
        self.inbox.put(Sample(FEED, self.clock(), self.comm, dict(self.variables)))
        self.inbox.put(Wish())  # a feed that says nothing new would let us wait
        self.daemon.tick()
        return self.daemon.state

    def run(self, until: Callable[[State], bool], most: int = 600, each: Callable[[], None] = lambda: None) -> State:
        for _ in range(most):
            state = self.step()
            if until(state):
                return state
            each()
        raise AssertionError(f"never: still {self.daemon.state.phase} because {self.daemon.reason}")

    def discharge(self, by: float = 4.0) -> None:
        """The battery runs down by *by* seconds of runtime."""
        self.variables["battery.runtime"] = f"{max(10.0, float(self.variables['battery.runtime']) - by):.0f}"
        self.variables["battery.charge"] = f"{max(3.0, float(self.variables['battery.runtime']) / 9):.0f}"

    def outage(self) -> None:
        self.variables["ups.status"] = "OB DISCHRG"

    def mains(self) -> None:
        self.variables |= {"ups.status": "OL CHRG", "battery.runtime": "900", "battery.charge": "100"}

    def settle(self) -> None:
        """The power-off's own thread has done what it was asked."""
        _wait(lambda: self.way.reasons)

    def ticks(self) -> list[Tick]:
        self.journal.close()
        (path,) = self.directory.glob("journal-*")
        return [r for r in read(path).records if isinstance(r, Tick)]

    def ordered(self, purpose: Purpose) -> set[tuple[int, str]]:
        """Orders that were journalled, by number and event."""
        actions = [a for tick in self.ticks() for a in tick.actions]
        messages = [a.message for a in actions if hasattr(a, "message")]
        return {(m.seq, m.event) for m in messages if isinstance(m, Prepare) and m.purpose is purpose}


def _wait(condition: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def _until(phase: Phase) -> Callable[[State], bool]:
    return lambda state: state.phase is phase


def _halted(state: State) -> bool:
    return state.halted_at is not None


def blackout(bench: Bench, each: Callable[[], None] = lambda: None) -> None:
    """Mains, then none until the power-off is ordered."""
    for _ in range(5):
        bench.step()
        each()
    bench.outage()

    def on() -> None:
        bench.discharge()
        each()

    bench.run(_halted, each=on)
    bench.settle()


def test_a_blackout_is_survived(tmp_path):
    """One snapshot, one stop, everything sealed, ranks leave with 75, and then one power-off, in that order."""
    bench = Bench(tmp_path)
    blackout(bench)

    assert len(bench.ordered(Purpose.STOP)) == 1
    assert [rank.left_with for rank in bench.ranks] == [75, 75]
    assert bench.disk.newest(2) == bench.ranks[0].step
    assert len(bench.way.reasons) == 1
    halts = [a for tick in bench.ticks() for a in tick.actions if isinstance(a, Halt)]
    assert len(halts) == 1
    exits = [n for n, (_, message) in enumerate(bench.bus.sent) if isinstance(message, Exit)]
    assert exits
    assert {"phase_on_battery", "phase_flushing", "phase_parked", "phase_halting", "halt"} <= set(bench.counted)


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 3])
def test_a_daemon_that_dies_after_every_decision_goes_on_with_the_same_event(tmp_path, every):
    """Killed after each decision, its orders acted on: one event, one stop, one power-off, and everything saved."""
    bench = Bench(tmp_path)
    count = [0]

    def kill() -> None:
        count[0] += 1
        if count[0] % every == 0:
            bench.restart()

    blackout(bench, kill)

    assert count[0] > 50
    assert len(bench.ordered(Purpose.STOP)) == 1
    assert len({tick.state.event for tick in bench.ticks() if tick.state and tick.state.event}) == 1
    assert len([a for tick in bench.ticks() for a in tick.actions if isinstance(a, Halt)]) == 1
    assert [rank.left_with for rank in bench.ranks] == [75, 75]
    assert bench.disk.newest(2) == bench.ranks[0].step


@pytest.mark.slow
def test_a_daemon_that_dies_between_journal_and_act_loses_no_order(tmp_path):
    """Killed after the sync and before anything was sent, at every decision: ranks are told by the next daemon."""
    bench = Bench(tmp_path)

    def deaf() -> None:
        """Every second decision is journalled and never acted on."""
        bench.bus.broken = True
        bench.step(0.4)
        bench.restart()

    blackout(bench, deaf)

    assert len(bench.ordered(Purpose.STOP)) == 1
    assert [rank.left_with for rank in bench.ranks] == [75, 75]
    assert bench.disk.newest(2) == bench.ranks[0].step
    assert bench.way.reasons


def test_a_stop_ordered_just_before_the_daemon_died_needs_no_second_one(tmp_path):
    """Ranks that never heard PREPARE train on for 8 s; the next daemon asks them anew, and not for old steps."""
    bench = Bench(tmp_path)
    for _ in range(3):
        bench.step()
    bench.bus.broken = True
    bench.inbox.put(Command("park"))
    bench.run(_until(Phase.FLUSHING))
    for _ in range(8):
        bench.clock.advance(1.0)
        bench.bus.live()
    bench.restart()
    bench.run(_until(Phase.PARKED))

    assert len(bench.ordered(Purpose.STOP)) == 1
    assert bench.disk.newest(2) == bench.ranks[0].step


@pytest.mark.slow
def test_a_daemon_that_dies_in_a_pause_lets_ranks_train_on_after_their_save(tmp_path):
    """A silence in which the battery may not carry the snapshot: killed at every decision, one pause, and no halt."""
    bench = Bench(tmp_path)
    for rank in bench.ranks:
        rank.spec = replace(SPEC, write_s=150.0)
    bench.variables["battery.runtime"] = "300"
    for _ in range(4):
        bench.step()
    bench.comm = Comm.STALE
    bench.run(_until(Phase.FLUSHING), each=bench.restart)
    paused = bench.ranks[0].step
    bench.run(_until(Phase.ONLINE), each=bench.restart)
    for _ in range(30):
        bench.step()

    assert "training goes on after a pause" in bench.daemon.state.view.why
    assert len(bench.ordered(Purpose.STOP)) == 1
    assert bench.disk.newest(2) is not None
    assert [rank.parked for rank in bench.ranks] == [False, False]
    assert bench.ranks[0].step > paused + 20
    assert not bench.way.reasons


def test_a_halt_that_was_journalled_and_not_carried_out_is_carried_out_by_the_next_daemon(tmp_path):
    """A crash between the order to halt and the halt costs nothing; a halt that was carried out isn't repeated."""
    bench = Bench(tmp_path)
    bench.way.broken = True
    blackout(bench)
    bench.way.broken = False
    tried = len(bench.way.reasons)
    bench.restart()
    _wait(lambda: len(bench.way.reasons) > tried)
    bench.step()
    bench.step()
    done = len(bench.way.reasons)
    bench.restart()
    bench.step()

    assert bench.folded.halt_done
    assert len(bench.way.reasons) == done


def test_after_a_restart_ranks_register_anew(tmp_path):
    """The next daemon's bus learns of process and page of each rank, and so notices when one of them dies."""
    bench = Bench(tmp_path)
    for _ in range(3):
        bench.step()
    bench.restart()
    for _ in range(3):
        bench.step()
    assert bench.bus.registered == {0, 1}
    bench.ranks[1].alive = False
    bench.step()

    assert not bench.daemon.state.jobs["job"].members[1].alive


def test_parked_ranks_train_on_in_place_when_mains_are_back(tmp_path):
    """Mains back while parked: RESUME, no halt, and the next outage is another event."""
    bench = Bench(tmp_path)
    for _ in range(2):
        bench.outage()
        bench.run(_until(Phase.PARKED), each=bench.discharge)
        at = bench.ranks[0].step
        bench.mains()
        bench.run(_until(Phase.ONLINE))
        bench.run(lambda _state, at=at: bench.ranks[0].step > at + 3)

    assert any(isinstance(message, Resume) for _, message in bench.bus.sent)
    assert len(bench.ordered(Purpose.STOP)) == 2
    assert not bench.way.reasons


def test_after_a_standstill_the_ups_is_heard_before_anything_is_decided(tmp_path):
    """Parked, and the process was stopped for a minute, in which mains came back: nobody asked meanwhile, so nobody was
    silent. A UPS that stays silent then is believed to be."""
    bench = Bench(tmp_path)
    bench.run(lambda state: bool(state.jobs) and bench.daemon.state.power is not None, most=10)
    bench.outage()
    bench.inbox.put(Command("park"))
    bench.run(lambda state: state.phase is Phase.PARKED)
    bench.clock.advance(60.0)
    bench.inbox.put(Wish())
    bench.mains()
    answer = Sample(FEED, bench.clock(), Comm.OK, dict(bench.variables))
    late = threading.Timer(0.2, lambda: bench.inbox.put(answer))
    late.start()
    bench.daemon.tick()
    late.join()

    assert Phase.PARKED is bench.daemon.state.phase
    bench.outage()
    bench.step()
    bench.clock.advance(60.0)
    bench.inbox.put(Wish())
    bench.daemon.tick()
    assert Phase.HALTING is bench.daemon.state.phase


def test_a_dry_run_says_so_and_is_over_when_mains_are_back(tmp_path):
    """A halt that was a dry run is told to the core; with mains back the node is ONLINE and can halt again."""
    bench = Bench(tmp_path, real=False)
    blackout(bench)
    bench.step()
    assert bench.daemon.state.view.dry
    bench.mains()
    bench.run(_until(Phase.ONLINE))
    bench.outage()
    bench.run(_halted, each=lambda: bench.discharge(20))
    _wait(lambda: len(bench.way.reasons) == 2)


def test_a_broken_law_on_battery_orders_the_last_resort_and_ends(tmp_path):
    """With a state that can't be trusted, ranks are asked to save by themselves, and the daemon exits 70."""
    bench = Bench(tmp_path)
    bench.step()
    bench.outage()
    bench.run(lambda state: state.view.snapshot_at is not None)
    seq = bench.daemon.state.seq
    bench.daemon.state = msgspec.structs.replace(bench.daemon.state, seq=0)  # what a bit flip may do
    bench.inbox.put(Wish())
    assert bench.daemon.run() == 70

    stops = [(r, m) for r, m in bench.bus.sent if isinstance(m, Prepare) and m.purpose is Purpose.STOP]
    assert sorted(rank for rank, _ in stops) == [0, 1]
    assert {m.seq for _, m in stops} == {max(seq, int(bench.clock())) + 1}
    assert bench.bus.closed
    assert fold(tmp_path, BOOT).state is None
    assert fold(tmp_path, BOOT).seq_floor > seq
    for _ in range(40):  # nobody decides: each saves at its own edge, and both edges are the same step
        bench.clock.advance(1.0)
        bench.bus.live()
    assert [rank.lone_saves for rank in bench.ranks] == [1, 1]
    assert bench.disk.newest(2) is not None


def test_the_daemon_after_a_broken_law_starts_anew_and_saves_all(tmp_path):
    """It trusts nothing of the old state, gives higher numbers, and carries the same outage to its end."""
    bench = Bench(tmp_path)
    bench.step()
    bench.outage()
    bench.run(_until(Phase.ON_BATTERY))
    bench.daemon._last_resort(RuntimeError("planted"))
    bench.daemon.end(70)
    bench.start()
    bench.run(_halted, each=bench.discharge)
    bench.settle()

    assert [rank.left_with for rank in bench.ranks] == [75, 75]
    assert bench.disk.newest(2) == bench.ranks[0].step


def test_a_broken_law_on_line_power_ends_without_an_order(tmp_path):
    """On mains a fault of ours disturbs no training."""
    bench = Bench(tmp_path)
    for _ in range(3):
        bench.step()
    bench.inbox.put(Sample(FEED, None, Comm.OK, {"ups.status": "OL CHRG"}))  # type: ignore[arg-type]

    assert bench.daemon.run() == 70
    assert not any(isinstance(message, Prepare) for _, message in bench.bus.sent)


def test_a_broken_bus_ends_nothing(tmp_path):
    """With the bus failing in every call the daemon decides on, and what was lost is sent once it works again."""
    bench = Bench(tmp_path)
    for _ in range(3):
        bench.step()
    bench.bus.broken = True
    bench.outage()
    bench.run(_until(Phase.FLUSHING), each=bench.discharge)
    bench.bus.broken = False
    bench.run(_until(Phase.PARKED), each=bench.discharge)

    assert bench.disk.newest(2) == bench.ranks[0].step


class BrokenSystem(System):
    """Lock and GPUs that fail whenever they are touched."""

    def follow(self, *_: object) -> None:
        raise RuntimeError("GPU is on fire")

    def let_go(self) -> None:
        raise OSError("no lock")


def test_a_broken_surrounding_stops_neither_flush_nor_halt(tmp_path):
    """Shutdown lock and GPUs may fail in any way: it is said, and the node still saves and powers off."""
    bench = Bench(tmp_path)
    bench.parts.system = BrokenSystem()
    blackout(bench)

    assert [rank.left_with for rank in bench.ranks] == [75, 75]
    assert len(bench.way.reasons) == 1


def test_a_dead_reader_is_started_anew(tmp_path):
    """The thread of a UPS may die: within a second there is another one."""
    bench = Bench(tmp_path)
    bench.step()
    bench.readers[0].alive = False
    bench.step()
    bench.step()

    assert len(bench.readers) == 2
    assert bench.readers[1].alive


def test_polls_hurry_on_battery(tmp_path):
    """The UPS is read every 5 s on mains and every 2 s otherwise."""
    bench = Bench(tmp_path)
    bench.step()
    bench.step()
    assert (bench.readers[0].poll_s, bench.readers[0].calm) == (5.0, True)
    bench.outage()
    bench.run(_until(Phase.ON_BATTERY))
    bench.step()
    assert (bench.readers[0].poll_s, bench.readers[0].calm) == (2.0, False)


def test_a_full_disk_stops_neither_flush_nor_halt(tmp_path):
    """With the journal's disk full from the beginning of the outage everything is saved and the node halts."""
    full = [False]

    def write(fd: int, data: bytes) -> int:
        if full[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.write(fd, data)

    bench = Bench(tmp_path, file=File(write, lambda _fd: None))
    bench.step()
    full[0] = True
    blackout(bench)

    assert [rank.left_with for rank in bench.ranks] == [75, 75]
    assert "No space left" in bench.daemon.status().journal_trouble
    assert "journal_failed" in bench.counted


def test_a_stop_on_mains_logs_out_and_tells_ranks_nothing(tmp_path):
    """SIGTERM: LOGIN is given up, ranks train on unaware, exit code 0."""
    bench = Bench(tmp_path)
    for _ in range(3):
        bench.step()
    sent = len(bench.bus.sent)
    bench.inbox.put(Wish("stop"))

    assert bench.daemon.run() == 0
    assert bench.readers[0].closed is True
    assert bench.bus.closed
    assert not [m for _, m in bench.bus.sent[sent:] if type(m).__name__ not in ("Ack", "Welcome")]


def test_while_the_node_goes_down_login_is_kept(tmp_path):
    """SIGTERM after the power-off is not obeyed until halt_s is over: the NUT primary still waits for us."""
    bench = Bench(tmp_path)
    blackout(bench)
    bench.inbox.put(Wish("stop"))
    bench.step()
    for _ in range(43):
        bench.step(1.0)
        assert bench.readers[-1].closed is None
        assert bench.daemon._exit_code is None
    bench.step(5.0)
    assert bench.daemon._exit_code == 0
    bench.daemon.end(0)
    assert bench.readers[-1].closed is False


def test_the_primary_of_this_very_node_isnt_kept_waiting(tmp_path):
    """Where upsmon here halts the node our LOGIN would make it wait for ourselves: given up, while reading goes on."""
    bench = Bench(tmp_path, text=TEXT.replace("[halt]", "user = 'u'\npassword = 'p'\n[halt]"))
    bench.way.logs_out = True
    blackout(bench)
    bench.step()

    assert bench.readers[0].closed is True
    assert bench.readers[-1].alive
    assert {FEED: None} == bench.parts.readers.logins()


def test_when_systemd_shutdown_has_taken_over_a_stop_is_obeyed_at_once(tmp_path):
    """Every service is closed: waiting longer would only cost battery. The login is still not given up."""
    bench = Bench(tmp_path)
    blackout(bench)
    bench.pid1 = "systemd-shutdow"
    bench.inbox.put(Wish("stop"))
    bench.step()

    assert bench.daemon._exit_code == 0
    bench.daemon.end(0)
    assert bench.readers[-1].closed is False


def test_when_the_service_manager_is_gone_a_stop_is_obeyed_at_once(tmp_path):
    """The same, where process 1 is hidden from us."""
    bench = Bench(tmp_path)
    blackout(bench)
    bench.parts.notify.manager_gone = True
    bench.inbox.put(Wish("stop"))
    bench.step()

    assert bench.daemon._exit_code == 0


def test_reload_takes_what_changed_and_refuses_mistakes(tmp_path):
    """A good file is in force at the next decision; of a bad one nothing is, and the daemon goes on."""
    bench = Bench(tmp_path)
    bench.step()
    bench.text = TEXT + "[policy]\npoll_online_s = 3\n"
    bench.inbox.put(Wish("reload"))
    bench.step()
    bench.step()
    assert bench.readers[0].poll_s == 3.0
    bench.text = "nonsense"
    bench.inbox.put(Wish("reload"))
    bench.step()
    assert bench.daemon.config.policy.poll_online_s == 3.0
    bench.text = TEXT.replace(FEED, "other@nut:3493")
    bench.inbox.put(Wish("reload"))
    bench.step()

    assert bench.readers[0].closed is True
    assert len(bench.readers) == 2


def test_the_watchdog_is_fed_by_completed_ticks_alone(tmp_path):
    """A tick that fails feeds nothing: a loop that decides nothing is killed by systemd."""
    address = str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(address)
        listener.settimeout(5)
        bench = Bench(tmp_path / "state")
        bench.parts.notify = Notifier({"NOTIFY_SOCKET": address})
        bench.step()
        assert b"WATCHDOG=1" in listener.recv(4096)
        bench.inbox.put(Sample(FEED, None, Comm.OK, {"ups.status": "OL CHRG"}))  # type: ignore[arg-type]
        assert bench.daemon.run() == 70
        listener.setblocking(False)
        assert not any(b"WATCHDOG" in word for word in _all(listener))
        bench.parts.notify.close()


def _all(listener: socket.socket) -> list[bytes]:
    said = []
    try:
        while True:
            said.append(listener.recv(4096))
    except BlockingIOError:
        return said


class FakeInhibitor:
    """The shutdown lock, without a thread or a bus."""

    def __init__(self, put) -> None:
        self.put, self.held, self.delay_s, self.said = put, False, 300.0, ""

    def start(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False

    def close(self) -> None:
        self.held = False

    def trouble(self) -> str:
        return self.said


class Locked:
    """Makes each life's System, and keeps the inhibitor and the way to shed of the last one."""

    def __init__(self) -> None:
        self.shed: list[str] = []

    def __call__(self, inbox: Inbox) -> System:
        self.lock = FakeInhibitor(inbox.put)
        return System(self.lock, lambda config: Shedder(self if config.gpu_power_pct else None, inbox.put, factor=0.8))

    name = "fake"

    def lower(self) -> str:
        self.shed.append("lower")
        return "lowered"

    def restore(self) -> str:
        self.shed.append("restore")
        return "restored"


def test_a_shutdown_waits_for_the_flush_and_no_longer(tmp_path):
    """logind's word stops the ranks; the lock is held until all are durable, then the shutdown goes on."""
    system = Locked()
    bench = Bench(tmp_path, system=system)
    for _ in range(5):
        bench.step()
    bench.inbox.put(Shutdown(True, 300.0))
    bench.run(_until(Phase.PARKED), each=lambda: _assert(system.lock.held))

    assert not system.lock.held
    assert bench.disk.newest(2) == bench.ranks[0].step
    assert not bench.way.reasons
    for _ in range(60):
        assert bench.step().phase is Phase.PARKED


def _assert(condition: object) -> None:
    assert condition


def test_a_shutdown_that_is_called_off_goes_on_training(tmp_path):
    """PrepareForShutdown(false) gives the ranks back; the operator's own park would have stayed."""
    bench = Bench(tmp_path, system=Locked())
    for _ in range(5):
        bench.step()
    bench.inbox.put(Shutdown(True, 300.0))
    bench.run(_until(Phase.PARKED))
    bench.inbox.put(Shutdown(False, 300.0))

    bench.run(_until(Phase.ONLINE))
    bench.step()
    bench.step()
    assert any(isinstance(message, Resume) for _, message in bench.bus.sent)


def test_a_shutdown_whose_time_is_over_is_let_go(tmp_path):
    """A flush longer than logind's patience: the lock is let go a second before, and the flush goes on."""
    system = Locked()
    bench = Bench(tmp_path, system=system)
    for _ in range(5):
        bench.step()
    bench.inbox.put(Shutdown(True, 2.5))
    bench.step()
    assert system.lock.held
    bench.step()
    bench.step()

    assert not system.lock.held
    assert bench.daemon.state.phase is Phase.FLUSHING


def test_a_daemon_that_restarts_in_a_shutdown_goes_on_with_it(tmp_path):
    """The next one hears of the same shutdown, orders nothing anew, and lets it go when all is durable."""
    system = Locked()
    bench = Bench(tmp_path, system=system)
    for _ in range(5):
        bench.step()
    bench.inbox.put(Shutdown(True, 300.0))
    bench.step()
    bench.restart()
    bench.inbox.put(Shutdown(True, 300.0))
    bench.run(_until(Phase.PARKED))

    assert not system.lock.held
    assert len(bench.ordered(Purpose.STOP)) == 1


def test_a_shutdown_cancelled_while_nobody_listened_is_made_up_for(tmp_path):
    """The journal says that the system goes down, logind says that it doesn't: training goes on."""
    bench = Bench(tmp_path, system=Locked())
    for _ in range(5):
        bench.step()
    bench.inbox.put(Shutdown(True, 300.0))
    bench.run(_until(Phase.PARKED))
    bench.restart()
    bench.inbox.put(Shutdown(False, 300.0))

    bench.run(_until(Phase.ONLINE))


def test_our_own_power_off_doesnt_wait_for_our_own_lock(tmp_path):
    """The lock is let go before the node is told to power off, and isn't taken by a daemon that starts after that."""
    system = Locked()
    bench = Bench(tmp_path, system=system)
    held: list[bool] = []
    bench.way.halt = lambda reason: held.append(system.lock.held) or bench.way.reasons.append(reason) or "halted"
    blackout(bench)

    assert held == [False]
    bench.inbox.put(Shutdown(True, 300.0))
    bench.step()
    assert not system.lock.held


def test_gpus_run_at_less_power_while_on_battery(tmp_path):
    """Lowered with the outage, told to the estimator, restored with the mains; parked by the operator it stays."""
    system = Locked()
    bench = Bench(tmp_path, text=TEXT + "[shed]\ngpu_power_pct = 60\n", system=system)
    bench.step()
    bench.inbox.put(Command("park", "me"))
    bench.run(_until(Phase.PARKED))
    bench.inbox.put(Command("resume", "me"))
    bench.run(_until(Phase.ONLINE))
    _wait(lambda: system.shed == ["restore"])
    bench.outage()
    bench.step()
    _wait(lambda: bench.daemon.status().gpus_lowered)
    for _ in range(4):
        bench.step()
    draw = bench.daemon.state.feeds[FEED].runway.draw
    assert draw is not None
    assert 0.8 == draw.carry_factor
    bench.mains()
    bench.run(_until(Phase.ONLINE))
    _wait(lambda: system.shed == ["restore", "lower", "restore"])
    bench.daemon.end(0)


def test_troubles_of_the_system_are_told_once(tmp_path):
    """A lock that isn't held, a logind that waits too short for a flush: said, counted, shown, and said when over."""
    system = Locked()
    bench = Bench(tmp_path, system=system)
    for _ in range(5):
        bench.step()
    system.lock.said = "logind is gone"
    bench.step()
    assert "shutdown lock: logind is gone" in bench.daemon.status().troubles
    system.lock.said, system.lock.delay_s = "", 5.0
    bench.step()
    bench.step()

    troubles = " ".join(bench.daemon.status().troubles)
    assert "waits 5 s for training" in troubles
    assert "logind is gone" not in troubles
    assert ["shutdown_lock_failed", "shutdown_delay_short"] == [c for c in bench.counted if c.startswith("shutdown")]


def whole_discharge(bench: Bench) -> None:
    """A battery of 48 V that gives half of the 900 s promised, down to the knee, and then mains for over a minute."""
    bench.variables |= {"battery.voltage": "54.0", "battery.voltage.nominal": "48", "battery.type": "PbAc"}
    for _ in range(5):
        bench.step()
    bench.outage()
    for second in range(450):
        left = 1.0 - second / 450
        bench.variables |= {
            "battery.charge": f"{100 * left:.0f}",
            "battery.runtime": f"{max(10.0, 450 * left):.0f}",
            "battery.voltage": f"{49.0 - 2.0 * (1 - left) - (4.6 if left < 0.05 else 0.0):.1f}",
        }
        bench.step()
    bench.mains()
    bench.variables["battery.voltage"] = "54.0"
    for _ in range(90):
        bench.step()


def test_a_whole_discharge_teaches_and_the_next_daemon_knows_it(tmp_path):
    """Journalled with promise and outcome, in force at once and after a restart, and taught only once."""
    bench = Bench(tmp_path, real=False)
    before = bench.daemon.config.policy.feeds[0]
    whole_discharge(bench)
    assert bench.daemon.state.phase is Phase.ONLINE
    learned = bench.daemon.config.policy.feeds[0]
    bench.restart()
    for _ in range(90):
        bench.step()
    bench.journal.close()
    (path,) = tmp_path.glob("journal-*")
    (note,) = [record for record in read(path).records if isinstance(record, Learnt)]

    assert before.learned_phi is None
    assert "measured" == note.lesson.what
    assert note.lesson.discharge.promised_s is not None
    assert note.lesson.discharge.bound_s is not None
    assert note.lesson.discharge.lasted_s == pytest.approx(450, abs=5)
    assert 0.4 < learned.learned_phi < 0.7
    assert bench.daemon.config.policy.feeds[0].learned_phi == learned.learned_phi
    assert 1 == bench.daemon.batteries().outages


def test_a_replaced_battery_begins_anew_in_the_running_daemon(tmp_path):
    """The operator's word is in force at the next decision, and after a restart; a reload doesn't undo it."""
    bench = Bench(tmp_path, real=False)
    whole_discharge(bench)
    assert bench.daemon.config.policy.feeds[0].learned_phi is not None
    bench.daemon.battery_replaced(FEED, date(2024, 10, 1))
    bench.step()
    for again in (lambda: None, lambda: bench.inbox.put(Wish("reload")), bench.restart):
        again()
        bench.step()
        feed = bench.daemon.config.policy.feeds[0]
        assert (None, "2024-10-01") == (feed.learned_phi, feed.battery_installed)
        assert feed.age_y == pytest.approx(0.01, abs=0.011)


def test_what_was_learned_waits_for_line_power(tmp_path):
    """In mid-outage the rules stay as they are, whatever is learned."""
    bench = Bench(tmp_path)
    bench.step()
    bench.outage()
    bench.step()
    bench.daemon.battery_replaced(FEED, date(2024, 10, 1))
    for _ in range(5):
        bench.step()
    assert "" == bench.daemon.config.policy.feeds[0].battery_installed
    bench.mains()
    bench.run(_until(Phase.ONLINE))
    bench.step()
    assert "2024-10-01" == bench.daemon.config.policy.feeds[0].battery_installed


def test_a_halt_teaches_that_the_outage_lasted_at_least_so_long(tmp_path):
    """Its end isn't seen, so it counts as a long one; in a dry run the mains' return counts it, once."""
    bench = Bench(tmp_path / "real")
    blackout(bench)
    bench.step()
    assert 1 == bench.daemon.batteries().outages
    dry = Bench(tmp_path / "dry", real=False)
    blackout(dry)
    dry.step()
    assert 0 == dry.daemon.batteries().outages
    dry.mains()
    dry.run(_until(Phase.ONLINE))
    assert 1 == dry.daemon.batteries().outages


def test_orders_of_the_operator_are_answered(tmp_path):
    """A command is decided at the next tick, and its answer is there for who asked."""
    bench = Bench(tmp_path)
    for _ in range(3):
        bench.step()
    bench.inbox.put(Command("flush", "me"))
    bench.step()
    reply = bench.daemon.replies.get(timeout=1)
    assert not reply.facts["refused"]
    bench.inbox.put(Command("resume", "me"))
    bench.step()
    assert bench.daemon.replies.get(timeout=1).facts["refused"]


def test_status_shows_how_far_ranks_are_now(tmp_path):
    """On line power decisions are seconds apart; who asks in between sees the pages as they are, and moves nothing."""
    bench = Bench(tmp_path)
    for _ in range(4):
        bench.step()
    before = bench.daemon.state
    for _ in range(40):
        bench.clock.advance(0.2)
        bench.bus.live()
    bench.ranks[1].alive = False
    first, second = bench.daemon.status().jobs[0].ranks

    assert (first.step, first.alive) == (bench.ranks[0].step, True)
    assert first.step > before.jobs["job"].members[0].step + 3
    assert second.alive is False
    assert bench.daemon.state is before


def test_status_is_json_without_instants_or_secrets(tmp_path):
    """The document survives JSON, shows ages instead of instants, and holds no password."""
    bench = Bench(tmp_path, text=TEXT.replace("[halt]", "user = 'u'\npassword = 'hunter2'\n[halt]"))
    for _ in range(4):
        bench.step()
    raw = msgspec.json.encode(bench.daemon.status())
    shown = json.loads(raw)

    assert b"hunter2" not in raw
    assert shown["jobs"][0]["ranks"][1]["alive"] is True
    assert shown["feeds"][0]["login_held"] is True
    assert 0 <= shown["feeds"][0]["fresh_s"] < 2

"""Builds the daemon from its configuration file and runs it."""

from __future__ import annotations

import itertools
import signal
from pathlib import Path

import msgspec
import structlog

from powerguard import __version__
from powerguard import config as configuration
from powerguard.config import Config, ShedConfig, UpsConfig
from powerguard.core.commands import DRILL
from powerguard.core.types import Command
from powerguard.errors import PowerguardError, UsageError
from powerguard.journal import Folded, Journal, fold
from powerguard.node import alone, clock, halt_ways, logs, memory, shed, tls
from powerguard.node.ask import CONTROL_SOCKET, Answer, Ask, Control
from powerguard.node.batteries import put_in, replaced_words, which
from powerguard.node.bus import RANKS_SOCKET, Bus
from powerguard.node.daemon import Daemon
from powerguard.node.halt_ways import HALT_FILE, Way
from powerguard.node.inbox import Inbox, Wish
from powerguard.node.inhibit import Inhibitor
from powerguard.node.learned import LEARNED_FILE, Learned
from powerguard.node.lines import opened as lines_opened
from powerguard.node.metrics import Metrics
from powerguard.node.parts import Parts
from powerguard.node.poweroff import Poweroff
from powerguard.node.readers import Readers
from powerguard.node.sd_notify import Notifier
from powerguard.node.shed import Shedder
from powerguard.node.system import System
from powerguard.node.tell import Teller
from powerguard.node.ups import UpsReader
from powerguard.node.ups_line import UpsAddress
from powerguard.node.voice import ORDERS
from powerguard.node.wake import remembered

REPLY_S = 3.0
"""An operator's order is decided at the next tick; longer than this means that the loop is stuck."""

log = structlog.get_logger()


def serve(path: Path, *, really: bool, json_logs: bool) -> int:
    """Runs the daemon until it is told to stop; its exit code.

    Raises ConfigError, or DirectoryError where its sockets can't be made or another daemon has them, or its state_dir.
    """
    config = _load(path, json_logs=json_logs)
    alone.hold(config.node.state_dir)
    boot, now = clock.boot_id(), clock.now()
    folded = _remembered(config, boot)
    state = remembered(folded, boot, config.node.name, now)
    inbox = Inbox()
    service = _Service(inbox)
    control = Control(Path(config.node.run_dir) / CONTROL_SOCKET, serve=service.answer, group=config.node.socket_group)
    bus = Bus(
        Path(config.node.run_dir) / RANKS_SOCKET,
        put=inbox.put,
        clock=clock.now,
        group=config.node.socket_group,
        control=control,
    )
    lines = lines_opened(config, put=inbox.put, clock=clock.now)
    state = msgspec.structs.replace(state, addresses=lines.addresses)
    turns = itertools.count()
    parts = Parts(
        clock=clock.now,
        inbox=inbox,
        readers=Readers(lambda ups, poll_s: _reader(ups, poll_s, inbox, next(turns)), clock.now),
        bus=bus,
        journal=Journal(config.node.state_dir, boot=boot, node=config.node.name, version=__version__, folded=folded),
        notify=Notifier(),
        teller=Teller(config.notify.command, config.node.name),
        power=Poweroff(_way(config, really=really), inbox.put),
        reload=lambda: _load(path, json_logs=json_logs),
        way=lambda new: _way(new, really=really),
        system=System(_inhibitor(config, inbox, really=really), lambda shed: _shedder(shed, boot, inbox)),
        learned=Learned(Path(config.node.state_dir) / LEARNED_FILE, boot=boot),
        lines=lines,
    )
    daemon = service.daemon = Daemon(config, state, parts, halt_done=folded.halt_done)
    metrics = _metrics(config, daemon)
    if metrics is not None:
        parts.count = metrics.count
    if state.halted_at is None:  # a word of an earlier halt isn't one of this one
        Path(config.node.run_dir, HALT_FILE).unlink(missing_ok=True)
    _prepare(config, inbox, parts.power.way, really=really)
    try:
        return daemon.run()
    finally:
        if metrics is not None:
            metrics.close()


class _Service:
    """Answers the control socket, on its thread."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self.daemon: Daemon | None = None

    def answer(self, question: Ask) -> Answer:
        """The status, or what became of an order. One question at a time."""
        daemon = self.daemon
        if daemon is None:
            return Answer(False, "the daemon is starting, ask again")
        if question.verb == "status":
            return Answer(True, data=msgspec.to_builtins(daemon.status()))
        if question.verb == "batteries":
            return Answer(True, data=msgspec.to_builtins(daemon.batteries()))
        if question.verb == "battery-replaced":
            return _battery_replaced(daemon, question)
        if question.verb not in ORDERS:
            return Answer(False, f"{question.verb[:40]!r} isn't an order; known are {', '.join(ORDERS)}")
        while not daemon.replies.empty():  # of an order whose asker had gone
            daemon.replies.get_nowait()
        log.info("order", verb=question.verb, by=question.by, always=True)
        within_s = max(0.0, question.for_s) if question.verb == DRILL else None
        self._inbox.put(Command(question.verb, question.by, within_s, question.job))
        try:
            reply = daemon.replies.get(timeout=REPLY_S)
        except Exception:
            return Answer(False, f"{question.verb}: not decided within {REPLY_S:g} s; see the log")
        return Answer(not reply.facts.get("refused"), reply.text)


def _battery_replaced(daemon: Daemon, question: Ask) -> Answer:
    try:
        feed = which([ups.name for ups in daemon.config.ups], question.ups)
        day = put_in(question.day)
    except UsageError as err:
        return Answer(False, str(err))
    log.info("battery replaced", ups=feed, day=day.isoformat(), by=question.by, always=True)
    daemon.battery_replaced(feed, day)
    return Answer(True, replaced_words(feed, day))


def _load(path: Path, *, json_logs: bool) -> Config:
    config = configuration.load(path)
    as_json = json_logs or config.log.format == "json" or (config.log.format == "auto" and logs.under_systemd())
    logs.set_up(level=config.log.level, json=as_json)
    return config


def _remembered(config: Config, boot: str) -> Folded:
    """What the last daemon of this boot left; nothing if it can't be understood, which is said."""
    try:
        return fold(config.node.state_dir, boot)
    except Exception as err:  # a journal of another version, say: better no memory than no daemon
        log.error("the journal can't be understood, starting anew", why=f"{type(err).__name__}: {err}")
        return Folded()


def _reader(ups: UpsConfig, poll_s: float, inbox: Inbox, turn: int) -> UpsReader:
    return UpsReader(
        UpsAddress.parse(ups.name),
        inbox.put,
        clock.now,
        feed=ups.name,
        user=ups.user or None,
        password=ups.password.reveal() or None,
        tls=tls.context(ups),
        poll_s=poll_s,
        answer_s=min(2.0, ups.answer_max_s),
        poll_max_s=ups.answer_max_s,
        turn=turn,
    )


def _way(config: Config, *, really: bool) -> Way:
    return halt_ways.choose(
        config.halt.method, config.halt.command, really=really, run_dir=config.node.run_dir, feeds=config.ups
    )


def _inhibitor(config: Config, inbox: Inbox, *, really: bool) -> Inhibitor | None:
    return Inhibitor(inbox.put) if really and config.halt.delay_shutdown else None


def _shedder(config: ShedConfig, boot: str, inbox: Inbox) -> Shedder:
    pct = config.gpu_power_pct
    return Shedder(shed.choose(pct, config.method, boot), inbox.put, factor=shed.expected(pct) if pct else 1.0)


def _metrics(config: Config, daemon: Daemon) -> Metrics | None:
    """The endpoint, if one is wanted; that it can't be had is no reason not to watch."""
    if not config.metrics.listen:
        return None
    try:
        return Metrics(*config.metrics.address, daemon.status)
    except PowerguardError as err:
        log.error("no metrics", why=str(err))
        return None


def _prepare(config: Config, inbox: Inbox, way: Way, *, really: bool) -> None:
    """What is needed in the dark is proven now, and said if it isn't there."""
    signal.signal(signal.SIGTERM, lambda *_: inbox.put(Wish("stop")))
    signal.signal(signal.SIGINT, lambda *_: inbox.put(Wish("stop")))
    signal.signal(signal.SIGHUP, lambda *_: inbox.put(Wish("reload")))
    why = memory.lock()
    if why and logs.under_systemd():
        log.warning("memory isn't locked", why=why)
    if not way.real:
        wanted = config.halt.method
        log.warning("dry run: this node will not be powered off", method=wanted, really=really)
        return
    try:
        log.info("halt is possible", how=way.prove())
    except PowerguardError as err:
        log.error("halt is not possible now", why=err.message, todo=err.todo)

"""The loop: gather, decide, check, journal, act, feed the watchdog. Nothing but this loop decides or acts.

Collaborators are given; everything that comes in does so through the inbox. What may break without ending the loop:
a UPS reader, the bus, the journal's disk, the notify program, the metrics endpoint. What ends it: a decision that
breaks a law, which is powerguard's own fault: ranks are told to save by themselves, and systemd starts it anew.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from datetime import date

import structlog
from msgspec.structs import replace

from powerguard import __version__
from powerguard.config import Config
from powerguard.core import lawful
from powerguard.core.agree import absorb
from powerguard.core.commands import DRY_RUN
from powerguard.core.decide import decide
from powerguard.core.messages import Hello, Welcome
from powerguard.core.poll import look_s, poll_wait
from powerguard.core.state import Decision, State
from powerguard.core.types import Actions, Announce, Command, Halt, Observation, PageReport, Phase, Send
from powerguard.errors import InvariantError
from powerguard.node.batteries import Batteries, about
from powerguard.node.change import reloaded
from powerguard.node.inbox import Taken, Wish
from powerguard.node.leave import going_down, last_resort, may_leave
from powerguard.node.lessons import calm, learnt
from powerguard.node.parts import Parts
from powerguard.node.poweroff import Result
from powerguard.node.status import Shell, Status, describe
from powerguard.node.voice import Voice
from powerguard.node.wake import awake

GREET_S = 1.0
"""A rank that doesn't register anew is asked again after this long."""

STANDSTILL_S = 5.0
"""More than this over what was to be waited: stopped, frozen with its virtual machine, or suspended."""
ASK_AGAIN_S = 2.5
"""A poll and its answer."""

log = structlog.get_logger()


class Daemon:
    """One node's daemon, from *state* on; *halt_done*: a halt of this boot was carried out already."""

    def __init__(self, config: Config, state: State, parts: Parts, *, halt_done: bool = False) -> None:
        self.config, self.state, self._parts, self._halt_done = parts.learned.applied(config), state, parts, halt_done
        self.reason = ""
        self._started_at = parts.clock()
        self._stopping = False
        self._voice = Voice(parts.teller, lambda event: parts.count(event))  # noqa: PLW0108  (it is given later)
        self._strangers = {(name, rank): 0.0 for name, job in state.jobs.items() for rank in job.members}
        self.replies = self._voice.replies  # to the operator's commands
        self._exit_code: int | None = None
        self._ticked_at = self._started_at

    def run(self) -> int:
        """Until it is asked to stop; the exit code."""
        self.begin()
        while self._exit_code is None:
            try:
                self.tick()
            except Exception as err:  # a fault of ours, whatever its kind: never go on with a state known to be wrong
                self._last_resort(err)
        return self.end(self._exit_code)

    # ---- life --------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Opens the journal, starts the readers, and goes on with a halt that was ordered before a crash."""
        parts = self._parts
        self.state = state = awake(self.state, parts.clock())
        parts.journal.begin(parts.clock(), self.config.policy, state)
        parts.readers.apply(self.config.ups)
        parts.system.begin(self.config, state)
        if state.phase is not Phase.ONLINE:
            log.warning("going on where the last daemon was", phase=state.phase.value, event_id=state.event)
        if state.halted_at is not None and not state.view.dry:
            parts.power.halt(state.view.why, done=self._halt_done)
        parts.notify.ready(f"watching {len(self.config.ups)} UPS")
        log.info(
            "started",
            node=state.node,
            version=__version__,
            feeds=[ups.name for ups in self.config.ups],
            halt=parts.power.way.name,
            journal=parts.journal.path,
        )

    def end(self, code: int) -> int:
        """Leaves: ranks are told nothing and train on; LOGIN is given up unless the node goes down."""
        parts = self._parts
        going_down = self._going_down
        parts.notify.stopping("the node goes down" if going_down else "stopped")
        log.info("stopped", code=code, phase=self.state.phase.value, login_kept=going_down)
        parts.power.close()
        parts.system.close(going_down=going_down)
        parts.readers.close(logout=not going_down)
        parts.lines.close()
        parts.bus.close()
        parts.journal.close()
        parts.learned.close()
        parts.teller.close()
        return code

    @property
    def _going_down(self) -> bool:
        return going_down(self.state, real=self._parts.power.way.real)

    def _may_leave(self, now: float) -> bool:
        parts = self._parts
        return may_leave(
            self.config.policy,
            self.state,
            real=parts.power.way.real,
            pid1=parts.pid1,
            manager_gone=parts.notify.manager_gone,
            now=now,
        )

    # ---- one turn ----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Gather, decide, check, journal, act, feed the watchdog."""
        parts = self._parts
        taken = self._taken()
        commands = [command for result in taken.results for command in self._halted(result)]
        commands += parts.system.commands(taken.shutdowns, self.state)
        for wish in taken.wishes:
            self._wish(wish)
        now = self._ticked_at = parts.clock()
        seen = replace(
            taken.seen,
            pages=(*taken.seen.pages, *self._pages(now)),
            commands=(*taken.seen.commands, *commands),
            here=parts.lines.here(),
        )
        decision = self._decide(seen, now)
        before, self.state, self.reason = self.state, decision.state, decision.reason
        self._note(now, before, seen, decision)
        for action in decision.actions:
            self._act(action)
        self._guarded("speaking with other nodes", lambda: parts.lines.say(self.config.policy, self.state, now))
        self._greet(seen, now)
        if decision.state.phase is not before.phase:
            parts.count(f"phase_{decision.state.phase.value}")
        self._guarded("learning", lambda: self._learn(before, now))
        self._guarded("looking after the shell", lambda: self._care(now))
        if self._stopping and self._may_leave(now):
            self._exit_code = 0
        parts.notify.watchdog(f"{decision.state.phase.value}: {decision.reason}")

    def _taken(self) -> Taken:
        """What has come in. After a standstill of this process, or of the node, the UPS is to be heard first: nobody
        asked it meanwhile, and that is no silence of its own."""
        look, wait_s = look_s(self.config.policy), self._wait_s()
        taken = self._parts.inbox.drain(wait_s, look)
        stood_still = self._parts.clock() - self._ticked_at > wait_s + STANDSTILL_S
        if stood_still and self.state.phase is not Phase.ONLINE and not taken.seen.samples:
            taken = taken.and_then(self._parts.inbox.drain(ASK_AGAIN_S, look))
        return taken

    def _wait_s(self) -> float:
        now = self._parts.clock()
        wait_s = min(poll_wait(self.config.policy, self.state, now), self._parts.lines.wait_s(self.state, now))
        watchdog_s = self._parts.notify.watchdog_s
        wait_s = min(wait_s, 0.2) if self._stopping else wait_s
        return wait_s if watchdog_s is None else min(wait_s, watchdog_s / 2)

    def _decide(self, seen: Observation, now: float) -> Decision:
        """A lawful decision."""
        decision = decide(self.config.policy, self.state, seen, now)
        lawful.check(self.config.policy, self.state, decision, now)
        return decision

    def _note(self, now: float, before: State, seen: Observation, decision: Decision) -> None:
        """Journals before anything is done. What fails here costs the memory of a restart, never the act."""
        try:
            self._parts.journal.tick(
                now, before, seen, decision.state, actions=decision.actions, reason=decision.reason
            )
        except Exception as err:
            log.error("journal refused a record", why=f"{type(err).__name__}: {err}")

    def _last_resort(self, err: Exception) -> None:
        """On battery every rank is asked to hold and, hearing nothing more, to save by itself; then the daemon ends."""
        self._exit_code = InvariantError.exit_code
        now = self._parts.clock()
        why = str(err) if isinstance(err, InvariantError) else f"{type(err).__name__}: {err}"
        log.error("a law was broken, ending", why=why, phase=self.state.phase.value, exc_info=err)
        seq, orders = last_resort(self.config.policy, self.state, now)
        with contextlib.suppress(Exception):
            self._parts.journal.fault(now, seq, why)
            self._parts.count("fault")
        for order in orders:
            self._send(order)

    # ---- acting ------------------------------------------------------------------------------------

    def _act(self, action: Actions) -> None:
        if isinstance(action, Send):
            self._send(action)
        elif isinstance(action, Announce):
            self._voice.announce(action)
        elif isinstance(action, Halt):
            log.warning("powering off", why=action.reason, method=self._parts.power.way.name, always=True)
            self._parts.count("halt")
            if self._parts.power.way.real:
                self._guarded("giving up the shutdown lock", self._parts.system.let_go)  # or logind waits for us
            self._parts.power.halt(action.reason)

    def _guarded(self, what: str, deed: Callable[[], object]) -> None:
        """Does what isn't deciding or acting: its faults are said, and end nothing."""
        try:
            deed()
        except Exception as err:
            log.error("failed", what=what, why=f"{type(err).__name__}: {err}", exc_info=err)

    def _send(self, send: Send) -> None:
        try:
            self._parts.bus.send(send.job, send.rank, send.message)
        except Exception as err:  # what isn't acknowledged is sent again by the next decisions
            log.error("bus can't send", why=str(err), job=send.job, rank=send.rank)

    def _greet(self, seen: Observation, now: float) -> None:
        """Ranks that are known from before a restart register anew: the bus must know their process and their page."""
        for report in seen.reports if self._strangers else ():
            key = (report.job, report.rank)
            if isinstance(report.message, Hello):
                self._strangers.pop(key, None)
            elif now - self._strangers.get(key, now) >= GREET_S:
                self._strangers[key] = now
                state = self.state
                self._send(Send(*key, Welcome(state.node, state.phase.value, state.seq, hello=True)))

    def _halted(self, result: Result) -> tuple[Command, ...]:
        """What became of an attempt to halt; a dry run is told to the core, which then waits for mains."""
        self._parts.journal.done(self._parts.clock(), result.text, done=result.done, real=result.real)
        if not result.done:
            log.error("the node can't be powered off, trying again", why=result.text)
            return ()
        log.warning(result.text, always=True)
        if result.real:
            if self._parts.power.way.logs_out:
                self._parts.readers.log_out()
            return ()
        self._parts.power.again()
        return (Command(DRY_RUN, "daemon"),)

    def _pages(self, now: float) -> tuple[PageReport, ...]:
        try:
            return self._parts.bus.pages(now)
        except Exception as err:
            log.error("bus can't read pages", why=str(err))
            return ()

    def _care(self, now: float) -> None:
        """What isn't deciding: poll rates, threads that ended, the system around us, what is in trouble."""
        parts, state, policy = self._parts, self.state, self.config.policy
        at_ease = calm(state)
        parts.readers.poll(policy.poll_online_s if at_ease else policy.poll_battery_s, calm=at_ease)
        parts.readers.care()
        parts.system.follow(state, now)
        for what, care in (("bus", parts.bus.care), ("line to other nodes", parts.lines.care)):
            try:
                trouble = care()
            except Exception as err:
                trouble = str(err)
            if trouble:
                log.error(f"{what} is in trouble", why=trouble)
        own = {"journal": parts.journal.trouble, "learned": parts.learned.trouble, "peers": parts.lines.trouble(state)}
        self._voice.troubles({**own, **parts.system.troubles(policy, state)})

    def _learn(self, before: State, now: float) -> None:
        self.config = learnt(self._parts, self.config, before, self.state, now=now, announce=self._voice.announce)

    def battery_replaced(self, feed: str, day: date) -> None:
        """The operator's word, on their thread; in force from the next decision on line power on."""
        self._parts.learned.replaced(feed, day)
        self._parts.inbox.put(Wish())

    def batteries(self) -> Batteries:
        """What is known of each battery, on the thread of whoever asks."""
        return about(self._parts.learned)

    def status(self) -> Status:
        """What is told to whoever asks, on their thread; how far ranks are is looked at anew, and decides nothing."""
        parts, state, now = self._parts, self.state, self._parts.clock()
        jobs, _ = absorb(self.config.policy, state.jobs, (), self._pages(now), now)
        shell = Shell(
            version=__version__,
            pid=os.getpid(),
            started_at=self._started_at,
            halt=parts.power.way.name,
            journal=parts.journal.path,
            journal_trouble=parts.journal.trouble,
            reason=self.reason,
            logins=parts.readers.logins(),
            login_problems=parts.readers.problems(),
            troubles=self._voice.standing,
            lock_held=parts.system.lock_held,
            shutdown_delay_s=parts.system.delay_s,
            gpus_lowered=parts.system.gpus_lowered,
            peers_heard_at=parts.lines.heard_at,
        )
        return describe(self.config, replace(state, jobs=jobs), shell, now)

    # ---- wishes ------------------------------------------------------------------------------------

    def _wish(self, what: str) -> None:
        if what == "stop" and not self._stopping:
            self._stopping = True
            if not self._may_leave(self._parts.clock()):
                log.warning("asked to stop while the node goes down: staying logged in to the UPS", always=True)
        elif what == "reload":
            self.config = reloaded(self._parts, self.config, self.reason)

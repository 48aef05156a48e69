"""What the daemon keeps of the system around it: logind's shutdown lock and the GPUs' power, both by the phase."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import structlog

from powerguard.config import Config, ShedConfig
from powerguard.core.commands import CANCELLED, SHUTDOWN
from powerguard.core.job import not_durable
from powerguard.core.policy import Policy
from powerguard.core.state import State
from powerguard.core.types import Command, Phase
from powerguard.node.inhibit import Inhibitor, Shutdown, too_short
from powerguard.node.shed import Shedder

LAST_S = 1.0
"""A flush that isn't done so long before logind's patience ends is said not to be."""

log = structlog.get_logger()


class System:
    """For the loop's thread alone. *inhibitor*: None where shutdowns don't wait for training."""

    def __init__(
        self,
        inhibitor: Inhibitor | None = None,
        shedder: Callable[[ShedConfig], Shedder] = lambda _: Shedder(None, lambda _: None),
    ) -> None:
        self._inhibitor, self._make = inhibitor, shedder
        self._shed_config = ShedConfig()
        self._shedder = shedder(self._shed_config)
        self._waiting = False  # a shutdown waits for our lock

    def begin(self, config: Config, state: State) -> None:
        """Takes the lock, unless *state* is that of a node that was told to power off."""
        self.apply(config)
        if self._inhibitor is not None:
            if state.halted_at is not None and not state.view.dry:
                self._inhibitor.release()
            self._inhibitor.start()

    def apply(self, config: Config) -> None:
        """Sheds by *config* from now on."""
        if config.shed != self._shed_config:
            self._shedder.close(restore=True)
            self._shed_config, self._shedder = config.shed, self._make(config.shed)

    def commands(self, heard: Iterable[Shutdown], state: State) -> tuple[Command, ...]:
        """What logind's words mean for the core, if it doesn't know already."""
        found: list[Command] = []
        leaving = state.view.leave_at is not None
        for word in heard:
            self._waiting = word.begins
            if word.begins and not leaving and state.phase is not Phase.HALTING:
                log.warning("the system is shutting down", waits_s=word.within_s, always=True)
                found.append(Command(SHUTDOWN, "logind", word.within_s))
            elif not word.begins and leaving:
                log.warning("the shutdown was cancelled", always=True)
                found.append(Command(CANCELLED, "logind"))
            leaving = word.begins
        return tuple(found)

    def follow(self, state: State, now: float) -> None:
        """After each decision: GPUs by the phase, and the shutdown goes on once nothing is left to wait for."""
        if state.phase is not Phase.HALTING:
            self._shedder.want(state.phase is not Phase.ONLINE and state.view.event_at is not None)
        if not self._waiting:
            return
        leave_at = state.view.leave_at
        if state.phase is Phase.HALTING:
            self.let_go()
        elif state.phase is Phase.PARKED:
            self._left(state, "the shutdown goes on")
        elif state.phase is Phase.FLUSHING and leave_at is not None and now >= leave_at - LAST_S:
            self._left(state, "the shutdown waits no longer")

    def let_go(self) -> None:
        """No shutdown waits for us any more."""
        self._waiting = False
        if self._inhibitor is not None:
            self._inhibitor.release()

    def troubles(self, policy: Policy, state: State) -> dict[str, str]:
        """What somebody should look at, by its subject; "" = nothing."""
        lock = self._inhibitor
        short = "" if lock is None or lock.trouble() else too_short(lock.delay_s, state.need.save_s, policy.margin_s)
        return {
            "shutdown lock": lock.trouble() if lock else "",
            "shutdown delay": short,
            "gpus": self._shedder.trouble(),
        }

    @property
    def lock_held(self) -> bool | None:
        """Whether a shutdown would wait for training; None = it isn't asked to."""
        return None if self._inhibitor is None else self._inhibitor.held

    @property
    def delay_s(self) -> float | None:
        """How long it would."""
        return None if self._inhibitor is None else self._inhibitor.delay_s

    @property
    def gpus_lowered(self) -> bool | None:
        """Whether the GPUs run at less power; None = they are left alone."""
        return self._shedder.lowered if self._shed_config.gpu_power_pct else None

    def close(self, *, going_down: bool) -> None:
        """Ends: the lock is given up, and GPUs get their power back unless the node goes down."""
        self._shedder.close(restore=not going_down)
        if self._inhibitor is not None:
            self._inhibitor.close()

    def _left(self, state: State, text: str) -> None:
        self.let_go()
        lost = {name: list(not_durable(job)) for name, job in state.jobs.items() if job.alive and not_durable(job)}
        if lost:
            log.error(text, always=True, not_durable=lost)
        else:
            log.warning(text, always=True, jobs=sum(job.alive for job in state.jobs.values()))

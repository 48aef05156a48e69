"""One run on a rig: mains are taken away, what the UPS says is recorded, and mains come back, whatever happens.

The node under test runs powerguard as it always does; the bench only switches and watches, and should run on a machine
that doesn't hang on that UPS.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from msgspec import Struct

from hil.outlets.what import OutletFailed
from hil.recording import Recording
from hil.rig import Rig
from powerguard.core.status import parse
from powerguard.core.types import Comm, Reading, Sample
from powerguard.errors import UpsError, UpsNotReady, UsageError
from powerguard.node.ups_client import CheckedClient
from powerguard.node.ups_exchange import NutError

RESTORE_TRIES = 3


class Result(Struct, frozen=True):
    """What a run saw. Seconds; None for what didn't happen."""

    recording: Path
    ended_by: str  # why mains came back
    edge_s: float | None  # from the cut until the UPS said OB
    dark_s: float
    back_s: float | None  # from the switch until the UPS said OL
    charge_pct: float | None  # when mains came back

    def __str__(self) -> str:
        def s(value: float | None) -> str:
            return "never" if value is None else f"after {value:.1f} s"

        charge = "unknown" if self.charge_pct is None else f"{self.charge_pct:.0f} %"
        return (
            f"on battery {s(self.edge_s)}, dark for {self.dark_s:.0f} s until {self.ended_by}, charge {charge}; "
            f"on line again {s(self.back_s)}; recorded in {self.recording}"
        )


class Bench:
    """*ask* puts a question to the person who is present and returns the answer; *say* tells them something."""

    def __init__(self, rig: Rig, folder: Path, ask: Callable[[str], str], say: Callable[[str], None]) -> None:
        self.rig, self._folder, self._ask, self._say = rig, folder, ask, say
        self._client: CheckedClient | None = None
        self._seen_at = time.monotonic()

    # ---- one outlet --------------------------------------------------------------------------------

    def switch(self, name: str, on: bool) -> None:
        """One outlet, by hand. UsageError for one that isn't in the rig, or if the person doesn't agree."""
        outlet = self.rig.named(name)
        self._say(f"{name} feeds {outlet.feeds}; it goes {'on' if on else 'off'}.")
        self._agree(name)
        outlet.switch(on)
        self._say(f"{name} is {'on' if on else 'off'}")

    def _agree(self, word: str) -> None:
        if self._ask(f"Nobody may be surprised by this. To go on, type: {word}") != word:
            raise UsageError("not agreed; nothing was switched", todo=f"type {word} to agree")

    # ---- an outage ---------------------------------------------------------------------------------

    def run(self) -> Result:
        """The outage of the plan. Raises UpsError before anything is switched, OutletFailed if it can't be.

        Mains are switched on again before it returns or raises, however it ends.
        """
        rig, plan = self.rig, self.rig.plan
        mains = rig.named(rig.mains)
        reading = self._look()
        self._fit(reading)
        self._say(
            f"{rig.name}: {rig.what}. {rig.mains} feeds {mains.feeds}; it goes off for at most {plan.dark_s:.0f} s, "
            f"until the charge is below {plan.charge_min_pct:.0f} %, or {rig.ups} can't be read for "
            f"{plan.blind_s:.0f} s."
        )
        self._agree(rig.name)
        record = Recording(self._folder, rig.name)
        try:
            return self._outage(record)
        finally:
            record.close()
            if self._client is not None:
                self._client.close()

    def _fit(self, reading: Reading) -> None:
        plan = self.rig.plan
        if reading.on_battery is not False:
            raise UpsNotReady(f"{self.rig.ups} isn't on line power", todo="begin on mains")
        if reading.charge_pct is not None and reading.charge_pct <= plan.charge_min_pct:
            raise UpsNotReady(
                f"{self.rig.ups} has {reading.charge_pct:.0f} %, the plan ends at {plan.charge_min_pct:.0f} %",
                todo="let it charge",
            )

    def _outage(self, record: Recording) -> Result:
        plan, mains = self.rig.plan, self.rig.named(self.rig.mains)
        self._watch(record, plan.before_s, lambda _reading: "")
        record.note(f"{mains.name} goes off")
        cut_at = time.monotonic()
        edge: list[float] = []
        last: list[Reading] = []
        try:
            mains.switch(False)
            ended_by = self._watch(record, plan.dark_s, lambda reading: self._dark(reading, cut_at, edge, last))
        finally:
            self._restore(record)
        back_at = time.monotonic()
        back: list[float] = []
        self._watch(record, plan.after_s, lambda reading: self._back(reading, back_at, back))
        return Result(
            recording=record.path,
            ended_by=ended_by or "the time was over",
            edge_s=edge[0] if edge else None,
            dark_s=back_at - cut_at,
            back_s=back[0] if back else None,
            charge_pct=last[-1].charge_pct if last else None,
        )

    def _dark(self, reading: Reading | None, cut_at: float, edge: list[float], last: list[Reading]) -> str:
        """Why mains must come back now; "" to wait on."""
        plan, now = self.rig.plan, time.monotonic()
        if reading is None:
            return f"the UPS couldn't be read for {plan.blind_s:.0f} s" if now - self._seen_at > plan.blind_s else ""
        last[:] = [reading]
        if reading.on_battery and not edge:
            edge.append(now - cut_at)
        if not edge and now - cut_at > plan.edge_s:
            return f"the UPS had not noticed after {plan.edge_s:.0f} s"
        low = reading.charge_pct is not None and reading.charge_pct < plan.charge_min_pct
        return f"the charge was below {plan.charge_min_pct:.0f} %" if low else ""

    def _back(self, reading: Reading | None, back_at: float, back: list[float]) -> str:
        if reading is not None and reading.on_battery is False and not back:
            back.append(time.monotonic() - back_at)
        late = not back and time.monotonic() - back_at > self.rig.plan.edge_s
        return "the UPS doesn't see mains" if late else ""

    def _watch(self, record: Recording, seconds: float, stop: Callable[[Reading | None], str]) -> str:
        """Records for *seconds*, or until *stop* says why not."""
        ends = time.monotonic() + seconds
        self._seen_at = time.monotonic()
        while (now := time.monotonic()) < ends:
            reading: Reading | None = None
            try:
                reading = self._look(record)
                self._seen_at = now
            except UpsError as error:
                record.note(str(error))
            if why := stop(reading):
                return why
            time.sleep(max(0.0, min(self.rig.poll_s, ends - time.monotonic())))
        return ""

    def _restore(self, record: Recording) -> None:
        """Mains on, by hand if need be. Nothing may keep it from being tried."""
        mains = self.rig.named(self.rig.mains)
        record.note(f"{mains.name} goes on")
        for attempt in range(RESTORE_TRIES):
            try:
                mains.switch(True)
                return
            except OutletFailed as error:
                self._say(f"{mains.name} can't be switched on: {error}")
                if attempt < RESTORE_TRIES - 1:
                    time.sleep(self.rig.plan.retry_s)
        self._ask(f"SWITCH {mains.name} ON BY HAND NOW ({mains.feeds}). When it is done, type: on")

    # ---- the UPS -----------------------------------------------------------------------------------

    def _look(self, record: Recording | None = None) -> Reading:
        """One reading, recorded. Raises UpsNotReady."""
        address = self.rig.address
        try:
            if self._client is None or not self._client.connected:
                self._client = CheckedClient(address.host, address.port)
            variables = self._client.list_vars(address.ups)
        except NutError as error:
            raise UpsNotReady(f"{self.rig.ups}: {error}", todo="see powerguard check") from None
        now = time.monotonic()
        if record is not None:
            record.row(now, variables)
        return parse(Sample(address.ups, now, Comm.OK, variables))

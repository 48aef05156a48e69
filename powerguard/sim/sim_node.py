"""One node of `cluster.py`: its daemon, with what has come in and not been read yet, and its UPS."""

from __future__ import annotations

import msgspec

from powerguard.core import gossip
from powerguard.core.between import PeerReport
from powerguard.core.state import State, initial
from powerguard.core.types import Comm, RankReport, Sample
from powerguard.sim.fates import Outage, Run

BEGIN = 100.0
"""The instant at which a run begins, on the clock of all its nodes."""


class SimNode:
    """One node: its daemon with what has come in and not been read yet."""

    def __init__(self, number: int, plan: Run) -> None:
        self.number, self.name = number, f"n{number}"
        self.boot = f"{plan.seed:06x}{number:02x}"
        self.state = self.fresh(BEGIN)
        self.journal = self.state
        self.said = gossip.Said()
        self.up_at = BEGIN
        self.next_at = BEGIN
        self.pages_at = self.polled_at = 0.0
        self.reports: list[RankReport] = []
        self.beats: list[RankReport] = []
        self.words: list[PeerReport] = []
        self.off_at: float | None = None
        self.powered = True
        self.outage_seen = False
        self.let_go = False  # its leader has said that all may leave
        self.outage = plan.outages[number] if number < len(plan.outages) else Outage()

    def fresh(self, now: float) -> State:
        """A daemon that remembers nothing."""
        return initial(self.boot, now + 50.0 * self.number, node=self.name, addresses=(self.name,))

    def killed(self, until: float, *, forgets: bool, now: float) -> None:
        """What it had not read is lost; it begins with its journal, through its bytes."""
        self.up_at = self.next_at = until
        self.reports, self.beats, self.words = [], [], []
        self.said = gossip.Said()
        if forgets:
            self.journal = self.fresh(now)
        self.state = msgspec.json.decode(msgspec.json.encode(self.journal), type=State)

    def sample(self, now: float) -> Sample:
        """What its UPS says."""
        outage, since = self.outage, now - BEGIN
        out = since >= outage.at and (outage.back is None or since < outage.back)
        self.outage_seen = self.outage_seen or out
        if outage.silent_at <= since < outage.heard_at:
            return Sample("ups", now, Comm.STALE)
        status = ["OB", "DISCHRG"] if out else ["OL"]
        if out and since >= outage.low_at:
            status.append("LB")
        if out and since >= outage.fsd_at:
            status.insert(0, "FSD")
        full_s = outage.promises_s
        left = max(20.0, full_s - max(0.0, since - outage.at)) if out else full_s
        charge = 100.0 * left / full_s
        values = {"ups.status": " ".join(status), "battery.charge": f"{charge:.0f}", "battery.runtime": f"{left:.0f}"}
        return Sample("ups", now, Comm.OK, values)

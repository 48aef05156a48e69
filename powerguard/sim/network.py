"""The network of `cluster.py`: it loses, repeats, reorders, delays and splits, until the calm."""

from __future__ import annotations

from random import Random

import msgspec

from powerguard.core.between import BetweenNodes, SendPeer
from powerguard.sim.fates import Run
from powerguard.sim.sim_node import BEGIN


class Network:
    """Words between nodes, by their numbers."""

    def __init__(self, plan: Run, rng: Random) -> None:
        self._plan, self._rng = plan, rng
        self._under_way: list[tuple[float, int, int, BetweenNodes]] = []  # (at, from, to, word)
        self.sent = 0

    def post(self, sender: int, send: SendPeer, now: float) -> None:
        """A word sets out."""
        name = send.node or send.address
        if not name.startswith("n"):
            return
        to = int(name[1:])
        self.sent += 1
        calm = now >= BEGIN + self._plan.calm_at
        message = send.message
        if self._plan.on_wire:
            message = msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=BetweenNodes)
        rng, plan = self._rng, self._plan
        for _ in range(1 if calm or rng.random() >= plan.twice else 2):
            if not calm and (rng.random() < plan.loss or self._cut(sender, to, now)):
                continue
            late = plan.late_s * rng.random() if not calm and rng.random() < 0.2 else 0.0
            self._under_way.append((now + plan.delay_s * rng.random() + late, sender, to, message))

    def arrived(self, now: float) -> list[tuple[float, int, int, BetweenNodes]]:
        """What has come to its end, in the order in which it did."""
        if not self._under_way:
            return []
        ripe = [item for item in self._under_way if item[0] <= now]
        self._under_way = [item for item in self._under_way if item[0] > now]
        return sorted(ripe, key=lambda item: item[0])

    def _cut(self, sender: int, to: int, now: float) -> bool:
        """Whether a split keeps a word from its way."""
        for split in self._plan.splits:
            if not split.window.holds(now - BEGIN) or (sender in split.apart) == (to in split.apart):
                continue
            if not (split.one_way and sender in split.apart):
                return True
        return False

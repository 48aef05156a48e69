"""What must hold in every run of a job over several nodes, whatever fails. A breach raises `Breach`.

The simulation tells what happens, as somebody who sees all nodes at once; nobody in the simulated world knows this.
"""

from __future__ import annotations

from powerguard.core.messages import Seal

EPSILON_S = 1e-6


class Breach(AssertionError):
    """A law was broken; the text says which."""


class Laws:
    """What has happened so far in one job."""

    def __init__(self, *, hold_max_s: float) -> None:
        self.hold_max_s = hold_max_s
        self.disk: dict[str, dict[int, int]] = {}  # generation -> rank -> step of its state
        self.seals: dict[str, int] = {}
        self.decisions: dict[int, tuple[int, str]] = {}

    def decided(self, seq: int, step: int, generation: str, who: str) -> None:
        """A decision never moves: one number, one step, one generation, for every rank and every node."""
        known = self.decisions.setdefault(seq, (step, generation))
        if known != (step, generation):
            raise Breach(f"moved: order {seq} was {known}, and is {(step, generation)} for {who}")

    def passed(self, rank: int, step: int, edge: int, held_s: float) -> None:
        """Nobody passes a promised boundary undecided, the bounded hold aside."""
        if held_s < self.hold_max_s - EPSILON_S:
            raise Breach(f"passed: rank {rank} passed {step}, promised {edge}, after {held_s:.1f} s")

    def written(self, generation: str, rank: int, step: int) -> None:
        """One generation, one step."""
        shards = self.disk.setdefault(generation, {})
        shards[rank] = step
        if set(shards.values()) != {step}:
            raise Breach(f"steps: {generation} holds {shards}")

    def sealed(self, seal: Seal, world_size: int) -> None:
        """No seal without every shard of the world, durable, of one step."""
        shards = self.disk.get(seal.generation, {})
        named = [record.rank for record in seal.shards]
        if named != list(range(world_size)):
            raise Breach(f"seal: {seal.generation} names {named} of {world_size}")
        missing = [rank for rank in named if rank not in shards]
        if missing:
            raise Breach(f"seal: {seal.generation} is sealed, and rank {missing} isn't durable")
        if {shards[rank] for rank in named} != {seal.step}:
            raise Breach(f"steps: {seal.generation} is sealed over {shards}")
        self.seals[seal.generation] = seal.step

    def whole(self, generation: str, step: int, world_size: int, who: str) -> None:
        """What a daemon calls durable is."""
        shards = self.disk.get(generation, {})
        if shards != dict.fromkeys(range(world_size), step):
            raise Breach(f"whole: {who} calls {generation} durable, and it holds {sorted(shards)} of {world_size}")

    @staticmethod
    def left(rank: int, moving: list[int], waited_s: float, wait_s: float) -> None:
        """No rank is told to exit while a peer isn't quiesced, the bounded wait aside."""
        if moving and waited_s < wait_s - EPSILON_S:
            raise Breach(f"exit: rank {rank} is told to leave after {waited_s:.1f} s, and {moving} aren't quiesced")

    @staticmethod
    def ended(stuck: list[str], after_s: float) -> None:
        """With the network whole again, everything ends in training or in a halt."""
        if stuck:
            raise Breach(f"end: after {after_s:.0f} s of calm {'; '.join(stuck[:6])}")

    @staticmethod
    def halted(node: str, *, powered: bool) -> None:
        """A node whose own power is good doesn't halt."""
        if powered:
            raise Breach(f"halt: {node} halts, and its power never failed")

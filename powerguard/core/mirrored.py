"""An order as another node tells it. Pure."""

from __future__ import annotations

from powerguard.core.between import WORLD, OrderState
from powerguard.core.job import Order, Part


def mirrored(known: Order | None, told: OrderState, parts: dict[int, Part], now: float) -> Order:
    """The order as it is told, with *parts*; what this node knows to be decided isn't moved by anybody."""
    decided = known is not None and known.step >= 0
    moved = known is not None and decided and (told.step, told.generation) != (known.step, known.generation)
    if known is not None and moved:
        return known
    return Order(
        seq=told.seq,
        event=told.event,
        purpose=told.purpose,
        ordered_at=now - told.age_s if known is None else known.ordered_at,
        parts=parts,
        reason=told.reason,
        budget_s=told.budget_s,
        stage=told.stage,
        stage_at=now - told.stage_s if known is None or known.stage is not told.stage else known.stage_at,
        plan=told.plan,
        step=told.step,
        generation=told.generation,
        sealer=told.sealer,
        sealed_by=told.sealed_by if known is None else max(known.sealed_by, told.sealed_by),
        sealer_at=now if known is None or known.sealer != told.sealer else known.sealer_at,
        why=told.why,
        settled=told.settled,
        over=told.over or (known is not None and known.over),
        nth=told.nth,
        weights=_by_rank(told.weights),
    )


def _by_rank(runs: tuple[tuple[int, float], ...]) -> tuple[float, ...]:
    """The weights one by one; nobody's runs make more of them than a world has ranks."""
    weights: list[float] = []
    for ranks, weight in runs:
        weights += [weight] * min(ranks, WORLD - len(weights))
    return tuple(weights)

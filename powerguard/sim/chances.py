"""Draws a run of a job over several nodes from a seed: how large, what fails, when the mains go and come."""

from __future__ import annotations

from random import Random

from msgspec.structs import replace

from powerguard.sim.fates import Fall, Mishap, Outage, Run, Split, Window
from powerguard.sim.ranks import NEVER, Spec

SIZES = ((0.06, 1, 1), (0.54, 2, 2), (0.26, 3, 3), (0.115, 4, 6), (0.02, 7, 12), (0.004, 13, 32), (0.001, 33, 64))
"""Share of the runs, and nodes from, to."""

PER_NODE = ((0.6, 1, 1), (0.3, 2, 2), (0.08, 3, 4), (0.02, 5, 8))


def draw(seed: int) -> Run:
    """The run of *seed*."""
    rng = Random(seed * 7919 + 17)
    nodes, per_node = _among(rng, SIZES), _among(rng, PER_NODE)
    if seed % 5000 == 4999:
        nodes, per_node = 64, 8
    world = nodes * per_node
    calm_at = rng.uniform(7.0, 13.0)
    network = rng.random() < 0.6
    run = Run(
        seed=seed,
        nodes=nodes,
        per_node=per_node,
        spec=Spec(
            step_s=rng.choice((0.3, 0.5, 0.9)),
            write_s=rng.choice((0.3, 0.6, 1.5)),
            stage_every=rng.choice((0, 0, 1, 3)),
            failing=0.05 if rng.random() < 0.1 else 0.0,
        ),
        loss=rng.choice((0.0, 0.02, 0.1, 0.3)) if network else 0.0,
        twice=rng.choice((0.0, 0.1)) if network else 0.0,
        delay_s=rng.choice((0.02, 0.1, 0.4)) if network else 0.02,
        late_s=rng.choice((0.0, 0.5, 3.0)) if network else 0.0,
        splits=_splits(rng, nodes, calm_at) if nodes > 1 and rng.random() < 0.3 else (),
        mishaps=_mishaps(rng, nodes, world, calm_at),
        falls=_falls(rng),
        outages=_outages(rng, nodes, calm_at),
        starts=tuple(rng.uniform(0.0, 4.0) if rng.random() < 0.1 else 0.0 for _ in range(world)),
        coupled=rng.random() < 0.85,
        calm_at=calm_at,
        dt=rng.choice((0.3, 0.5, 0.5, 0.6)),
        on_wire=seed % 50 == 0,
    )
    if seed % 12 == 7:
        return _in_silence(Random(seed * 7919 + 18), run)
    return _hanging(Random(seed * 7919 + 19), run) if seed % 12 == 3 else run


def _hanging(rng: Random, run: Run) -> Run:
    """The same where training threads hang, though their listeners answer, and copies are staged."""
    hangs = tuple(
        Mishap("hung", rng.randrange(run.nodes * run.per_node), Window(rng.uniform(1.0, 8.0), rng.uniform(2.0, 40.0)))
        for _ in range(rng.randint(1, 2))
    )
    return replace(
        run,
        mishaps=(*run.mishaps, *hangs),
        spec=replace(run.spec, stage_every=rng.choice((1, 2, 5))),
        policy=replace(run.policy, flush_max_s=60.0),
        calm_at=max(run.calm_at, *(hang.window.at + hang.window.for_s for hang in hangs)),
    )


def _in_silence(rng: Random, run: Run) -> Run:
    """The same where nobody speaks for some small UPSes, for so long that training pauses for a slow save."""
    outages = list(run.outages) or [Outage()] * run.nodes
    calm_at = run.calm_at
    for node in rng.sample(range(run.nodes), rng.randint(1, max(1, run.nodes // 2))):
        at = rng.uniform(0.0, 4.0)
        heard_at = at + rng.uniform(15.0, 50.0)
        calm_at = max(calm_at, heard_at)
        outages[node] = replace(outages[node], silent_at=at, heard_at=heard_at, promises_s=rng.choice((20.0, 60.0)))
    return replace(
        run,
        outages=tuple(outages),
        spec=replace(run.spec, write_s=rng.choice((6.0, 10.0))),
        policy=replace(run.policy, blind_save_s=4.0),
        calm_at=calm_at,
    )


def _among(rng: Random, table: tuple[tuple[float, int, int], ...]) -> int:
    at = rng.random()
    for share, least, most in table:
        if at < share:
            return rng.randint(least, most)
        at -= share
    return table[0][1]


def _window(rng: Random, calm_at: float, longest_s: float) -> Window:
    at = rng.uniform(1.0, calm_at - 1.0)
    return Window(at, min(rng.uniform(0.3, longest_s), calm_at - at))


def _splits(rng: Random, nodes: int, calm_at: float) -> tuple[Split, ...]:
    return tuple(
        Split(
            _window(rng, calm_at, 12.0),
            frozenset(rng.sample(range(nodes), rng.randint(1, max(1, nodes // 2)))),
            one_way=rng.random() < 0.2,
        )
        for _ in range(rng.randint(1, 3))
    )


def _mishaps(rng: Random, nodes: int, world: int, calm_at: float) -> tuple[Mishap, ...]:
    found: list[Mishap] = []
    if rng.random() < 0.45:
        for _ in range(rng.randint(1, 3)):
            kind = "memory" if rng.random() < 0.15 else "daemon"
            which = 0 if rng.random() < 0.6 else rng.randrange(nodes)
            found.append(Mishap(kind, which, _window(rng, calm_at, rng.choice((1.0, 8.0)))))
    if rng.random() < 0.06:
        found.append(Mishap("dark", rng.randrange(nodes), _window(rng, calm_at, 1.0)))
    if rng.random() < 0.25:
        window = _window(rng, calm_at, 4.0)
        gone = Window(window.at, NEVER) if rng.random() < 0.5 else window
        found.append(Mishap("rank", rng.randrange(world), gone))
    if rng.random() < 0.25:
        kind = rng.choice(("deaf", "stopped"))
        found.extend(Mishap(kind, rng.randrange(world), _window(rng, calm_at, 5.0)) for _ in range(rng.randint(1, 2)))
    return tuple(found)


def _falls(rng: Random) -> tuple[Fall, ...]:
    """The leader lost at a point of the protocol."""
    if rng.random() < 0.6:
        return ()
    stages = ("prepare", "decided", "decided", "sealing", "sealed", "lost", "quiesce")
    return tuple(
        Fall(
            rng.choice(stages),
            told=rng.choice((0.0, 0.3, 0.7)),
            away_s=rng.choice((0.3, 3.0, 10.0, 10.0, NEVER)),
            dark=rng.random() < 0.1,
        )
        for _ in range(rng.randint(1, 2))
    )


def _outages(rng: Random, nodes: int, calm_at: float) -> tuple[Outage, ...]:
    """Of the whole building, of one node or of some; back at any moment, or never."""
    kind = rng.random()
    if kind < 0.05:
        return ()
    at = rng.uniform(1.0, calm_at * 0.6)
    back = at + rng.uniform(0.5, 16.0) if rng.random() < 0.65 else None
    hit = set(range(nodes)) if kind < 0.4 else set(rng.sample(range(nodes), rng.randint(1, max(1, nodes // 2))))
    outages = []
    for node in range(nodes):
        if node not in hit:
            outages.append(Outage())
            continue
        own_at = at + rng.uniform(0.0, 3.0)
        own_back = None if back is None else max(own_at + 0.3, back + rng.uniform(-1.0, 2.0))
        if rng.random() < 0.1:
            own_back = own_at + rng.uniform(0.5, 10.0)
        low_at = own_at + rng.uniform(0.0, 10.0) if rng.random() < 0.2 else NEVER
        fsd_at = own_at + rng.uniform(1.0, 12.0) if rng.random() < 0.1 else NEVER
        outages.append(Outage(own_at, own_back, low_at, fsd_at))
    return tuple(outages)

"""A journal to tell stories of: the pure core in a simulated world, with the journal that its daemon had kept."""

from collections.abc import Callable

import pytest

from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.state import initial
from powerguard.drill.plan import PLANS
from powerguard.journal import Journal
from powerguard.sim.battery import SimUps, UpsSpec
from powerguard.sim.feed import SimFeed
from powerguard.sim.rank import RankSpec
from powerguard.sim.world import JobSpec, World

BEGIN, CUT = 100.0, 110.0
FAST = RankSpec(step_s=0.1, stage_s=0.02, write_s=0.3, fsync_s=0.1)


def _night(tmp_path, *, plan="blackout", mains_back_at=None, until=300.0):
    """A node with two ranks on a small UPS whose mains fail at 110 s; the world, and the journal it would have kept."""
    policy = Policy(feeds=(FeedPolicy("ups"),), **PLANS[plan].policy())
    feed = SimFeed("ups", ups=SimUps(UpsSpec.small(PLANS[plan].runtime_s), seed=1))
    world = World(policy, jobs=(JobSpec("gpt", ranks=2, speed=FAST),), feeds=(feed,), begin_at=BEGIN)
    world.at(CUT, lambda: _mains(feed, False))
    if mains_back_at is not None:
        world.at(mains_back_at, lambda: _mains(feed, True))
    world.run(until)
    return world, _keep(world, tmp_path)


def _mains(feed, on):
    feed.mains = on


def _keep(world, folder):
    """The journal of what the world's daemon decided."""
    journal = Journal(folder, boot=world.boot, node="node", version="0")
    journal.begin(BEGIN, world.policy)
    before = initial(world.boot, BEGIN, node="node")
    for entry in world.entries:
        decision = entry.decision
        journal.tick(entry.at, before, entry.seen, decision.state, actions=decision.actions, reason=decision.reason)
        before = decision.state
    path = journal.path
    journal.close()
    return path


@pytest.fixture(scope="session")
def night() -> Callable[..., tuple[World, str]]:
    """Makes a night in a folder: see `_night`. The mains fail at 110 s."""
    return _night


@pytest.fixture(scope="session")
def keep() -> Callable[..., str]:
    """Writes the journal that a world's daemon would have kept, into a folder: `keep(world, folder)`."""
    return _keep

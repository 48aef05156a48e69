"""The live drill against the real core in a simulated world; with real ranks it is in tests/e2e."""

from __future__ import annotations

import msgspec
import pytest

from powerguard.config import loads
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.types import Phase
from powerguard.drill import live, live_report
from powerguard.drill.moments import moments
from powerguard.drill.parts import stops
from powerguard.errors import DrillFailed, UsageError
from powerguard.journal import read
from powerguard.node.status import Shell, describe
from powerguard.sim import faults as f
from powerguard.sim.rank import RankSpec
from powerguard.sim.world import JobSpec, World

CONFIG = loads('[[ups]]\nname = "ups"\n', env={})
UPS = CONFIG.ups[0].name
FAST = RankSpec(step_s=0.5, stage_s=0.2, write_s=2.0, fsync_s=0.2)


class Told(live.Daemon):
    """A daemon that lives in a world; asking it lets nothing happen, waiting does."""

    def __init__(self, world: World, journal: str = "/nowhere") -> None:
        self.world, self.journal, self.said = world, journal, list[str]()

    def status(self):
        reason = self.world.entries[-1].decision.reason
        shell = Shell("0", 1, 0.0, "logind", self.journal, "", reason, {}, {})
        return describe(CONFIG, self.world.state, shell, self.world.now)

    def order(self, verb, *, job="", for_s=0.0):
        self.world.command(verb, job=job, within_s=for_s)
        self.world.run(self.world.now + 0.2)
        for entry in self.world.entries[-4:]:
            for action in entry.decision.actions:
                facts = getattr(action, "facts", {})
                if facts.get("command") == verb:
                    if facts["refused"]:
                        raise live.Refused(action.text)
                    return action.text
        raise AssertionError("nobody answered")


def drilled(world: World, **options) -> live.Result:
    """A drill of *world*."""
    node = Told(world)
    return live.run(node, say=node.said.append, clock=world.clock, pause=lambda s: world.run(world.now + s), **options)


@pytest.fixture
def world() -> World:
    """Two ranks that train on line power."""
    each = World(Policy(feeds=(FeedPolicy(UPS),)), jobs=(JobSpec("gpt", speed=FAST),))
    each.run(130.0)
    return each


def test_ranks_go_on_in_place_and_what_cannot_be_read_back_is_said(world):
    """The stop is carried out and resumed; a generation that isn't there to be read is no success."""
    result = drilled(world)

    assert Phase.ONLINE is world.phase
    assert world.halted_at is None
    assert not any(rank.parked for rank in world.ranks.values())
    assert world.newest("gpt") is not None
    assert 3.0 < result.stopped_s < 10.0
    assert (live.NOT, False) == (result.verdict, result.verified)
    assert any("gpt" in why for why in result.why)


@pytest.mark.slow
def test_the_whole_drill_saves_twice_and_stays_parked(world):
    """With *full* a snapshot comes first, and ranks wait so long that the load without them can be read."""
    result = drilled(world, full=True)

    assert result.stopped_s > live.PARKED_S
    assert 2 == len(world.disks["gpt"].seals)
    assert (40.0, 40.0) == (result.load_pct, result.parked_load_pct)


def test_a_real_event_takes_over(world):
    """Mains fail in the middle: the drill says so and leaves the node to its daemon."""
    world.at(world.now + 1.5, lambda: world.feeds[UPS].say({"ups.status": "OB DISCHRG"}))

    result = drilled(world)

    assert (live.GAVE_WAY, False) == (result.verdict, result.ok)
    assert "on battery" in result.why[0]
    assert world.state.view.drill_s is None
    world.run(world.now + 20.0)
    assert Phase.PARKED is world.phase


def test_a_rank_that_hangs_does_not_hang_the_drill():
    """A flush that never ends is given up by the daemon, and the drill says that nothing came of it."""
    policy = Policy(feeds=(FeedPolicy(UPS),), flush_max_s=60.0)
    world = World(policy, jobs=(JobSpec("gpt", speed=FAST),), faults=(f.WriteFails(at=0.0, rank=1),))
    world.run(130.0)

    result = drilled(world)

    assert live.NOT == result.verdict
    assert any("no generation came of the flush" in why for why in result.why)
    assert Phase.ONLINE is world.phase


@pytest.mark.parametrize(
    ("sick", "why"),
    [
        ({"ups.status": "OB DISCHRG"}, "on battery"),
        ({"ups.status": "OL"}, "no training job"),
    ],
)
def test_a_drill_is_refused(sick, why):
    """On battery, and without a job: before anything is ordered."""
    jobs = (JobSpec("gpt", speed=FAST),) if "OB" in sick["ups.status"] else ()
    world = World(Policy(feeds=(FeedPolicy(UPS),)), jobs=jobs)
    world.feeds[UPS].say(sick)
    world.run(115.0)

    with pytest.raises(live.Refused, match=why):
        drilled(world)
    assert 0 == sum(rank.lone_saves for rank in world.ranks.values())


def test_a_job_that_is_not_there_is_a_mistake(world):
    """The message names those that are."""
    with pytest.raises(UsageError, match="no job is called 'bert'"):
        drilled(world, job="bert")


@pytest.mark.slow
def test_a_drill_that_cannot_be_followed_ends(world):
    """A node that never comes back from its drill is waited for so long and no longer."""
    world.at(world.now + 1.0, lambda: world.command("park"))

    with pytest.raises(DrillFailed, match="in vain"):
        drilled(world)


@pytest.mark.slow
def test_the_parts_of_a_stop_are_in_the_journal(night, tmp_path):
    """Each part is what the ranks were told to take, and together they make the whole."""
    _, path = night(tmp_path, plan="blip", mains_back_at=115.0, until=150.0)

    (parts,) = stops(moments(read(path)))

    assert (0.02, 0.3, 0.1) == pytest.approx((parts.stage_s, parts.write_s, parts.fsync_s))
    assert parts.same_processes is True
    assert 2 == parts.ranks
    assert 2 << 30 == parts.bytes
    whole = parts.agree_s + parts.step_s + parts.stage_s + parts.write_s + parts.fsync_s + parts.seal_s
    assert whole == pytest.approx(parts.total_s, abs=0.5)
    assert parts.parked_s > 1.0


def test_the_result_in_words(world):
    """What is told is what was measured, and what is stored is read back."""
    result = msgspec.structs.replace(drilled(world), verdict=live.IN_PLACE, why=("well",))

    words = "\n".join(live_report.words(result))

    assert "live drill: resumed in place" in words
    assert f"need                   {result.need_s:.1f} s" in words
    assert f"spare                  {result.spare_s:.0f} s" in words
    assert result == msgspec.json.decode(msgspec.json.encode(result), type=live.Result)

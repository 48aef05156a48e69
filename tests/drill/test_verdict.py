"""The verdict is "survived" only if nothing was lost and everything was in time."""

import pytest
from msgspec.structs import replace

from powerguard.drill.compare import Comparison
from powerguard.drill.plan import MainsBack
from powerguard.drill.story import Save
from powerguard.drill.verdict import NOT, SURVIVED, WITH_LOSS, Facts, judge

EXACT = Comparison(197, 197, 0, bit_exact=True, difference="", losses_compared=600)
BLACKOUT = Facts(
    mains_back=MainsBack.NEVER,
    compared=EXACT,
    mains_cut_at=100.0,
    snapshots=(Save("snapshot", 70, 102.0, 102.5),),
    flush=Save("stop", 197, 114.0, 115.0),
    stops=1,
    halted_at=120.0,
    power_cut_at=130.0,
    newest_step=197,
    spare_s=9.0,
)
IN_PLACE = replace(EXACT, resumed_step=None)
DIP = Facts(
    mains_back=MainsBack.AFTER_SNAPSHOT,
    compared=IN_PLACE,
    mains_cut_at=100.0,
    snapshots=(Save("snapshot", 70, 102.0, 102.5),),
    same_processes=True,
    online_again=True,
)
BLIP = replace(DIP, mains_back=MainsBack.WHILE_PARKED, flush=Save("stop", 197, 114.0, 115.0), stops=1)


@pytest.mark.parametrize("facts", [BLACKOUT, DIP, BLIP])
def test_a_perfect_drill_survives(facts):
    """Nothing wrong: survived, with reasons that carry numbers."""
    got = judge(facts)
    assert got.word == SURVIVED
    assert "bit-exact: 600 losses" in got.why[-1]


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        (replace(BLACKOUT, flush=None), "no flush was sealed"),
        (replace(BLACKOUT, flush=Save("stop", 197, 129.0, 130.5)), "no flush was sealed before"),
        (replace(BLACKOUT, halted_at=None), "still running"),
        (replace(BLACKOUT, halted_at=130.0), "still running"),
        (replace(BLACKOUT, power_cut_at=None), "never cut"),
        (replace(BLACKOUT, compared=replace(EXACT, resumed_step=None)), "never resumed"),
        (replace(BLACKOUT, compared=replace(EXACT, resumed_step=70)), "newest whole generation"),
        (replace(BLACKOUT, flush=Save("stop", 196, 114.0, 115.0)), "stopped at 196"),
        (replace(BLACKOUT, compared=replace(EXACT, bit_exact=False, difference="rank 1, step 9")), "rank 1, step 9"),
        (replace(DIP, snapshots=()), "0 snapshots"),
        (replace(DIP, snapshots=DIP.snapshots * 2), "2 snapshots"),
        (replace(DIP, stops=1), "stopped 1 times"),
        (replace(DIP, online_again=False), "never went back"),
        (replace(DIP, same_processes=False), "started anew"),
        (replace(DIP, compared=replace(IN_PLACE, bit_exact=False, difference="parameters")), "parameters"),
        (replace(BLIP, flush=None), "no flush"),
        (replace(BLIP, halted_at=118.0), "halted although"),
        (replace(BLIP, same_processes=False), "started anew"),
        (replace(BLIP, compared=replace(IN_PLACE, lost_steps=3)), "3 steps"),
    ],
)
def test_any_one_fault_is_not_a_survival(facts, words):
    """Each fault alone changes the verdict, and the reason names it."""
    got = judge(facts)
    assert got.word == NOT
    assert words in " ".join(got.why)


def test_a_killed_rank_is_survived_with_loss():
    """Resumed from the snapshot and the same run from there: said as it is, with the steps that were lost."""
    got = judge(
        replace(
            BLACKOUT,
            killed=1,
            flush=None,
            newest_step=70,
            compared=replace(EXACT, resumed_step=70, lost_steps=12, reached=82),
        )
    )
    assert got.word == WITH_LOSS
    assert "12 steps were lost" in " ".join(got.why)
    assert "rank 1 was killed" in got.why[0]


def test_a_loss_without_a_halt_in_time_is_not_survived():
    """Even if a snapshot saved the run, the node lost its power while it was running."""
    lost = replace(EXACT, resumed_step=70, lost_steps=12, reached=82)
    assert judge(replace(BLACKOUT, flush=None, newest_step=70, halted_at=None, compared=lost)).word == NOT

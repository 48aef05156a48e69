"""A drill's plan is decided before anything starts, and its daemon's rules pass the real configuration."""

import pytest

from powerguard.config import loads
from powerguard.drill.plan import PLANS, MainsBack, choose
from powerguard.errors import UsageError


@pytest.mark.parametrize("name", PLANS)
def test_the_policy_of_each_plan_is_one_that_the_daemon_takes(name):
    """Every key is known and every relation of the configuration holds."""
    rules = "\n".join(f"{key} = {value!r}" for key, value in PLANS[name].policy().items())
    config = loads(f'[[ups]]\nname = "drill@127.0.0.1:1234"\n[policy]\n{rules}\n')
    assert config.policy.snapshot == "always"


@pytest.mark.parametrize("name", PLANS)
def test_a_run_is_longer_than_the_battery(name):
    """Even if the whole battery were spent on training, ranks are still at work when it is flat."""
    plan = choose(name)
    if plan.mains_back is MainsBack.NEVER:
        assert plan.total_steps > plan.cut_at_step + plan.runtime_s / plan.pace_s


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"name": "flood"}, "blackout, dip, blip"),
        ({"name": "blackout", "ranks": 0}, "1 to 16"),
        ({"name": "blackout", "kill_rank": 2}, "ranks are 0 to 1"),
        ({"name": "dip", "kill_rank": 0}, "blackout"),
        ({"name": "blackout", "steps": 30}, "35 to"),
    ],
)
def test_a_wrong_choice_is_refused_in_one_line(options, words):
    """The message names what would be right."""
    with pytest.raises(UsageError) as caught:
        choose(**options)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_choices_are_kept():
    """What the operator chose is in the plan; the rest is as it was."""
    plan = choose("blackout", ranks=3, steps=500, seed=7, nut=True, kill_rank=1)
    assert (plan.ranks, plan.total_steps, plan.seed, plan.nut, plan.kill_rank) == (3, 500, 7, True, 1)
    assert PLANS["blackout"].ranks == 2

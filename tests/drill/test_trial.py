"""The fixtures that users' tests are made of, used as users use them."""

import sys

import pytest

from powerguard.drill.trial import Survival
from powerguard.errors import UsageError

pytestmark = [pytest.mark.slow, pytest.mark.e2e]


def test_a_daemon_follows_its_ups(ups, powerguard_daemon):
    """On line, on battery, parked (nothing trains here), and on line again when the mains are back."""
    powerguard_daemon.wait_for("online", 60.0)
    ups.cut_mains()
    powerguard_daemon.wait_for("parked", 60.0)
    assert not powerguard_daemon.halted
    ups.restore_mains()
    powerguard_daemon.wait_for("online", 60.0)


def test_a_server_that_fails_is_seen(ups, powerguard_daemon):
    """A fault of the server shows in the status, and its end too."""
    from powerguard.drill.trial import wait_for

    powerguard_daemon.wait_for("online", 60.0)
    ups.fault("stale")
    wait_for(lambda: powerguard_daemon.status["feeds"][0]["comm"] == "stale", 60.0, "the stale data to be seen")
    ups.clear()
    wait_for(lambda: powerguard_daemon.status["feeds"][0]["comm"] == "ok", 60.0, "its end to be seen")


def test_a_command_without_a_place_for_checkpoints_is_refused(blackout):
    """One clear line before anything is started."""
    with pytest.raises(UsageError, match="checkpoints"):
        blackout.run([sys.executable, "-c", "pass"])


def test_a_command_that_is_done_too_soon_proves_nothing(blackout):
    """Before the mains fail it is said at once; before the stop, instead of a word about a missing checkpoint."""
    with pytest.raises(AssertionError, match="ended with 3 before the mains failed"):
        blackout.run([sys.executable, "-c", "raise SystemExit(3)", "{checkpoints}"])
    survival = Survival(
        stop_step=None,
        halted=True,
        finished=True,
        resumed_step=None,
        exit_code=0,
        different=(),
        compared=(),
        generations=(),
        logs="the logs",
    )
    with pytest.raises(AssertionError, match=r"done before the node stopped it: give it more steps; the logs"):
        survival.assert_saved()

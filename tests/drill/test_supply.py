"""The power side of a drill: real seconds, a real battery model, a real server."""

import socket
import time

import pytest
from msgspec.structs import replace

from powerguard.drill.plan import choose
from powerguard.drill.power import UPS, power
from powerguard.sim.nut import missing


def clock():
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def wait_for(condition, seconds=60.0):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


def status(address):
    """ups.status as any NUT client would read it."""
    host, _, port = address.partition("@")[2].rpartition(":")
    with socket.create_connection((host, int(port)), 2.0) as connection:
        connection.sendall(f"GET VAR {UPS} ups.status\n".encode())
        return connection.makefile().readline().split('"')[1].split()


@pytest.mark.slow
def test_a_battery_runs_flat_and_comes_back_with_the_mains():
    """On line, on battery, flat with the output off; then the mains power it again."""
    plan = replace(choose("blackout"), runtime_s=1.5)
    with power(plan, clock) as (supply, address, _):
        assert "OL" in status(address)
        cut_at = supply.cut_mains()
        wait_for(lambda: "OB" in status(address))
        wait_for(lambda: supply.flat)
        assert supply.flat_at == pytest.approx(cut_at + 1.5, abs=1.0)
        supply.restore_mains()
        wait_for(lambda: "OL" in status(address))
        assert not supply.flat


@pytest.mark.slow
def test_the_truth_is_kept_and_a_lighter_load_lasts_longer():
    """Instants grow, the runway falls with the charge, and jumps up when the load falls."""
    with power(replace(choose("blackout"), runtime_s=20.0), clock) as (supply, _, _):
        supply.cut_mains()
        wait_for(lambda: len([truth for truth in supply.truths if not truth.mains]) >= 5)
        heavy = [truth for truth in supply.truths if not truth.mains]
        assert heavy[-1].runway_s < heavy[0].runway_s <= 20.5
        assert heavy[-1].charge_pct < heavy[0].charge_pct
        supply.load(20.0)
        wait_for(lambda: supply.truths[-1].load_pct == 20.0)
        assert supply.truths[-1].runway_s > 2 * heavy[-1].runway_s
    assert [t.at for t in supply.truths] == sorted(t.at for t in supply.truths)


@pytest.mark.slow
def test_mains_that_flap_and_a_ups_that_dies():
    """Mains come and go by themselves for a time; a UPS that dies is off with its battery full."""
    with power(replace(choose("blackout"), runtime_s=60.0), clock) as (supply, address, _):
        supply.flap(0.5, 4.0)
        wait_for(lambda: "OB" in status(address))
        wait_for(lambda: "OL" in status(address))
        wait_for(lambda: len({truth.mains for truth in supply.truths[-20:]}) == 1 and supply.truths[-1].mains)
        assert not supply.flat
        at = supply.die()
        assert supply.flat
        assert supply.flat_at == at
        assert supply.charge_pct > 80.0
        supply.restore_mains()
        assert not supply.flat


@pytest.mark.slow
def test_a_lapse_spends_the_rest_of_the_battery_sooner():
    """Thirty times as fast: half a minute of battery is gone in about a second."""
    with power(replace(choose("blackout"), runtime_s=30.0), clock) as (supply, _, _):
        supply.cut_mains()
        supply.lapse(30.0)
        wait_for(lambda: supply.flat, seconds=8.0)


@pytest.mark.slow
@pytest.mark.nut
def test_the_same_battery_is_seen_through_a_real_upsd():
    """With --nut the status comes through dummy-ups and upsd."""
    if missing():
        pytest.skip(missing())
    with power(replace(choose("blackout", nut=True), runtime_s=30.0), clock) as (supply, address, _):
        assert "OL" in status(address)
        supply.cut_mains()
        wait_for(lambda: "OB" in status(address))
        supply.restore_mains()
        wait_for(lambda: "OL" in status(address))

"""The simulated UPS: physics within what vendors publish, and a firmware that reports beliefs."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from powerguard.sim.battery import SimUps, UpsSpec, rated_curve, rated_runtime_s
from powerguard.sim.cells import LFP, VRLA, Battery, Losses, build
from powerguard.sim.firmware import FirmwareSpec

# Runtime at a load as a multiple of the runtime at full load, smallest and largest of the APC 650/1000 VA tables
# (manualsdir.com/manuals/45036, p. 22) and the Liebert GXT3 internal table (manualsdump.com, emerson-gxt3_230v, p. 42).
VENDOR_STRETCH = {80: (1.33, 1.33), 70: (1.55, 1.56), 50: (2.3, 2.42), 30: (4.4, 4.7), 20: (5.7, 8.2)}

# Eaton BladeUPS manual, Table 15, one battery module: volts per cell with 2, 3, 4, 5 minutes left, by load
# (easymanua.ls/eaton/bladeups/manual?p=121).
BLADE = {
    100: (1.854, 1.891, 1.918, 1.941),
    50: (1.821, 1.848, 1.868, 1.884),
    20: (1.783, 1.805, 1.822, 1.835),
}


def run_flat(spec: UpsSpec, load_pct: float, *, seed: int = 1, dt: float = 1.0) -> list[tuple[float, SimUps]]:
    """Discharges from full and returns the UPS with the instant of its end."""
    ups, t = SimUps(spec, seed, load_pct=load_pct), 0.0
    while ups.alive:
        ups.step(dt, mains=False, load_pct=load_pct)
        t += dt
    return [(t, ups)]


@pytest.mark.parametrize("load", VENDOR_STRETCH)
@pytest.mark.parametrize("full_load_s", [300.0, 348.0, 540.0])
def test_runtime_stretches_with_less_load_as_vendors_publish(load, full_load_s):
    """Internal batteries: runtime at part load is within 12 % of what the published tables span."""
    low, high = VENDOR_STRETCH[load]
    stretch = rated_runtime_s(UpsSpec(full_load_s=full_load_s), load) / full_load_s

    assert low * 0.88 <= stretch <= high * 1.12


@pytest.mark.parametrize(
    ("full_load_s", "low", "high"),
    [(258.0, 1.15, 1.50), (348.0, 1.15, 1.50), (540.0, 1.15, 1.50), (1800.0, 0.85, 1.30), (3180.0, 0.80, 1.25)],
)
def test_exponent_above_half_load_is_in_the_published_range(full_load_s, low, high):
    """T ~ load^-k above half load: 1.20-1.46 inside (APC, Liebert), 0.86-1.21 with one to four cabinets."""
    spec = UpsSpec(full_load_s=full_load_s)
    k = math.log(rated_runtime_s(spec, 50) / rated_runtime_s(spec, 100)) / math.log(2)

    assert low <= k <= high


@pytest.mark.parametrize("load", BLADE)
def test_volts_near_the_end_follow_eatons_table(load):
    """A 12-minute battery shows Eaton's volts per cell with 2..5 minutes left, within 20 mV at every load."""
    losses, battery = Losses(0.03, 0.05), Battery(build(VRLA, 741.0))
    dc = losses.dc(load / 100)
    end = battery.lasts_s(dc)
    for minutes, volts in zip((5, 4, 3, 2), reversed(BLADE[load]), strict=True):
        battery.discharge(end - 60.0 * minutes - battery.loaded_s, dc)

        assert volts == pytest.approx(battery.cell_v(dc), abs=0.02)


def test_lithium_hardly_minds_the_rate():
    """LFP: capacity is nearly independent of the rate, k between 1.00 and 1.10, and the volts stay flat until late."""
    spec = UpsSpec(chemistry="lfp", losses=Losses(0.0, 0.0))
    k = math.log(rated_runtime_s(spec, 50) / rated_runtime_s(spec, 100)) / math.log(2)
    battery = Battery(build(LFP, 300.0))
    early = battery.cell_v(1.0)
    battery.discharge(240.0, 1.0)

    assert 1.0 <= k <= 1.10
    assert early - battery.cell_v(1.0) < 0.12


@pytest.mark.parametrize("phi", [1.0, 0.8, 0.4])
@pytest.mark.parametrize("load", [30, 70, 100])
def test_the_truth_is_what_happens(phi, load):
    """`truth_s` at the start is the second at which the output goes off."""
    spec = UpsSpec(phi=phi)
    promised = SimUps(spec, 1, load_pct=load).truth_s(load)
    [(end, _)] = run_flat(spec, load)

    assert promised == pytest.approx(end, abs=1.01)


@given(
    phi=st.floats(0.2, 1.0),
    weakest=st.floats(0.05, 1.0),
    load=st.floats(10, 100),
    at=st.floats(0, 1),
    down=st.floats(0.1, 1),
)
@settings(max_examples=60, deadline=None)
def test_less_load_never_shortens_the_life(phi, weakest, load, at, down):
    """At any moment, a lighter load lasts at least as long: recovery is real, and never negative."""
    ups = SimUps(UpsSpec(phi=phi, weakest=weakest), 1, load_pct=load)
    ups.step(at * ups.truth_s(load), mains=False, load_pct=load)

    assert ups.truth_s(load * down) >= ups.truth_s(load) - 1e-6


@given(phi=st.floats(0.2, 1.0), weakest=st.floats(0.05, 0.99), load=st.floats(10, 100))
@settings(max_examples=60, deadline=None)
def test_age_and_weak_blocks_never_lengthen_the_life(phi, weakest, load):
    """A worse battery carries a load for less time than a new one; the rest of the UPS doesn't matter."""
    spec = UpsSpec()
    new, aged = SimUps(spec).truth_s(load), SimUps(replace(spec, phi=phi)).truth_s(load)
    weak = SimUps(replace(spec, phi=phi, weakest=weakest)).truth_s(load)

    assert weak <= aged <= new + 1e-6


@pytest.mark.parametrize(("blocks", "opens", "fatal"), [(4, False, True), (20, False, False), (20, True, True)])
def test_what_a_weak_block_does(blocks: int, opens: bool, fatal: bool):
    """An exhausted block of four takes the string below its cut-off; one of twenty costs a tenth of a volt per cell,
    which shows, unless it opens: then all is over without a word."""
    spec = UpsSpec(blocks=blocks, weakest=0.3, opens=opens)
    [(healthy, _)] = run_flat(replace(spec, weakest=1.0), 60)
    ups, shown, end = SimUps(spec, 1, load_pct=60), [], 0.0
    while ups.alive:
        ups.step(1.0, mains=False, load_pct=60)
        end += 1.0
        shown.append(float(ups.variables()["battery.voltage"]) / spec.series)

    assert (end < 0.4 * healthy) == fatal
    if not fatal:
        fall = max(before - after for before, after in zip(shown[60:], shown[63:], strict=False))
        assert 0.05 < fall < 0.2


def test_an_optimistic_firmware_ends_in_a_cliff():
    """Believing in a new battery, a firmware promises minutes to one of 40 % as it dies; LB never came."""
    [(end, ups)] = run_flat(UpsSpec(phi=0.4, firmware=FirmwareSpec(belief=1.0)), 70)

    assert end < 200
    assert float(ups.variables()["battery.runtime"]) > 200
    assert "LB" not in ups.variables()["ups.status"]


def test_a_knee_in_the_volts_brings_lb_where_the_count_does_not():
    """The same battery with a firmware that watches its volts: LB comes before the end."""
    ups = SimUps(UpsSpec(phi=0.4, firmware=FirmwareSpec(knee_v=1.80)), 1, load_pct=70)
    while "LB" not in ups.status:
        ups.step(1.0, mains=False, load_pct=70)

    assert ups.alive
    assert 2 < ups.truth_s() < 120


def test_voltage_firmware_plunges_at_once_on_a_healthy_battery():
    """Charge mapped from loaded volts reads 40-80 % within the first half minute of a healthy discharge."""
    ups = SimUps(UpsSpec(firmware=FirmwareSpec(kind="voltage")), 1, load_pct=70)
    before = float(ups.variables()["battery.charge"])
    ups.step(25.0, mains=False, load_pct=70)

    assert before == 100
    assert 40 <= float(ups.variables()["battery.charge"]) <= 80


def test_values_are_the_mains_values_until_the_refresh():
    """A driver that polls fully every 30 s shows OB at once and the mains' numbers for up to 30 s."""
    ups = SimUps(UpsSpec(firmware=FirmwareSpec(refresh_s=30.0)), 3, load_pct=20)
    stale = [ups.variables()]
    for _ in range(60):
        ups.step(1.0, mains=False, load_pct=70)
        stale.append(ups.variables())
    changed = next(i for i, v in enumerate(stale) if v["ups.load"] != stale[0]["ups.load"])

    assert stale[1]["ups.status"] == "OB DISCHRG"
    assert stale[changed - 1]["input.voltage"] == "230.0"
    assert stale[changed - 1]["battery.voltage"] == stale[0]["battery.voltage"]
    assert 1 <= changed <= 30
    assert len({v["battery.voltage"] for v in stale}) == 3


def test_quanta_and_missing_values():
    """Values come in the model's quanta, and one that isn't reported is missing, not zero."""
    firmware = FirmwareSpec(runtime_quantum_s=60.0, charge_quantum_pct=5.0, voltage_quantum_v=None)
    ups = SimUps(UpsSpec(firmware=firmware), 1, load_pct=40)
    for _ in range(200):
        ups.step(1.0, mains=False, load_pct=40)
        shown = ups.variables()

        assert float(shown["battery.runtime"]) % 60 == 0
        assert float(shown["battery.charge"]) % 5 == 0
        assert "battery.voltage" not in shown


def test_mains_bring_the_output_and_the_charge_back():
    """A flat UPS is off until mains return; then it charges, 80 % within `recharge_s`, and says CHRG."""
    spec = UpsSpec(recharge_s=1000.0)
    [(_, ups)] = run_flat(spec, 60)
    ups.step(10.0, mains=False, load_pct=60)
    dead = ups.alive
    ups.step(1.0, mains=True, load_pct=60)
    charging = ups.status
    for _ in range(900):
        ups.step(1.0, mains=True, load_pct=60)

    assert not dead
    assert ups.alive
    assert "CHRG" in charging.split()
    assert 0.6 < ups.battery.soc < 0.95


def test_same_seed_same_story():
    """Two UPSes of one spec and seed report the same values for ever; another seed refreshes at other instants."""
    spec = UpsSpec(firmware=FirmwareSpec(refresh_s=10.0))
    stories = []
    for seed in (1, 1, 2):
        ups, story = SimUps(spec, seed), []
        for i in range(100):
            ups.step(1.0, mains=False, load_pct=50 + i % 20)
            story.append(ups.variables())
        stories.append(story)

    assert stories[0] == stories[1]
    assert stories[0] != stories[2]


@pytest.mark.parametrize("runtime_s", [10.0, 40.0, 90.0])
def test_the_small_preset_lasts_as_long_as_it_says(runtime_s):
    """`UpsSpec.small` carries 70 % for *runtime_s*, gives LB before the end, and lasts longer at idle."""
    spec = UpsSpec.small(runtime_s)
    ups, t, low_at = SimUps(spec, 1, load_pct=70), 0.0, None
    while ups.alive:
        ups.step(0.25, mains=False, load_pct=70)
        t += 0.25
        low_at = t if low_at is None and "LB" in ups.status else low_at
    [(idle, _)] = run_flat(spec, 20, dt=0.25)

    assert runtime_s == pytest.approx(t, abs=0.6)
    assert low_at is not None
    assert 0.1 * runtime_s < t - low_at < 0.35 * runtime_s
    assert idle > 2.5 * runtime_s


def test_the_curve_in_the_rom_is_the_table():
    """The interpolated curve is within 1 % of the closed form over the whole range of loads."""
    spec = UpsSpec(full_load_s=400.0)
    curve = rated_curve(spec.chemistry, spec.full_load_s, spec.losses, spec.tau_s)
    for load in (3, 10, 33, 50, 77, 100, 108):
        assert curve(load / 100) == pytest.approx(rated_runtime_s(spec, load), rel=0.01)

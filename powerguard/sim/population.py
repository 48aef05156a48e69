"""A population of UPSes and outages to judge policies on: every share and spread is named here, and explained in
docs/simulation.md with its source, or marked there as assumed.

`models(seed)` draws UPS models as a market has them; `outage(seed, models, n, flaws)` draws one outage that befalls one
of them: battery age, charge, load, firmware's belief, gaps in the data, when mains return. Tuning and reporting use
other seeds *and* other models (`TUNING`, `REPORTING`), so that a policy can't be fitted to what it is judged on.

It ranks policies and finds their weak spots. It is no evidence from the field.
"""

from __future__ import annotations

import math
from random import Random

from msgspec import Struct
from msgspec.structs import replace

from powerguard.sim.battery import UpsSpec, rated_runtime_s
from powerguard.sim.cells import CHEMISTRIES, Losses
from powerguard.sim.firmware import FirmwareSpec

TUNING = 20_260
REPORTING = 77_031
MODELS = 400


class Flaws(Struct, frozen=True):
    """What a stress test makes worse than the population has it; the defaults leave it alone."""

    name: str = "none"
    runtime_factor: float = 1.0  # firmware believes in this much more
    gap_share: float | None = None  # share of outages with a gap of *gap_s*
    gap_s: float | None = None
    swing: float | None = None
    cutoff_v: float | None = None
    resistance: float = 1.0
    no_voltage: bool = False
    refresh_s: float | None = None
    never_learns: bool = False  # no recalibration, no knee, no LB ever
    need_factor: float = 1.0  # the flush takes this many times what was measured
    ideal: bool = False  # calibrated, 2 s, knee


FLAWS = {
    flaws.name: flaws
    for flaws in (
        Flaws(),
        Flaws("runtime-1.4x", runtime_factor=1.4),
        Flaws("gaps", gap_share=0.30, gap_s=60.0),
        Flaws("swings", swing=0.35),
        Flaws("cutoff-1.75", cutoff_v=1.75),
        Flaws("resistance", resistance=1.5),
        Flaws("no-voltage", no_voltage=True),
        Flaws("refresh-30s", refresh_s=30.0),
        Flaws("never-learns", never_learns=True),
        Flaws("need-1.5x", need_factor=1.5),
        Flaws("ideal-firmware", ideal=True),
    )
}


class Model(Struct, frozen=True):
    """One product: what all its units share."""

    spec: UpsSpec
    gain: float  # of its runtime computation
    learning: str  # "never", "partly", "calibrated": how its units know their capacity


class Load(Struct, frozen=True):
    """What hangs on the output, in percent of the rating."""

    mains_pct: float  # shown while training on mains
    train_pct: float
    flush_pct: float
    idle_pct: float
    halt_pct: float
    other_pct: float  # gear that isn't the node: switches, storage
    swing: float  # of two-second averages while training

    def capped(self, share: float) -> float:
        """While training with the node's power capped to *share*."""
        return self.other_pct + share * (self.train_pct - self.other_pct)


class Outage(Struct, frozen=True):
    """One outage at one UPS."""

    n: int
    seed: int  # of the load's swings and the firmware's phase
    spec: UpsSpec
    load: Load
    age_y: float
    age_known: bool  # the operator wrote down when the battery was put in
    rated: tuple[tuple[float, float], ...]  # points of the vendor's table in the configuration, if any
    weak: bool
    recent: bool  # an earlier outage left it short of charge
    learned_phi: float  # what a calibration discharge had measured, with its error
    lasts_s: float  # until mains return
    flush_x: float  # actual flush as a multiple of what was measured
    halt_s: float  # from the halt order to power no longer needed
    gap_at: float  # readings go stale here ...
    gap_s: float  # ... for this long; 0 = no gap

    @property
    def maintained(self) -> bool:
        """A battery of at most four years, charged, with no weak block."""
        return self.age_y <= 4.0 and not self.weak and not self.recent


def _lognormal(rng: Random, median: float, sigma: float) -> float:
    return median * math.exp(rng.gauss(0.0, sigma))


def _pick(rng: Random, shares: dict[str, float]) -> str:
    return rng.choices(list(shares), list(shares.values()))[0]


# ---- UPS models ------------------------------------------------------------------------------------


def models(seed: int, count: int = MODELS) -> tuple[Model, ...]:
    """The market: *count* models drawn from *seed*."""
    rng = Random(f"models {seed}")
    return tuple(_model(rng, i) for i in range(count))


def _model(rng: Random, i: int) -> Model:
    full_load_s = _lognormal(rng, 300.0, 0.40)
    packs = rng.random() < 0.22
    if packs:
        full_load_s *= rng.uniform(2.0, 5.0)
    chemistry = "lfp" if rng.random() < 0.12 else "vrla"
    firmware, learning = _firmware(rng, chemistry, _low_runtime(rng, full_load_s))
    spec = UpsSpec(
        model=f"Sim {i}",
        chemistry=chemistry,
        full_load_s=full_load_s,
        blocks=rng.choices([2, 3, 4, 6, 8, 16, 20], [15, 10, 35, 12, 10, 10, 8])[0],
        tells_type=rng.random() < 0.70,
        losses=Losses(rng.uniform(0.015, 0.035), rng.uniform(0.03, 0.07)),
        firmware=firmware,
    )
    return Model(spec, _lognormal(rng, 1.04, 0.06), learning)


def _low_runtime(rng: Random, full_load_s: float) -> float:
    """battery.runtime.low: 120/180/300/600 s in 50/12/33/5 % of the dumps; the larger on the larger batteries."""
    if full_load_s > 900.0:
        return rng.choice([300.0, 300.0, 600.0])
    if full_load_s > 320.0:
        return rng.choices([120.0, 180.0, 300.0], [20, 20, 60])[0]
    return 120.0 if rng.random() < 0.92 else 180.0


def _firmware(rng: Random, chemistry: str, low_runtime_s: float) -> tuple[FirmwareSpec, str]:
    kind = _pick(rng, {"coulomb": 0.60, "voltage": 0.25, "qx": 0.15})
    cell = CHEMISTRIES[chemistry]
    if chemistry == "lfp":
        empty_v, full_v = rng.uniform(2.80, 3.00), rng.uniform(3.28, 3.32)
    elif kind == "qx":
        empty_v, full_v = 1.733, 2.167
    else:
        empty_v, full_v = rng.uniform(1.68, 1.75), rng.uniform(2.05, 2.13)
    lb = _pick(rng, {"claim": 0.92, "never": 0.06, "at once": 0.02})
    knee = (rng.random() < 0.75 or kind == "qx") and lb == "claim"
    spec = FirmwareSpec(
        kind=kind,
        refresh_s=float(_pick(rng, {"2": 0.50, "6": 0.20, "30": 0.25, "60": 0.05})),
        runtime_quantum_s=None if kind == "qx" and rng.random() < 0.70 else (60.0 if rng.random() < 0.42 else 1.0),
        charge_quantum_pct=float(_pick(rng, {"1": 0.85, "5": 0.10, "20": 0.05})),
        voltage_quantum_v=None if rng.random() < 0.12 and kind != "qx" else 0.1,
        filter_s=rng.uniform(3.0, 30.0),
        absurd_runtime_s=rng.choice([0.0, 65535.0, 3932100.0]) if rng.random() < 0.04 else None,
        full_until=0.9 if rng.random() < 0.10 else 1.0,
        low_runtime_s=low_runtime_s,
        low_charge_pct=float(_pick(rng, {"10": 0.55, "20": 0.22, "30": 0.15, "5": 0.08})),
        lb="knee" if kind == "qx" and lb == "claim" else lb,
        knee_v=cell.cutoff_v + rng.uniform(0.03, 0.18) if knee else 0.0,
        knee_snaps=knee and rng.random() < 0.3,
        empty_v=empty_v,
        full_v=full_v,
    )
    learning = _pick(rng, {"never": 0.35, "partly": 0.40, "calibrated": 0.25})
    return spec, learning


# ---- batteries -------------------------------------------------------------------------------------


def health(rng: Random, age_y: float, chemistry: str) -> tuple[float, float]:
    """(share of the new capacity left, life in years) of a battery of this age somewhere warm or cool."""
    warmer_c = max(0.0, rng.gauss(0.0, 4.0))
    life_y = _lognormal(rng, 4.6 if chemistry == "vrla" else 10.0, 0.22) * 2.0 ** (-warmer_c / 10.0)
    spent = age_y / life_y
    phi = 1.0 - 0.2 * spent**1.5 if spent <= 1.0 else 0.8 * math.exp(-2.2 * (spent - 1.0))
    today = 1.0 + 0.008 * rng.gauss(0.0, 3.0)  # this room's temperature, 0.8 % per degree
    return max(0.05, phi * today * _lognormal(rng, 1.0, 0.03)), life_y


def _belief(rng: Random, model: Model, phi: float) -> float:
    if model.learning == "never":
        knows = 1.0
    elif model.learning == "partly":
        knows = phi + (1.0 - phi) * rng.random()
    else:
        knows = phi
    return knows * model.gain * _lognormal(rng, 1.0, 0.10)


# ---- outages ---------------------------------------------------------------------------------------

PRIOR = ((0.45, 3.0, 0.8), (0.25, 18.0, 0.7), (0.10, 90.0, 0.7), (0.20, 3600.0, 1.2))
"""Length of what a daemon sees as OB: (weight, median seconds, sigma of the logarithm)."""


def duration_s(rng: Random) -> float:
    """How long mains stay away, for any event a UPS sees."""
    _, median, sigma = rng.choices(PRIOR, [weight for weight, _, _ in PRIOR])[0]
    return _lognormal(rng, median, sigma)


def repair_s(rng: Random, longer_than_s: float) -> float:
    """How long a repair takes, given that it takes longer than that."""
    _, median, sigma = PRIOR[-1]
    for _ in range(200):
        lasts = _lognormal(rng, median, sigma)
        if lasts > longer_than_s:
            return lasts
    return longer_than_s * rng.uniform(1.02, 1.5)


def outage(seed: int, market: tuple[Model, ...], n: int, flaws: Flaws = FLAWS["none"]) -> Outage:
    """The *n*-th outage of this seed. A flaw changes what it names and nothing else of the story."""
    rng = Random(f"outage {seed} {n}")
    model = rng.choice(market)
    age_y = rng.uniform(0.0, 5.0) if rng.random() < 0.82 else rng.uniform(5.0, 7.0)
    phi, life_y = health(rng, age_y, model.spec.chemistry)
    weak_share = min(0.08, 0.01 + 0.01 * age_y / life_y if age_y < life_y else 0.02 + 0.12 * (age_y / life_y - 1.0))
    weak = rng.random() < (weak_share if model.spec.chemistry == "vrla" else weak_share / 4)
    weakest, opens = rng.uniform(0.03, 0.45), rng.random() < 1.0 / 3.0
    recent = rng.random() < 0.12
    soc = rng.uniform(0.25, 0.95)
    measured = (phi * weakest) if weak and rng.random() < 0.7 else phi  # the others came after the calibration
    learned_phi = measured * _lognormal(rng, 1.0, 0.08)
    spec = replace(
        model.spec,
        age_y=age_y,
        phi=phi,
        weakest=weakest if weak else 1.0,
        opens=opens,
        soc=soc if recent else 1.0,
        firmware=replace(model.spec.firmware, belief=_belief(rng, model, phi)),
    )
    load = _load(rng, flaws)
    rated: tuple[tuple[float, float], ...] = ()
    if rng.random() < 0.30:
        rated = tuple((p, _table(model, p)) for p in (50.0, 100.0))
    gap_at, gap_s = _gap(rng, flaws)
    return Outage(
        n=n,
        seed=rng.getrandbits(48),
        spec=_flawed(spec, flaws, phi),
        load=load,
        age_y=age_y,
        age_known=rng.random() < 0.50,
        rated=rated,
        weak=weak,
        recent=recent,
        learned_phi=learned_phi,
        lasts_s=duration_s(rng),
        flush_x=_lognormal(rng, 1.0, 0.12) * flaws.need_factor,
        halt_s=_lognormal(rng, 30.0, 0.15),
        gap_at=gap_at,
        gap_s=gap_s,
    )


def _table(model: Model, load_pct: float) -> float:
    return rated_runtime_s(model.spec, load_pct)


def _load(rng: Random, flaws: Flaws) -> Load:
    train = rng.uniform(10.0, 95.0)
    other = train * rng.uniform(0.0, 0.25)
    node = train - other
    swing = rng.uniform(0.02, 0.15)
    return Load(
        mains_pct=train * rng.uniform(0.85, 1.05),
        train_pct=train,
        flush_pct=other + node * rng.uniform(0.32, 0.55),
        idle_pct=other + node * rng.uniform(0.22, 0.32),
        halt_pct=other + node * rng.uniform(0.20, 0.30),
        other_pct=other,
        swing=swing if flaws.swing is None else flaws.swing,
    )


def _gap(rng: Random, flaws: Flaws) -> tuple[float, float]:
    """(start, length) of the time without fresh data; 1.5 % lose it for good."""
    kind, at, length = rng.random(), rng.uniform(0.0, 1.0) ** 2 * 900.0, _lognormal(rng, 15.0, 0.7)
    if flaws.gap_share is not None and flaws.gap_s is not None:
        return at, (flaws.gap_s if kind < flaws.gap_share else 0.0)
    if kind < 0.015:
        return at, math.inf
    return at, (length if kind < 0.095 else 0.0)


def _flawed(spec: UpsSpec, flaws: Flaws, phi: float) -> UpsSpec:
    firmware = spec.firmware
    changes: dict[str, object] = {"belief": firmware.belief * flaws.runtime_factor}
    if flaws.no_voltage:
        changes["voltage_quantum_v"] = None
    if flaws.refresh_s is not None:
        changes["refresh_s"] = flaws.refresh_s
    if flaws.never_learns:
        changes |= {"belief": firmware.belief / min(1.0, phi), "knee_v": 0.0, "knee_snaps": False, "lb": "never"}
    if flaws.ideal:
        lead = spec.chemistry == "vrla"
        changes |= {"kind": "coulomb", "belief": phi, "refresh_s": 2.0, "runtime_quantum_s": 1.0, "full_until": 1.0}
        changes |= {"charge_quantum_pct": 1.0, "voltage_quantum_v": 0.1, "absurd_runtime_s": None, "lb": "claim"}
        changes |= {"knee_v": 1.76 if lead else 2.9, "knee_snaps": True}
    lead_cutoff = flaws.cutoff_v if spec.chemistry == "vrla" else None
    return replace(spec, resistance=flaws.resistance, cutoff_v=lead_cutoff, firmware=replace(firmware, **changes))

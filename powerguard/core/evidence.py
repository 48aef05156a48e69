"""What independent witnesses say about the seconds left: the charge, and the runtime of the firmware.

Each witness is a frozen value that takes in what was reported and answers with `seconds` at the present load, known
*at* an instant; a negative `seconds` means "nothing to say". Rules of all three:

1. Only a fresh value moves a witness. Between fresh values its answer runs down with the clock, by itself: the
   answer is the instant `at + seconds`, and a value that is missing, stale or a sentinel leaves that instant alone.
2. No rate is taken across the transfer: for up to `driver.parameter.pollfreq` a UPS shows the mains' values
   (NUT drivers/usbhid-ups.c does a full update only then).
3. A load step ends a rate. The old one, scaled, stays in force until a new one is measured.

Seconds here are *estimator seconds*: `runway.py` divides real ones by `Policy.time_scale` (1 outside of drills).
Sources of the constants: "population" = tuned on 20,000 simulated outages built from published tables, manuals and
718 NUT device dumps, checked on others; "dumps" = the NUT device dump library.
"""

from __future__ import annotations

from msgspec import Struct

# ---- charge ----------------------------------------------------------------------------------------

CHARGE_FROM_S = 12.0  # population: the transfer's step is over (a gauge fell 99 -> 78 in 5 s: geeekpi/upsplus#18)
CHARGE_FLOOR_PCT = 8.0  # population: the last points are worth nothing (a 12 V pack reads 9 % ... 1 % at its end)
CHARGE_QUANTA = 3.0  # a slope needs so many steps of the reported charge
CHARGE_FALL_PCT = 12.0  # ... or a fall of so much, at once
CHARGE_NEAR_QUANTA = 4.0  # the near slope spans so many steps
CHARGE_NEAR_PCT = 5.0  # ... and at least so many points
CHARGE_AGAIN_S = 45.0  # population: after a load step the old slope holds so long

# ---- firmware runtime ------------------------------------------------------------------------------

RUNTIME_FROM_S = 24.0  # population: firmware filters its load for 3-30 s
RUNTIME_QUANTUM_S = 6.0  # assumed until steps are seen
RUNTIME_MINUTE_S = 60.0  # dumps: 42 % of runtimes are whole minutes
RUNTIME_USED = 0.12  # the mean rate needs so much of the runtime used
RUNTIME_QUANTA = 1.5  # ... and so many steps
RUNTIME_NEAR = 0.15  # the recent rate spans so much of the runtime
RUNTIME_EW_S = 12.0  # a runtime above its own mean over so long, plus a step, isn't believed
RUNTIME_LOAD_EXPONENT = 1.2  # published tables: 1.2-1.5 above half load, about 1 below
RUNTIME_AGAIN_S = 75.0  # population: after a load step the old rate holds so long
KAPPA_MAX = 20.0


class Charge(Struct, frozen=True):
    """The charge and how fast it falls, in points per second."""

    seconds: float = -1.0
    at: float = 0.0
    value: float = -1.0  # last believed, -1 = none in this discharge
    changed_at: float = 0.0
    quantum: float = 0.0  # smallest fall seen; 0 = none yet
    begun_at: float = -1.0  # first look after the transfer
    begun: float = 0.0
    first_at: float = -1.0  # first change after that: a change tells the charge exactly
    first: float = 0.0
    marks: tuple[tuple[float, float], ...] = ()  # (instant, charge), at least a point apart, oldest first
    slope: float = 0.0  # measured since the last step; 0 = none yet
    slope_at: float = 0.0
    old_slope: float = 0.0  # before the last load step, scaled
    stepped_at: float = -1e9


def see_charge(was: Charge, value: float, now: float, *, settled: bool, floor: float) -> Charge:
    """*value* came with a fresh reading. *settled*: the transfer is over, rates may begin."""
    if was.value < 0.0:
        return Charge(value=value, changed_at=now, begun_at=now if settled else -1.0, begun=value)
    step = was.value - value
    if step == 0.0 and (was.begun_at >= 0.0 or not settled):
        return was
    quantum = was.quantum
    if step > 0.0 and settled:
        quantum = min(quantum, step) if quantum else step
    begun_at, begun, first_at, first = was.begun_at, was.begun, was.first_at, was.first
    marks, slope, slope_at = was.marks, was.slope, was.slope_at
    if settled:
        if begun_at < 0.0 or value > begun:  # the first look, or a gauge that rose: begin anew
            begun_at, begun, first_at, marks = now, value, -1.0, ()
            if step > 0.0:
                first_at, first, marks = now, value, ((now, value),)
        elif step > 0.0:
            if first_at < 0.0:
                first_at, first, marks = now, value, ((now, value),)
            elif marks[-1][1] - value >= max(quantum, 1.0):
                marks = (*marks[-6:], (now, value))
            measured = _charge_slope(
                value, now, quantum, begun_at=begun_at, begun=begun, first_at=first_at, first=first, marks=marks
            )
            if measured > 0.0:
                slope, slope_at = measured, now
    new = Charge(
        was.seconds, was.at, value, now if step else was.changed_at, quantum,
        begun_at, begun, first_at, first, marks, slope, slope_at, was.old_slope, was.stepped_at,
    )  # fmt: skip
    return charge_says(new, now, floor) if step else new


def _charge_slope(
    value: float,
    now: float,
    quantum: float,
    *,
    begun_at: float,
    begun: float,
    first_at: float,
    first: float,
    marks: tuple[tuple[float, float], ...],
) -> float:
    """Points per second: the larger of the mean and the near one; 0 while neither is known."""
    mean = 0.0
    if first - value >= CHARGE_QUANTA * quantum and now > first_at:
        mean = (first - value) / (now - first_at)
    elif begun - value >= CHARGE_FALL_PCT and now > begun_at:
        mean = (begun - value) / (now - begun_at)
    span = max(CHARGE_NEAR_QUANTA * quantum, CHARGE_NEAR_PCT)
    for at, charge in reversed(marks):
        if charge - value >= span:
            return max(mean, (charge - value) / (now - at)) if now > at else mean
    return mean


def charge_says(charge: Charge, now: float, floor: float) -> Charge:
    """The same charge, with its answer made anew from the slope in force."""
    slope = charge.slope
    if charge.old_slope > 0.0 and (slope <= 0.0 or now - charge.stepped_at < CHARGE_AGAIN_S):
        slope = charge.old_slope
    if slope <= 0.0 or charge.value < 0.0:
        return charge
    return _answer_charge(charge, max(0.0, charge.value - floor) / slope, now)


def step_charge(charge: Charge, now: float, scale: float) -> Charge:
    """The load stepped: slopes begin anew, the old one times *scale* stays in force meanwhile."""
    slope = charge.slope or charge.old_slope
    return Charge(
        seconds=charge.seconds, at=charge.at, value=charge.value, changed_at=charge.changed_at,
        quantum=charge.quantum, begun_at=now if charge.value >= 0.0 else -1.0, begun=charge.value,
        old_slope=slope * scale, stepped_at=now,
    )  # fmt: skip


def _answer_charge(c: Charge, seconds: float, now: float) -> Charge:
    return Charge(
        seconds, now, c.value, c.changed_at, c.quantum, c.begun_at, c.begun, c.first_at, c.first,
        c.marks, c.slope, c.slope_at, c.old_slope, c.stepped_at,
    )  # fmt: skip


class Firmware(Struct, frozen=True):
    """The reported runtime, and *kappa*: reported seconds it uses per real one."""

    seconds: float = -1.0
    at: float = 0.0
    value: float = -1.0
    changed_at: float = 0.0
    mean: float = 0.0  # over RUNTIME_EW_S
    minutes: bool = True  # only whole minutes were ever seen
    quantum: float = 0.0  # smallest fall seen; 0 = none yet
    marks: tuple[tuple[float, float], ...] = ()  # (instant of a change, runtime at the reference load); [0]: first
    kappa: float = 1.0
    old_kappa: float = 1.0
    stepped_at: float = -1e9


def quantum_s(firmware: Firmware) -> float:
    """The step of the reported runtime."""
    if firmware.minutes:
        return RUNTIME_MINUTE_S
    return max(1.0, min(firmware.quantum or RUNTIME_QUANTUM_S, RUNTIME_MINUTE_S))


def see_runtime(
    was: Firmware, value: float, now: float, *, dt: float, settled: bool, load_ratio: float, period: float
) -> Firmware:
    """*value* came with a fresh reading, *dt* after the last; *load_ratio*: present load to the reference load."""
    minutes = was.minutes and value % RUNTIME_MINUTE_S == 0.0
    if was.value < 0.0:
        new = Firmware(value=value, changed_at=now, mean=value, minutes=minutes)
        return runtime_says(new, now, exact=False, period=period)
    step = was.value - value
    quantum = was.quantum
    if step > 0.0 and settled:
        quantum = min(quantum, step) if quantum else step
    mean = was.mean + (value - was.mean) * (dt / (RUNTIME_EW_S + dt))
    if step == 0.0:
        return _firmware(was, was.seconds, was.at, mean)
    marks, kappa = was.marks, was.kappa
    if settled:
        normal = value * load_ratio**RUNTIME_LOAD_EXPONENT
        if not marks:
            marks = ((now, normal),)
        else:
            kappa = _kappa(marks, normal, now, quantum_s(was))
            if marks[-1][1] - normal >= max(quantum_s(was), 0.03 * marks[0][1]):
                marks = (marks[0], *marks[1:][-6:], (now, normal))
    new = Firmware(
        was.seconds, was.at, value, now, mean, minutes, quantum, marks, kappa,
        was.old_kappa, was.stepped_at,
    )  # fmt: skip
    return runtime_says(new, now, exact=True, period=period)


def _kappa(marks: tuple[tuple[float, float], ...], normal: float, now: float, quantum: float) -> float:
    """Reported seconds used per second: the larger of the mean and the recent one, never below 1."""
    since, reference = marks[0]
    used = reference - normal
    if used < max(RUNTIME_USED * reference, RUNTIME_QUANTA * quantum) or now <= since:
        return 1.0
    kappa = max(1.0, used / (now - since))
    span = max(RUNTIME_NEAR * reference, RUNTIME_QUANTA * quantum)
    for at, runtime in reversed(marks):
        if runtime - normal >= span and now > at:
            kappa = max(kappa, (runtime - normal) / (now - at))
            break
    return min(KAPPA_MAX, kappa)


def runtime_says(firmware: Firmware, now: float, *, exact: bool, period: float) -> Firmware:
    """The same runtime, with its answer made anew. *exact*: it has just changed, which tells it to a refresh."""
    quantum = quantum_s(firmware)
    short = min(quantum / 2.0, max(0.0, period - quantum / 2.0)) if exact else quantum / 2.0
    believed = min(firmware.value, firmware.mean + quantum)
    kappa = firmware.kappa
    if firmware.old_kappa > 1.0 and (kappa <= 1.0 or now - firmware.stepped_at < RUNTIME_AGAIN_S):
        kappa = max(kappa, firmware.old_kappa)
    seconds = max(0.0, believed - short) / kappa
    return _firmware(firmware, seconds, now, firmware.mean)


def step_runtime(firmware: Firmware, now: float) -> Firmware:
    """The load stepped: the rate begins anew, the old one stays in force meanwhile."""
    kappa = max(firmware.kappa, firmware.old_kappa) if firmware.kappa <= 1.0 else firmware.kappa
    return Firmware(
        seconds=firmware.seconds, at=firmware.at, value=firmware.value, changed_at=firmware.changed_at,
        mean=firmware.value, minutes=firmware.minutes, quantum=firmware.quantum, old_kappa=kappa, stepped_at=now,
    )  # fmt: skip


def _firmware(f: Firmware, seconds: float, at: float, mean: float) -> Firmware:
    return Firmware(
        seconds, at, f.value, f.changed_at, mean, f.minutes, f.quantum, f.marks, f.kappa, f.old_kappa, f.stepped_at
    )

"""The chemistry of one battery string: what it holds, what it gives at a load, what its terminals show.

Two wells (Manwell and McGowan's kinetic battery model, 1993): a load empties the *available* well, the *bound* one
follows through a diffusion with time constant `tau_s`. So a high load gets less out, and a lighter load gives some
back. Energy is counted in *seconds at full load* (1.0 = what the inverter draws at 100 % load for one second), which
makes every UPS comparable. A step at constant power is exact, not integrated.

The lead-acid constants were fitted to Table 15 of the Eaton BladeUPS manual (volts per cell with 2..5 minutes left at
20, 50 and 100 % load; rms 3 mV at a full-load runtime of 12 minutes); tests hold them to it, and to the runtime tables
that vendors publish. docs/simulation.md lists what is assumed beyond that.
"""

from __future__ import annotations

import math

from msgspec import Struct
from msgspec.structs import replace

_EMPTY_H = 0.02  # a weak block below this share of its own available well is exhausted ...
_REVERSED_V = -0.2  # ... and shows this per cell while the others force their current through it


class Chemistry(Struct, frozen=True):
    """Constants of one kind of cell; volts are per cell, `r_v` is the drop at full load of a *ref_s* battery."""

    name: str
    c: float  # share of the capacity in the available well
    tau_s: float
    rest_v: float
    slope_v: float  # lost from full to empty
    knee_v: float
    knee_w: float
    r_v: float
    ref_s: float
    r_max_v: float
    r_exponent: float  # a battery with less runtime has smaller plates: r grows as (ref_s / full_load_s) ** this
    dip_v: float  # coup de fouet: depth at full load
    dip_s: float
    float_v: float
    cutoff_v: float


VRLA = Chemistry("vrla", 0.414, 341.0, 2.129, 0.196, 0.175, 0.095, 0.049, 741.0, 0.17, 0.9, 0.03, 12.0, 2.27, 1.67)
LFP = Chemistry("lfp", 0.93, 120.0, 3.30, 0.06, 0.55, 0.025, 0.05, 741.0, 0.15, 0.3, 0.0, 12.0, 3.40, 2.75)
CHEMISTRIES = {chemistry.name: chemistry for chemistry in (VRLA, LFP)}


class Losses(Struct, frozen=True):
    """Inverter draw: dc = (p + standby + copper * p^2) / (1 + standby + copper), p = output / rating."""

    standby: float = 0.025
    copper: float = 0.05

    def dc(self, p: float) -> float:
        """Battery power at output *p*, 1.0 at full load."""
        return (p + self.standby + self.copper * p * p) / (1.0 + self.standby + self.copper)


class Cells(Struct, frozen=True):
    """One string as it is built and as it has become: constants of `Battery`."""

    chemistry: Chemistry
    capacity_s: float  # when new, both wells
    phi: float  # share of that left by age and temperature
    r_v: float
    cutoff_v: float
    missing_s: float  # the weakest block holds this much less than the rest
    blocks: int = 4  # 12 V blocks in series: a weak one shows in the string's volts by its share
    opens: bool = False  # the weakest block fails open when it is exhausted, and takes the string with it

    @property
    def full_s(self) -> float:
        """Both wells of a charged string."""
        return self.capacity_s * self.phi

    def weakest_head(self, head: float) -> float:
        """The head of the weakest block when the others are at *head*: the same current has passed through all."""
        return (head * self.full_s - self.missing_s) / (self.full_s - self.missing_s)


def build(
    chemistry: Chemistry,
    full_load_s: float,
    *,
    phi: float = 1.0,
    resistance: float = 1.0,
    cutoff_v: float | None = None,
    weakest: float = 1.0,
    blocks: int = 4,
    opens: bool = False,
    tau_s: float | None = None,
) -> Cells:
    """A string that, new and charged, carries full load for *full_load_s*; then aged to *phi* of its capacity.

    *resistance* multiplies the healthy resistance, *weakest* is the capacity of the worst block as a share of the
    others'. A *cutoff_v* other than the chemistry's shortens the runtime: the plates stay as designed.
    """
    if tau_s is not None:
        chemistry = replace(chemistry, tau_s=tau_s)
    new_r = min(chemistry.r_max_v, chemistry.r_v * (chemistry.ref_s / full_load_s) ** chemistry.r_exponent)
    new = Cells(chemistry, 1.0, 1.0, new_r, chemistry.cutoff_v, 0.0)
    lag = _lag(chemistry, full_load_s) * (1.0 - chemistry.c)
    capacity = (full_load_s + lag) / (1.0 - head_at(new, 1.0, chemistry.cutoff_v))
    aged_r = new_r * resistance * (1.0 + 0.8 * (1.0 / phi - 1.0))
    cutoff = chemistry.cutoff_v if cutoff_v is None else cutoff_v
    return Cells(chemistry, capacity, phi, aged_r, cutoff, capacity * phi * (1.0 - weakest), blocks, opens)


def _lag(chemistry: Chemistry, seconds: float) -> float:
    """Difference of the two heads after *seconds* at full load from rest."""
    return chemistry.tau_s / chemistry.c * (1.0 - math.exp(-seconds / chemistry.tau_s))


def volts(cells: Cells, head: float, dc: float) -> float:
    """Volts per cell at the available *head* (0..1) under *dc*, without the dip of the first seconds."""
    kind = cells.chemistry
    spent = 1.0 - head
    knee = kind.knee_v * math.exp(-max(head, -0.3) / kind.knee_w)
    return kind.rest_v - kind.slope_v * spent - knee - cells.r_v * dc * (1.0 + 0.06 * spent)


def string_volts(cells: Cells, head: float, dc: float) -> float:
    """`volts` in the mean over a string that may hold one weak block; far below any cut-off if that has opened."""
    healthy = volts(cells, head, dc)
    if not cells.missing_s:
        return healthy
    own = cells.weakest_head(head)
    if own > _EMPTY_H:
        weak = volts(cells, own, dc)
    elif cells.opens:
        return 0.0
    else:
        weak = _REVERSED_V
    return healthy + (weak - healthy) / cells.blocks


def head_at(cells: Cells, dc: float, cell_v: float) -> float:
    """The head at which the string shows *cell_v* under *dc*; 0 if it runs empty above it, 1 if it never reaches it."""
    low, high = 0.0, 1.0
    if string_volts(cells, low, dc) >= cell_v:
        return low
    for _ in range(30):
        middle = (low + high) / 2.0
        if string_volts(cells, middle, dc) > cell_v:
            high = middle
        else:
            low = middle
    return high


class Battery:
    """What one string holds now. `discharge` and `charge` move it on; everything else only looks."""

    __slots__ = ("_decay", "_decay_dt", "cells", "held_s", "lag_s", "loaded_s")

    def __init__(self, cells: Cells, soc: float = 1.0) -> None:
        self.cells = cells
        self.held_s = cells.full_s * soc  # energy of both wells
        self.lag_s = 0.0  # head of the bound well less that of the available one
        self.loaded_s = 0.0  # since the load came on: for the dip
        self._decay_dt = -1.0
        self._decay = 1.0

    def copy(self) -> Battery:
        """An independent twin, for a branch of a story."""
        twin = Battery(self.cells)
        twin.held_s, twin.lag_s, twin.loaded_s = self.held_s, self.lag_s, self.loaded_s
        return twin

    @property
    def head(self) -> float:
        """Level of the available well, 1.0 when full and rested."""
        return (self.held_s - (1.0 - self.cells.chemistry.c) * self.lag_s) / self.cells.full_s

    @property
    def soc(self) -> float:
        """Share of the present capacity that both wells hold."""
        return self.held_s / self.cells.full_s

    def discharge(self, dt_s: float, dc: float) -> None:
        """*dt_s* at constant battery power *dc*."""
        kind = self.cells.chemistry
        if dt_s != self._decay_dt:
            self._decay_dt, self._decay = dt_s, math.exp(-dt_s / kind.tau_s)
        settled = dc * kind.tau_s / kind.c
        self.lag_s = settled + (self.lag_s - settled) * self._decay
        self.held_s -= dc * dt_s
        self.loaded_s += dt_s

    def charge(self, dt_s: float, recharge_s: float) -> None:
        """*dt_s* on mains: 80 % of the capacity comes back in *recharge_s*, the rest four times as slowly."""
        full = self.cells.full_s
        rate = 0.8 * full / recharge_s * (1.0 if self.held_s < 0.8 * full else 0.25)
        self.held_s = min(full, self.held_s + rate * dt_s)
        self.lag_s *= math.exp(-dt_s / self.cells.chemistry.tau_s)
        self.loaded_s = 0.0

    def cell_v(self, dc: float) -> float:
        """Volts per cell under *dc* now, the dip of the first seconds included."""
        kind = self.cells.chemistry
        dip = 0.0
        if kind.dip_v and self.loaded_s < 10.0 * kind.dip_s:
            x = self.loaded_s / kind.dip_s
            dip = kind.dip_v * dc * x * math.exp(1.0 - x)
        return string_volts(self.cells, self.head, dc) - dip

    def flat(self, dc: float) -> bool:
        """The string can't carry *dc*: cut-off voltage, an empty well, or a block that opened."""
        head = self.head
        return head <= 0.0 or string_volts(self.cells, head, dc) <= self.cells.cutoff_v

    def lasts_s(self, dc: float, at_most_s: float = 1e6) -> float:
        """Seconds until `flat` at constant *dc* from now; the truth that firmware can only guess."""
        cells, kind = self.cells, self.cells.chemistry
        if self.flat(dc):
            return 0.0
        floor = head_at(cells, dc, cells.cutoff_v) * cells.full_s
        settled = dc * kind.tau_s / kind.c
        low, high = 0.0, min(at_most_s, self.held_s / dc)
        for _ in range(40):
            middle = (low + high) / 2.0
            lag = settled + (self.lag_s - settled) * math.exp(-middle / kind.tau_s)
            if self.held_s - dc * middle - (1.0 - kind.c) * lag > floor:
                low = middle
            else:
                high = middle
        return low

"""Outlets that a rig may switch, behind one method: `outlet.switch(on)`, which returns when the outlet says so itself.

A device's "OK" means that it was told, never that it did it: every driver reads the state back, and what can't be read
back is asked of the person who is present.
"""

from __future__ import annotations

from typing import TypeAlias

from hil.outlets.human import Human
from hil.outlets.nut import Nut
from hil.outlets.plugs import Shelly, Tasmota
from hil.outlets.snmp import Pdu
from hil.outlets.what import OutletFailed

Outlet: TypeAlias = Nut | Pdu | Shelly | Tasmota | Human

__all__ = ["Human", "Nut", "Outlet", "OutletFailed", "Pdu", "Shelly", "Tasmota"]

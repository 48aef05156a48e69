"""An outlet without electronics: the person who is present pulls the plug, and says that it is done."""

from __future__ import annotations

import sys

from hil.outlets.what import Named, OutletFailed


class Human(Named, frozen=True, tag="human"):
    """Asked on the terminal; the outlet's name is typed, so that a stray Enter switches nothing."""

    def switch(self, on: bool) -> None:
        """Returns when the person says so."""
        act = "Plug in" if on else "Pull the plug of"
        print(f"{act} {self.name} ({self.feeds}) now. When it is done, type: {self.name}", flush=True)
        if (line := sys.stdin.readline().strip()) != self.name:
            raise OutletFailed(f"{self.name}: {line!r} was typed", todo=f"type {self.name} when it is done")

"""Outlets of a switched rack PDU over SNMP, through net-snmp's own commands (Debian: `snmp`)."""

from __future__ import annotations

import shutil
import subprocess

from hil.outlets.what import Named, OutletFailed, secret, wait_for
from powerguard.errors import MissingDependency

APC_OUTLET = "1.3.6.1.4.1.318.1.1.12.3.3.1.1.4"
"""PowerNet's rPDUOutletControlOutletCommand: reading it returns the outlet's state, 1 on and 2 off, as set."""
TIMEOUT_S = 1
RETRIES = 2


class Pdu(Named, frozen=True, tag="snmp"):
    """One *outlet* of the PDU at *host* (`address:port`). *oid* and the values of on and off are APC's by default.

    SNMP v1 and v2c send the community in the clear: keep a PDU in a network of its own.
    """

    host: str
    outlet: int
    community_file: str
    version: str = "1"
    oid: str = APC_OUTLET
    on: int = 1
    off: int = 2

    def switch(self, on: bool) -> None:
        """Returns when the PDU says so."""
        self._call("snmpset", "i", str(self.on if on else self.off))
        wait_for(on, self._is_on, self)

    def _is_on(self) -> bool:
        said = self._call("snmpget")
        if said not in (str(self.on), str(self.off)):
            raise OutletFailed(f"{self.name} says that it is {said!r}", todo=f"it should say {self.on} or {self.off}")
        return said == str(self.on)

    def _call(self, program: str, *value: str) -> str:
        """The value alone."""
        if shutil.which(program) is None:
            raise MissingDependency(f"{program} isn't installed", todo="apt-get install snmp")
        command = [
            program, f"-v{self.version}", "-c", secret(self.community_file), "-Oqve", f"-t{TIMEOUT_S}", f"-r{RETRIES}",
            self.host, f"{self.oid}.{self.outlet}", *value,
        ]  # fmt: skip
        done = subprocess.run(command, check=False, capture_output=True, text=True, stdin=subprocess.DEVNULL)
        if done.returncode:
            why = (done.stderr.strip() or done.stdout.strip()).splitlines() or [f"{program} returned {done.returncode}"]
            raise OutletFailed(f"{self.name}: {why[0]}", todo="check address, community and outlet; switch it by hand")
        return done.stdout.strip().strip('"')

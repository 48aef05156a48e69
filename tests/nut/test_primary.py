"""The forced shutdown of a real NUT: seen, sticky, and waiting for us."""

from __future__ import annotations

import time

from powerguard.core.types import Comm
from powerguard.node.ups_client import CheckedClient

USER = {"user": "secondary", "password": "secondarypw"}

UPSMON = """
MONITOR demo@{host}:{port} 1 primary primarypw primary
MINSUPPLIES 1
SHUTDOWNCMD "/bin/touch {flag}"
POWERDOWNFLAG {killpower}
POLLFREQ 1
POLLFREQALERT 1
HOSTSYNC 60
DEADTIME 15
FINALDELAY 0
RUN_AS_USER {user}
"""


def test_the_primary_waits_until_we_log_out(nut, listen, eventually):
    """Low battery: upsmon sets FSD, which we see, and shuts its host down only once our LOGIN is gone."""
    listener = listen(**USER)
    listener.comm(Comm.OK)
    flag = nut.directory / "state" / "shutdown"
    nut.start_upsmon(
        UPSMON.format(
            host=nut.host,
            port=nut.port,
            flag=flag,
            killpower=nut.directory / "state" / "killpower",
            user=nut.as_user or "root",
        )
    )
    eventually(lambda: nut.ask("GET NUMLOGINS demo") == "NUMLOGINS demo 2")
    nut.set("demo", {"ups.status": "OB DISCHRG LB"})
    sample = listener.until(lambda sample: "FSD" in sample.variables.get("ups.status", "").split())[-1]
    assert sample.variables["ups.status"].split()[0] == "FSD"
    held_since = time.monotonic()
    while time.monotonic() < held_since + 3.0:  # far longer than the primary's polls
        assert not flag.exists()
        listener.samples.get(timeout=2.0)
    assert listener.reader.login_held
    listener.reader.close()
    eventually(flag.exists, within_s=5.0)
    nut.stop("upsmon")
    nut.set("demo", {"ups.status": "OL"})
    eventually(lambda: nut.ask("GET VAR demo ups.status") == 'VAR demo ups.status "FSD OL"')
    nut.stop("upsd")  # FSD ends with upsd only
    nut.start_upsd()
    nut.wait_ready()


def test_fsd_is_commanded_by_a_primary_and_stays(nut):
    """fsd() shows first in the status, outlives its sender and the driver, and ends with upsd."""
    with CheckedClient(nut.host, nut.port, "primary", "primarypw") as client:
        client.fsd("other")
    assert nut.ask("GET VAR other ups.status") == 'VAR other ups.status "FSD OL"'
    nut.stop("other")
    nut.start_driver("other")
    nut.wait_ready("other")
    assert nut.ask("GET VAR other ups.status") == 'VAR other ups.status "FSD OL"'
    nut.stop("upsd")
    nut.start_upsd()
    nut.wait_ready("other")
    assert nut.ask("GET VAR other ups.status") == 'VAR other ups.status "OL"'

"""What is served to Prometheus: known values, and nothing in the place of unknown ones."""

from __future__ import annotations

import socket
import urllib.request

import msgspec
import pytest

from powerguard.config import loads
from powerguard.core.state import initial
from powerguard.errors import PowerguardError
from powerguard.node.metrics import Metrics
from powerguard.node.status import FeedStatus, JobStatus, RankStatus, Shell, Status, describe

FEED = FeedStatus("rack@nut:3493", "ok", "", ("LB", "OB", "NEWTOKEN"), True, 42.0, None, 35.0, None, 1.5, True)


def status(**changes) -> Status:
    config = loads('[[ups]]\nname = "rack@nut"', env={})
    shell = Shell("1.2.3", 1, 0.0, "logind", "/j", "", "why", {}, {})
    return msgspec.structs.replace(describe(config, initial("boot", 10.0, node="n"), shell, 20.0), **changes)


@pytest.fixture
def served():
    """Serves a status on a free port and scrapes it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shown = [status()]
    metrics = Metrics("127.0.0.1", port, lambda: shown[0])

    def scrape(**changes) -> list[str]:
        shown[0] = status(**changes)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            return answer.read().decode().splitlines()

    yield metrics, scrape
    metrics.close()


def test_known_values_are_served(served):
    """Phase, runway, need, feeds, tokens and jobs are there, tokens as 0 and 1, unknown tokens too."""
    metrics, scrape = served
    metrics.count("phase_on_battery")
    metrics.count("phase_on_battery")
    ranks = tuple(RankStatus(r, r == 0, 17 + r, "", 0.5, 1.0, None, None, None) for r in range(2))
    job = JobStatus("run 7", 2, "/ckpt", "idle", "", ranks, 12, "g", 30.0)
    lines = scrape(phase="flushing", runway_s=321.5, on_battery=True, feeds=(FEED,), jobs=(job,))

    for line in (
        'powerguard_phase{phase="flushing"} 1.0',
        'powerguard_phase{phase="online"} 0.0',
        "powerguard_on_battery 1.0",
        "powerguard_runway_seconds 321.5",
        'powerguard_ups_up{ups="rack@nut:3493"} 1.0',
        'powerguard_ups_charge_percent{ups="rack@nut:3493"} 42.0',
        'powerguard_ups_status{token="OB",ups="rack@nut:3493"} 1.0',
        'powerguard_ups_status{token="OL",ups="rack@nut:3493"} 0.0',
        'powerguard_ups_status{token="NEWTOKEN",ups="rack@nut:3493"} 1.0',
        'powerguard_job_ranks{training_job="run 7"} 1.0',
        'powerguard_job_step{training_job="run 7"} 17.0',
        'powerguard_job_saved_step{training_job="run 7"} 12.0',
        'powerguard_events_total{event="phase_on_battery"} 2.0',
    ):
        assert line in lines, line


def test_what_is_unknown_is_absent(served):
    """A runway, charge or token that nobody knows has no sample at all; 0 would page somebody, or worse, not."""
    _, scrape = served
    silent = msgspec.structs.replace(
        FEED, comm="unreachable", tokens=(), charge_pct=None, fresh_s=None, login_held=None
    )
    lines = [line for line in scrape(runway_s=None, spare_s=None, on_battery=None, feeds=(silent,)) if line[0] != "#"]

    assert 'powerguard_ups_up{ups="rack@nut:3493"} 0.0' in lines
    for name in ("runway", "spare", "on_battery", "ups_charge", "ups_status", "ups_fresh", "ups_login"):
        assert not [line for line in lines if line.startswith(f"powerguard_{name}")], name


def test_a_port_in_use_is_an_operating_error(served):
    """An address that is taken is said in words; the daemon goes on without metrics."""
    metrics, _ = served
    port = metrics._server.server_port
    with pytest.raises(PowerguardError, match="can't listen"):
        Metrics("127.0.0.1", port, status)

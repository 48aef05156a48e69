"""The dashboard and the alert rules in docs/monitoring, and a real Prometheus that scrapes the daemon's endpoint."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from pathlib import Path

import pytest

from powerguard.config import loads
from powerguard.core.state import initial
from powerguard.node.metrics import Metrics
from powerguard.node.status import FeedStatus, JobStatus, RankStatus, Shell, Status, describe

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "monitoring"
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text())
needs = pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs prometheus (apt install prometheus)")


def full() -> Status:
    """A status in which everything is known."""
    config = loads('[[ups]]\nname = "rack@nut"', env={})
    shell = Shell("1.2.3", 1, 0.0, "logind", "/j", "", "why", {}, {}, lock_held=True, gpus_lowered=False)
    feed = FeedStatus("rack@nut:3493", "ok", "", ("OL",), False, 100.0, 1200.0, 40.0, 54.0, 1.0, True)
    rank = RankStatus(0, True, 17, "", 0.5, 0.2, 0.1, 9.0, 10**9)
    job = JobStatus("run-7", 1, "/ckpt", "idle", "", (rank,), 12, "g", 30.0)
    status = describe(config, initial("boot", 10.0, node="n"), shell, 20.0)
    fields = {name: getattr(status, name) for name in status.__struct_fields__}
    known = {"runway_s": 600.0, "idle_runway_s": 900.0, "spare_s": 500.0, "on_battery": False}
    return Status(**{**fields, **known, "feeds": (feed,), "jobs": (job,)})


def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def metrics():
    """The daemon's endpoint, and its port."""
    where = port()
    served = Metrics("127.0.0.1", where, full)
    served.count("phase_on_battery")
    yield where
    served.close()


def expressions() -> list[str]:
    """Every query of the dashboard, as Grafana would send it."""
    found = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    found += [each["expr"] for each in DASHBOARD["annotations"]["list"]]
    return [one.replace("$node", ".*").replace("$__rate_interval", "1m") for one in found]


def test_only_series_that_the_daemon_serves_are_asked_for(metrics):
    """A renamed metric would leave an empty panel or a silent alert."""
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics}/metrics", timeout=10) as answer:
        served = set(re.findall(r"^(powerguard_\w+)", answer.read().decode(), re.MULTILINE))
    text = " ".join([*expressions(), *re.findall(r"expr: (.*)", (FOLDER / "alerts.yml").read_text())])
    asked = set(re.findall(r"powerguard_\w+", text))
    assert len(asked) >= 18
    assert asked <= served


@needs
def test_the_alert_rules_fire_when_they_should():
    """promtool's own unit tests of the rules, those that must stay silent included."""
    done = subprocess.run(
        ["promtool", "test", "rules", "alerts_test.yml"], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@needs
@pytest.mark.slow
def test_a_real_prometheus_answers_every_panel(metrics, tmp_path):
    """Scraped, stored and asked: each query of the dashboard is accepted, and all but the rare ones have data."""
    config = tmp_path / "prometheus.yml"
    config.write_text(
        f"global: {{scrape_interval: 1s, evaluation_interval: 1s}}\nrule_files: [{FOLDER}/alerts.yml]\n"
        "scrape_configs:\n- job_name: powerguard\n  static_configs:\n"
        f"  - targets: ['127.0.0.1:{metrics}']\n"
    )
    web = port()
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path}/data"]
    log = (tmp_path / "log").open("w")
    with subprocess.Popen(
        [*command, f"--web.listen-address=127.0.0.1:{web}"], stdout=log, stderr=subprocess.STDOUT
    ) as server:
        try:
            _wait(web, 'count_over_time(up{job="powerguard"}[1m]) >= 3 and on (instance) up == 1')
            empty = [one for one in expressions() if not _ask(web, one)]
        finally:
            server.terminate()
    log.close()
    assert empty == ["powerguard_on_battery == 1"], (tmp_path / "log").read_text()[-2000:]


def _ask(web: int, query: str) -> list[object]:
    url = f"http://127.0.0.1:{web}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    with urllib.request.urlopen(url, timeout=10) as answer:
        return json.load(answer)["data"]["result"]


def _wait(web: int, query: str, within_s: float = 60.0) -> None:
    ends = time.monotonic() + within_s
    while True:
        try:
            if _ask(web, query):
                return
        except OSError:
            pass
        assert time.monotonic() < ends, f"prometheus doesn't answer {query} within {within_s:.0f} s"
        time.sleep(0.2)

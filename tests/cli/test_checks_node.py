"""What `check` says of upsmon, the primary's patience, logind's, and of shedding."""

from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from powerguard.cli import checks_node
from powerguard.cli.plan import Plan
from powerguard.config import loads
from powerguard.core.need import Need
from powerguard.core.types import Comm, Sample
from powerguard.node import keyring, upsmon
from powerguard.node.dial import new_pair
from powerguard.node.keyring import Trusted
from powerguard.node.ups_line import UpsAddress
from powerguard.sim.nvml import FakeGpu, FakeNvml

UPS = "demo@localhost:3493"
NEED = Need(save_s=12.0, total_s=57.0, halt_s=45.0)
CONF = """
# MONITOR ghost@localhost 1 u p primary
MONITOR demo@127.0.0.1 1 upsmon "pass \\"word" primary   # ours
MONITOR rack@nut.example:13493 1 upsmon pw slave
MONITOR broken
HOSTSYNC 20
SHUTDOWNCMD "/sbin/shutdown -h +0"
"unfinished
"""


def config(more: str = ""):
    return loads(f'[[ups]]\nname = "{UPS}"\n{more}', secrets=False)


def levels(found) -> list[str]:
    return [finding.level for finding in found]


def test_upsmon_conf_is_read_as_upsmon_reads_it():
    """Roles by either of NUT's words, quotes, comments; what makes no sense is skipped."""
    conf = upsmon.parse(CONF)

    assert (20.0, "/sbin/shutdown -h +0") == (conf.hostsync_s, conf.shutdown)
    assert [UpsAddress("demo", "127.0.0.1"), UpsAddress("rack", "nut.example", 13493)] == [
        each.address for each in conf.monitors
    ]
    assert ["primary", "secondary", ""] == [conf.role(name) for name in (UPS, "rack@nut.example:13493", "ghost@nut")]


@given(st.text(max_size=300) | st.lists(st.sampled_from(CONF.split()), max_size=30).map(" ".join))
def test_any_upsmon_conf_is_read(text):
    """It is somebody else's file: an answer, never an error."""
    assert upsmon.parse(text).hostsync_s >= 0


def test_whether_upsmon_runs_is_told_by_its_pid(tmp_path):
    """A pid file of a process that is gone, of none, or with nonsense means no."""
    mine, gone, odd = tmp_path / "mine", tmp_path / "gone", tmp_path / "odd"
    mine.write_text(f"{os.getpid()}\n")
    gone.write_text("4194304\n")
    odd.write_text("soon")

    assert upsmon.runs([gone, odd, mine])
    assert not upsmon.runs([gone, odd, tmp_path / "none"])
    assert upsmon.read([tmp_path / "none"]) is None
    (tmp_path / "conf").write_text(CONF)
    assert upsmon.read([tmp_path / "none", tmp_path / "conf"]) == upsmon.parse(CONF)


def test_upsmon_beside_us_is_listed():
    """What it watches and how it shuts down; a way that waits for nobody is a warning."""
    conf = upsmon.parse(CONF)
    found = list(checks_node.upsmon(config(), conf, running=True))

    assert ["ok"] == levels(found)
    assert "demo@127.0.0.1:3493 (primary), rack@nut.example:13493 (secondary)" in found[0].text
    forced = upsmon.parse(CONF.replace("shutdown -h +0", "poweroff -f"))
    assert ["ok", "warn"] == levels(checks_node.upsmon(config(), forced, running=True))
    lax = config("[halt]\ndelay_shutdown = false\n")
    assert ["ok", "warn"] == levels(checks_node.upsmon(lax, conf, running=True))
    assert ["ok"] == levels(checks_node.upsmon(config(), None, running=True))
    assert [] == levels(checks_node.upsmon(config(), conf, running=False))


@pytest.mark.parametrize(("hostsync", "save_s", "expected"), [
    (None, 12.0, ["ok"]), (None, 16.0, ["ok", "warn"]), (20, 12.0, []), (20, 16.0, ["warn"]),
    (10, 8.0, ["warn"]), (10, 12.0, ["warn", "warn"]),
])  # fmt: skip
def test_the_primarys_patience_must_hold_a_flush(hostsync, save_s, expected):
    """Asked of people where the primary is elsewhere, read where it is this node's own upsmon (fsd_s is 15)."""
    conf = None if hostsync is None else upsmon.parse(CONF.replace("HOSTSYNC 20", f"HOSTSYNC {hostsync}"))
    found = list(checks_node.hostsync(config(), conf, [UPS], Need(save_s=save_s)))

    assert expected == levels(found)
    assert all("HOSTSYNC" in f.text + f.todo for f in found)


@pytest.mark.parametrize(
    ("delay_s", "level"), [(300.0, "ok"), (22.0, "ok"), (21.0, "warn"), (5.0, "warn"), (None, "warn")]
)
def test_logind_must_wait_for_a_flush(delay_s, level):
    """InhibitDelayMaxSec against 12 s to save and 10 s of margin; where it isn't asked for nothing is amiss."""
    assert [level] == levels(checks_node.shutdown(config(), NEED, lambda: delay_s))
    assert ["ok"] == levels(checks_node.shutdown(config("[halt]\ndelay_shutdown = false\n"), NEED, lambda: delay_s))


def shed(nvml: FakeNvml, variables: dict[str, str], runway_s: float | None = 480.0):
    loads_asked: list[float] = []
    now = Plan(runway_s, 900.0, "prior", 60.0, 57.0, 12.0, 45.0, "gpt", 10.0, 413.0, None, None)

    def at_load(load_pct: float) -> Plan:
        loads_asked.append(load_pct)
        return Plan(720.0, 900.0, "prior", load_pct, 57.0, 12.0, 45.0, "gpt", 10.0, 653.0, None, None)

    sample = Sample(UPS, 1.0, Comm.OK, variables)
    found = list(checks_node.shedding(config("[shed]\ngpu_power_pct = 60\n"), (sample,), now, at_load, lambda: nvml))
    return found, loads_asked


def test_what_shedding_buys_is_said():
    """By the GPUs' draw and the UPS's own watts; where it gives none, by what GPUs usually are of a node."""
    nvml = FakeNvml([FakeGpu(wants_w=640.0) for _ in range(4)])
    found, asked = shed(nvml, {"ups.realpower": "4400"})
    assert "4 GPUs at 60 % would draw 880 W of 4400 W less now: runway 8 min -> 12 min" in found[0].text
    assert [pytest.approx(48.0)] == asked
    assert [pytest.approx(48.0)] == shed(nvml, {"ups.load": "44", "ups.realpower.nominal": "10000"})[1]
    assert [pytest.approx(60.0 * 0.78)] == shed(nvml, {})[1]


def test_what_shedding_cant_do_is_said():
    """No driver, no GPU, one without a limit, a runway that nobody knows."""
    assert ["fail"] == levels(shed(FakeNvml(missing=True), {})[0])
    assert ["warn"] == levels(shed(FakeNvml(), {})[0])
    assert ["warn", "ok"] == levels(shed(FakeNvml([FakeGpu(), FakeGpu(fixed=True)]), {})[0])
    assert "isn't known" in shed(FakeNvml([FakeGpu()]), {}, runway_s=None)[0][0].text
    assert [] == list(checks_node.shedding(config(), (), None, None, FakeNvml))


def test_the_other_nodes_are_checked(tmp_path):
    """Off: nothing is said. A missing key fails, no trusted node warns, and names are told."""
    text = f'[node]\nname = "a"\n[[ups]]\nname = "u"\n[peers]\nkeys = "{tmp_path}"\n'
    on = loads(text + 'listen = ":9812"\n', env={})

    assert list(checks_node.peers(loads(text, env={}))) == []
    (found,) = checks_node.peers(on)
    assert (found.level, found.code) == ("fail", 3)
    keyring.keep_own(tmp_path, new_pair("a"))
    (found,) = checks_node.peers(on)
    assert (found.level, found.todo) == ("warn", "powerguard keys trust")
    keyring.trust(tmp_path, Trusted("b", new_pair("b").public))
    (tmp_path / "trusted" / "c.key").write_text("nonsense")
    assert [(each.level, "believes b" in each.text) for each in checks_node.peers(on)] == [
        ("warn", False),
        ("ok", True),
    ]

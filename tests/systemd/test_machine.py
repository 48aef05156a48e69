"""powerguard as a service of a real systemd: one story in the life of a machine, told in order.

It is installed, watched, killed, survives an outage that ends by itself and one that doesn't, is rebooted with a job
running, and powers off once more with D-Bus dead. Each test leaves the machine as the next one needs it.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from powerguard.core.messages import Prepare, Purpose
from powerguard.core.types import Halt, Phase, Send
from powerguard.journal import Tick, read

CAP_SYS_RESOURCE = 24
REPO = Path(__file__).resolve().parents[2]
POLICY = """[policy]
snapshot = "always"
snapshot_after_s = 0.5
poll_online_s = 0.4
poll_battery_s = 0.3
resume_after_s = 1.5
margin_s = 2
flush_default_s = 3
flush_max_s = 60
prepare_max_s = 1
hold_max_s = 12
seal_max_s = 2
halt_s = 40
exit_wait_s = 3
blind_save_s = 30
blind_halt_s = 20
time_scale = 0.1
"""
"""Outages of seconds instead of minutes."""

NVML = """
\"\"\"A GPU whose limit is a file: what nvidia-ml-py would be on a node that has one.\"\"\"
import os
from powerguard.sim.nvml import *
FILE = "/var/lib/powerguard-shed/gpu-limit-w"  # where the unit may write
class Kept(FakeGpu):
    def __setattr__(self, name, value):
        super().__setattr__(name, value)
        if name == "limit_w" and os.geteuid() == 0:
            open(FILE, "w").write(str(value))
_limit = float(open(FILE).read()) if os.path.exists(FILE) else 700.0
_nvml = FakeNvml([Kept(uuid="GPU-1", limit_w=_limit)])
globals().update({name: getattr(_nvml, name) for name in dir(_nvml) if name.startswith("nvml")})
"""

TRAINING_STOP = "ExecStop=/bin/sh -c 'cut -d\" \" -f1 /proc/uptime >> /var/log/training-stopped'\n"


def gpu_limit(machine) -> float:
    file = machine.root / "var/lib/powerguard-shed/gpu-limit-w"
    return float(file.read_text() or 0) if file.exists() else 700.0


def ticks(machine) -> list[Tick]:
    """Of the newest boot's journals."""
    files = sorted((machine.root / "var/lib/powerguard").glob("journal-*"))
    boots = [read(path).head.boot for path in files]
    return [
        r for path in files for r in read(path).records if isinstance(r, Tick) and read(path).head.boot == boots[-1]
    ]


def heard(machine) -> list[dict]:
    """What the rank was told, in all its lives."""
    return [json.loads(line) for line in machine.read("/var/log/rank.jsonl").splitlines()]


def kill_daemon(machine) -> None:
    """SIGKILL; systemd starts the next one."""
    before = machine.show("powerguard", "NRestarts")
    machine.run("systemctl", "kill", "-s", "KILL", "powerguard")
    machine.until(lambda: machine.show("powerguard", "NRestarts") != before, "the restart")
    machine.until(lambda: machine.show("powerguard", "ActiveState") == "active", "the daemon to be back")


def lock_listed(machine) -> bool:
    return "powerguard" in machine.run("systemd-inhibit", "--list", "--no-pager").stdout


# ---- installed -------------------------------------------------------------------------------------


def test_a_dry_run_leaves_the_machine_alone(machine):
    """Every file and every command is named, none is made or run."""
    shown = machine.run("powerguard", "service", "install", "--dry-run").stdout

    assert "/etc/systemd/system/powerguard.service" in shown
    assert "systemctl enable powerguard.service" in shown
    assert not (machine.root / "etc/powerguard").exists()
    assert machine.run("id", "powerguard", check=False).returncode


def test_installed_it_runs_and_check_is_content(machine):
    """One command: user, unit, rule, configuration of the UPS that was found; the service is up and logged in."""
    machine.write("/root/nut-password", "secondarypw\n", 0o600)
    command = ("service", "install", "--yes", "--user", "secondary", "--password-file", "/root/nut-password")
    told = machine.run("powerguard", *command).stdout

    assert "logind lets this user power the node off, and powerguard-halt.path does where D-Bus is dead" in told
    assert "user secondary may log in" in told
    assert "fail" not in told
    assert ("active", "enabled") == (
        machine.show("powerguard", "ActiveState"), machine.show("powerguard", "UnitFileState")
    )  # fmt: skip
    machine.until(lambda: machine.status()["feeds"][0]["login_held"], "the LOGIN")
    assert "online" in machine.show("powerguard", "StatusText")


def test_installed_again_nothing_changes(machine):
    """A repeat finds everything there."""
    told = machine.run("powerguard", "service", "install", "--yes", "--user", "secondary").stdout

    assert "new " not in told
    assert "update" not in told


def test_the_exposure_is_small(machine):
    """By systemd's own reckoning: at most 1.7 of 10."""
    told = machine.run("systemd-analyze", "security", "--no-pager", "powerguard.service", check=False).stdout
    found = re.search(r"Overall exposure level for powerguard\.service: ([\d.]+)", told)

    assert found is not None
    print(f"exposure of powerguard.service: {found[1]}")
    assert float(found[1]) <= 1.7


def test_it_is_nobody(machine):
    """No root, no capability, no new privileges, and a filter on its system calls."""
    status = machine.run("cat", f"/proc/{machine.show('powerguard', 'MainPID')}/status").stdout
    values = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)

    assert "0" != values["Uid"].split()[0]
    assert {"0000000000000000"} == {values[name] for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")}
    assert ("1", "2") == (values["NoNewPrivs"].strip(), values["Seccomp"].strip())


def test_its_memory_stays(machine):
    """Locked, and the last to be killed for want of it; where this host lets no limit be raised, the log says so."""
    locked = machine.run("grep", "VmLck", f"/proc/{machine.show('powerguard', 'MainPID')}/status").stdout.split()[1]
    ours = int(re.search(r"CapEff:\t(\w+)", Path("/proc/self/status").read_text())[1], 16)

    if ours >> CAP_SYS_RESOURCE & 1:
        assert int(locked) > 10_000
        assert -900 == int(machine.run("cat", f"/proc/{machine.show('powerguard', 'MainPID')}/oom_score_adj").stdout)
    else:
        assert "memory isn't locked" in machine.log()


def test_what_its_user_may_do_and_may_not(machine):
    """Power off, and start the unit that sheds; no reboot, no other unit."""

    def may(method: str) -> str:
        asked = ("busctl", "call", "org.freedesktop.login1", "/org/freedesktop/login1")
        return machine.run(*asked, "org.freedesktop.login1.Manager", method, user="powerguard").stdout.split('"')[1]

    assert "yes" == may("CanPowerOff")
    assert "yes" != may("CanReboot")
    denied = machine.run("systemctl", "--no-ask-password", "stop", "upsd", user="powerguard", check=False)
    assert denied.returncode
    assert "active" == machine.show("upsd", "ActiveState")
    denied = machine.run("systemctl", "--no-ask-password", "restart", "powerguard-shed", user="powerguard", check=False)
    assert denied.returncode


def test_strangers_dont_reach_its_sockets(machine):
    """Another user may neither ask nor order; a member of the group may."""
    stranger = machine.run("powerguard", "status", user="nobody", check=False)
    assert 10 == stranger.returncode
    machine.run("useradd", "--system", "-G", "powerguard", "trainer")

    assert machine.run("powerguard", "status", "--json", user="trainer").stdout
    assert machine.run("cat", "/etc/powerguard/nut-password", user="trainer", check=False).returncode
    assert machine.run("cat", "/etc/powerguard/nut-password", user="powerguard", check=False).returncode


def test_another_group_can_be_let_in(machine):
    """By the configuration and the drop-in that the unit names: its members may ask then, others still not."""
    machine.run("groupadd", "crew")
    machine.run("useradd", "--system", "-G", "crew", "sailor")
    config = machine.read("/etc/powerguard/powerguard.toml")
    named = config.replace("[node]\n", '[node]\nsocket_group = "crew"\n')
    drop_in = "[Service]\nSupplementaryGroups=crew\nRuntimeDirectoryMode=0755\nSystemCallFilter=@chown\n"
    assert machine.run("powerguard", "status", user="sailor", check=False).returncode
    for text, file, code in ((named, drop_in, 0), (config, "", 10)):
        machine.write("/etc/powerguard/powerguard.toml", text, 0o640)
        machine.write("/etc/systemd/system/powerguard.service.d/crew.conf", file)
        machine.run("systemctl", "daemon-reload")
        machine.run("systemctl", "restart", "powerguard")
        assert code == machine.run("powerguard", "status", user="sailor", check=False).returncode
        assert machine.run("powerguard", "status", user="nobody", check=False).returncode


def test_a_shutdown_would_wait(machine):
    """The delay lock is held, for as long as the drop-in says."""
    assert lock_listed(machine)
    status = machine.status()
    assert (True, 300.0) == (status["shutdown_waits"], status["shutdown_delay_s"])


def test_a_reload_takes_the_configuration(machine):
    """Faster polls and GPUs that shed, without a restart; a file with mistakes is refused."""
    config = machine.read("/etc/powerguard/powerguard.toml")
    machine.write("/etc/powerguard/powerguard.toml", config.replace("[policy]", "[policy]\nnonsense = 1"), 0o640)
    machine.run("systemctl", "reload", "powerguard")
    machine.until(lambda: "reload refused" in machine.log(), "the refusal")
    config = config.replace("[policy]\n", POLICY).replace("[shed]\n", "[shed]\ngpu_power_pct = 60\n")
    machine.write("/etc/powerguard/powerguard.toml", config, 0o640)
    machine.write(f"/{next(machine.root.glob('opt/powerguard/lib/python3*')).relative_to(machine.root)}"
                  "/site-packages/pynvml.py", NVML)  # fmt: skip
    machine.run("systemctl", "reload", "powerguard")

    machine.until(lambda: machine.status()["gpus_lowered"] is False, "the new configuration")
    assert "1" == machine.show("powerguard", "NRestarts") or "0" == machine.show("powerguard", "NRestarts")


# ---- watched ---------------------------------------------------------------------------------------


def test_a_hung_daemon_is_killed_and_comes_back(machine):
    """Stopped, it feeds no watchdog: systemd kills it, and the next one goes on."""
    machine.write("/etc/systemd/system/powerguard.service.d/test.conf", "[Service]\nWatchdogSec=3\n")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "restart", "powerguard")
    pid, restarts = machine.show("powerguard", "MainPID"), machine.show("powerguard", "NRestarts")
    machine.run("kill", "-STOP", pid)

    machine.until(lambda: machine.show("powerguard", "NRestarts") != restarts, "the watchdog")
    machine.until(lambda: machine.show("powerguard", "ActiveState") == "active", "the next daemon")
    assert pid != machine.show("powerguard", "MainPID")
    log = machine.log()
    assert "Watchdog timeout" in log
    assert "Fatal Python error: Aborted" in log
    assert "online" == machine.status()["phase"]


def test_an_fsd_from_before_doesnt_halt(machine):
    """upsd keeps an FSD until it is restarted: a daemon that starts with it, on mains, reports it and halts nothing.

    As after a boot: nothing is remembered. Whoever has seen the UPS without it takes it for the order that it is.
    """
    machine.run("systemctl", "stop", "powerguard")
    machine.run("sh", "-c", "rm /var/lib/powerguard/journal-*")
    machine.ups("fsd demo")
    machine.until(lambda: "FSD" in machine.ups_status(), "upsd to show it")
    machine.run("systemctl", "start", "powerguard")

    machine.until(lambda: any("latched" in text for text in machine.status().get("troubles", ())), "the report")
    machine.until(lambda: machine.status()["up_s"] > 5.0, "a dozen polls")
    assert "online" == machine.status()["phase"]
    machine.run("systemctl", "restart", "upsd")
    machine.until(
        lambda: not any("latched" in text for text in machine.status().get("troubles", ["latched"])), "the end of it"
    )


# ---- an outage that ends by itself -----------------------------------------------------------------


def test_training_begins_once_the_batteries_carry_it(machine):
    """The example unit: its gate holds it back at 3 % of charge, lets it go when they are full; the rank registers."""
    machine.write("/opt/rank.py", (REPO / "tests/node/scripted_rank.py").read_text())
    unit = (REPO / "systemd/training-example.service").read_text()
    unit = re.sub(
        r"(?m)^ExecStart=.*$",
        "ExecStart=/opt/powerguard/bin/python3 /opt/rank.py /run/powerguard/ranks.sock job 0 1 /var/log/rank.jsonl\n"
        + TRAINING_STOP.rstrip(),
        unit,
    )
    unit = unit.replace("WorkingDirectory=/opt/train\n", "").replace("/usr/bin/powerguard", "/usr/local/bin/powerguard")
    machine.write("/etc/systemd/system/training.service", unit)
    for log in ("rank.jsonl", "training-stopped"):
        machine.write(f"/var/log/{log}", "", 0o666)
    machine.ups("battery.charge: 3", "battery.runtime: 20")
    machine.until(lambda: machine.status()["gate"], "the gate to close")
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "enable", "training")
    machine.run("systemctl", "start", "--no-block", "training")
    machine.until(lambda: "waiting: runway" in machine.log("training"), "the gate")
    assert "activating" == machine.show("training", "ActiveState")
    machine.ups("battery.charge: 100", "battery.runtime: 1200")

    machine.until(lambda: machine.status()["jobs"] and machine.status()["jobs"][0]["ranks"][0]["step"], "the rank")


def test_an_outage_that_ends_costs_a_snapshot(machine):
    """Saved once, GPUs at less power meanwhile, also over a crash; with the mains everything is as it was."""
    machine.ups("battery.charge: 90", "ups.status: OB DISCHRG")
    machine.until(lambda: machine.status().get("phase") == "on_battery", "the outage")
    machine.until(lambda: gpu_limit(machine) == 420.0, "the GPUs to be lowered")
    machine.until(lambda: machine.status()["jobs"][0]["saved_step"], "the snapshot")
    kill_daemon(machine)
    machine.until(lambda: machine.status().get("phase") == "on_battery", "the same outage")
    machine.until(lambda: gpu_limit(machine) == 420.0, "the GPUs to be at less power still, or again")
    machine.ups("ups.status: OL CHRG", "battery.charge: 100")

    machine.until(lambda: machine.status().get("phase") == "online", "mains")
    machine.until(lambda: gpu_limit(machine) == 700.0, "the GPUs to be restored")
    assert not [one for one in heard(machine) if one.get("purpose") == "stop"]
    assert "active" == machine.show("training", "ActiveState")


# ---- an outage that doesn't ------------------------------------------------------------------------


def test_killed_in_each_phase_it_ends_in_one_power_off(machine):
    """One event, one stop, a durable generation, the rank leaves with 75, and the machine powers off by logind."""

    def reach(phase: Phase) -> None:
        machine.until(lambda: phase in {tick.phase for tick in ticks(machine)[begin:]}, phase.value)

    begin = len(ticks(machine))
    lines = len(heard(machine))
    kill_daemon(machine)
    machine.ups("ups.status: OB DISCHRG", "battery.charge: 90", "battery.runtime: 600")
    reach(Phase.ON_BATTERY)
    kill_daemon(machine)
    machine.ups("ups.status: OB DISCHRG LB", "battery.charge: 88")  # a claim: enough to stop, not to halt
    reach(Phase.FLUSHING)
    machine.ups("ups.status: OB DISCHRG", "battery.charge: 87")
    kill_daemon(machine)
    reach(Phase.PARKED)
    kill_daemon(machine)
    machine.ups("battery.charge: 5", "battery.runtime: 4")
    reach(Phase.HALTING)
    machine.run("systemctl", "kill", "-s", "KILL", "powerguard", check=False)

    assert 0 == machine.off(within_s=35.0)  # a daemon that stayed for halt_s would hold the power-off up
    mine = ticks(machine)[begin:]
    actions = [action for tick in mine for action in tick.actions]
    stops = {
        m.seq
        for a in actions
        if isinstance(a, Send) and isinstance(m := a.message, Prepare) and m.purpose is Purpose.STOP
    }
    assert 1 == len(stops)
    assert 1 == len({tick.state.event for tick in mine if tick.state is not None and tick.state.event})
    assert 1 == sum(isinstance(action, Halt) for action in actions)
    told = heard(machine)[lines:]
    assert {"is": "left", "code": 75} == {key: told[-1][key] for key in ("is", "code")}
    assert [one for one in told if one["is"] == "Sealed" and one["seq"] in stops]


# ---- rebooted by hand ------------------------------------------------------------------------------


def test_it_starts_at_boot_and_training_after_it(machine):
    """Nobody does anything: the daemon watches, the rank trains."""
    machine.boot_anew()

    machine.until(lambda: machine.status().get("phase") == "online", "the daemon")
    machine.until(lambda: machine.status()["jobs"] and machine.status()["jobs"][0]["ranks"][0]["step"], "the rank")
    assert machine.status()["feeds"][0]["login_held"]
    assert lock_listed(machine)


BLOCKER = """[Unit]
After=powerguard.service training.service upsd.service dbus.service systemd-logind.service
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/true
ExecStop=/bin/sleep 60
"""
"""Stopped before everything else, and slowly: time to change one's mind."""


def test_a_reboot_that_is_called_off_gives_the_lock_and_the_ranks_back(machine):
    """The rank flushed before anything was stopped; called off, it trains on in place, and the next shutdown waits."""
    machine.write("/etc/systemd/system/blocker.service", BLOCKER)
    machine.run("systemctl", "daemon-reload")
    machine.run("systemctl", "start", "blocker")
    pid = machine.show("training", "MainPID")
    machine.run("systemctl", "--no-block", "reboot")
    machine.until(lambda: machine.show("blocker", "ActiveState") == "deactivating", "the reboot to begin")
    assert "parked" == machine.status()["phase"]
    assert not lock_listed(machine)
    ending = machine.run("systemctl", "list-jobs", "--no-pager").stdout
    assert " training.service " in ending
    assert " powerguard.service " not in ending  # it stays until there are no units any more
    machine.run("systemctl", "cancel")

    machine.until(lambda: machine.status().get("phase") == "online", "training to go on")
    machine.until(lambda: lock_listed(machine), "the lock")
    assert pid == machine.show("training", "MainPID")
    machine.run("systemctl", "kill", "-s", "KILL", "blocker")


def test_a_reboot_waits_for_the_flush(machine):
    """`systemctl reboot` with a job running: stopped at a step, sealed, and only then its unit is ended."""
    lines = len(heard(machine))
    machine.write("/var/log/training-stopped", "", 0o666)
    machine.run("systemctl", "--no-block", "reboot")
    machine.off()  # a reboot is a power-off and a boot
    machine.boot_anew()

    told = heard(machine)[lines:]
    stops = {one["seq"] for one in told if one["is"] == "Prepare" and one["purpose"] == "stop"}
    sealed = [one["t"] for one in told if one["is"] == "Sealed" and one["seq"] in stops]
    assert 1 == len(stops)
    assert len(sealed) >= 1
    stopped = float(machine.read("/var/log/training-stopped").split()[0]) + 0.01  # /proc/uptime cuts off at two digits
    assert sealed[0] < stopped
    assert not [one for one in told if one["is"] == "Exit"]


# ---- without D-Bus ---------------------------------------------------------------------------------


def test_with_d_bus_dead_the_node_still_powers_off(machine):
    """logind can't be asked: process 1 sees the file and shuts down in order."""
    machine.until(lambda: machine.status().get("phase") == "online", "the daemon")
    machine.until(lambda: machine.status()["jobs"] and machine.status()["jobs"][0]["ranks"][0]["step"], "the rank")
    machine.run("systemctl", "stop", "dbus.socket", "dbus.service", check=False)
    machine.until(lambda: not machine.status()["shutdown_waits"] or machine.status()["troubles"], "the loss to be said")
    machine.ups("ups.status: OB DISCHRG LB", "battery.charge: 5", "battery.runtime: 4")

    assert 0 == machine.off()
    assert 1 == sum(isinstance(action, Halt) for tick in ticks(machine) for action in tick.actions)


def test_uninstalled_nothing_is_left(machine):
    """Units, rule and drop-in go; with --purge the configuration and the journals too."""
    machine.boot_anew()
    machine.run("powerguard", "service", "uninstall", "--yes", "--purge")

    assert "inactive" == machine.show("powerguard", "ActiveState")
    left = [str(path) for path in machine.root.glob("etc/**/*powerguard*") if "group" not in path.name]
    assert [] == [path for path in left if not path.endswith("powerguard.service.d")]
    assert not (machine.root / "var/lib/powerguard").exists()
    assert not lock_listed(machine)

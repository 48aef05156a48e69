"""The ways to power off: proven beforehand, bounded, and by another way where the first fails."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from powerguard.config import loads
from powerguard.errors import HaltNotPermitted
from powerguard.node.halt_ways import DryRun, HaltFailed, Logind, Program, UpsmonFsd, choose

WAIT_S = 20.0


def script(path: Path, body: str) -> str:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("method", ["dry-run", "logind", "command", "upsmon-fsd"])
def test_nothing_halts_unless_really(method):
    """Whatever the configuration names, without --really it is a dry run."""
    assert isinstance(choose(method, ("/bin/false",), really=False), DryRun)
    assert choose(method, ("/bin/false",), really=True).name == method


def test_a_program_is_proven_without_being_run(tmp_path):
    """`prove` finds a missing or forbidden program, and runs none."""
    good = script(tmp_path / "good", f"touch {tmp_path}/ran")

    assert good in Program([good]).prove()
    assert not (tmp_path / "ran").exists()
    (tmp_path / "plain").write_text("")
    for bad in ("/nowhere/poweroff", str(tmp_path), str(tmp_path / "plain")):
        with pytest.raises(HaltNotPermitted):
            Program([bad]).prove()


def test_a_program_is_told_the_reason_and_its_failure_is_said(tmp_path):
    """The command sees POWERGUARD_REASON; a non-zero status comes back with its last words."""
    good = script(tmp_path / "good", f'echo "$POWERGUARD_REASON" > {tmp_path}/why')
    bad = script(tmp_path / "bad", "echo no such job >&2; exit 3")
    Program([good]).halt("runway spent")

    assert (tmp_path / "why").read_text() == "runway spent\n"
    with pytest.raises(HaltFailed, match="returned 3: no such job"):
        Program([bad]).halt("x")
    with pytest.raises(HaltFailed, match="No such file"):
        Program(["/nowhere/poweroff"]).halt("x")


@pytest.mark.slow
def test_a_program_that_hangs_is_given_up(tmp_path):
    """A halting program has a bound; the rest of the shutdown doesn't wait for it."""
    hangs = script(tmp_path / "hangs", "exec sleep 30")
    with pytest.raises(HaltFailed, match=r"didn't return within 0.3 s"):
        Program([hangs], bound_s=0.3).halt("x")


# ---- upsmon on this node ---------------------------------------------------------------------------


def feed(upsd, user="primary"):
    """The simulated upsd's UPS, with one of its users."""
    text = f'[[ups]]\nname = "{upsd.address("demo")}"\nuser = "{user}"\npassword = "{user}pw"\n'
    return loads(text, env={}).ups


def commanded(upsd) -> bool:
    """Whether the simulated upsd shows an FSD."""
    return "FSD" in upsd.variables("demo")["ups.status"]


class Noted:
    """A way that only notes."""

    name, real, logs_out = "noted", True, False

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def prove(self) -> str:
        return ""

    def halt(self, reason: str) -> str:
        self.reasons.append(reason)
        return "noted"


def test_upsmon_is_proven_by_its_pid(tmp_path):
    """`upsmon -c fsd` needs an upsmon that runs here and that this user may signal."""
    pid = tmp_path / "upsmon.pid"
    way = UpsmonFsd((), Noted(), command=["/bin/true"], pids=[pid])
    with pytest.raises(HaltNotPermitted, match="no upsmon runs"):
        way.prove()
    pid.write_text(f"{os.getpid()}\n")

    assert "runs /bin/true" in way.prove()
    assert way.halt("why") == "/bin/true was run (why)"


def test_a_primary_in_upsd_needs_no_root(upsd, tmp_path):
    """FSD by our own user where upsmon can't be signalled or its program fails; proving it sets nothing."""
    pid = tmp_path / "upsmon.pid"
    pid.write_text(f"{os.getpid()}\n")
    other = Noted()
    way = UpsmonFsd(feed(upsd), other, command=["/nowhere/upsmon"], pids=[pid])

    assert "sets FSD in upsd for demo@" in way.prove()
    assert not commanded(upsd)
    assert "FSD was set for demo@" in way.halt("runway spent")
    assert commanded(upsd)
    assert other.reasons == []


def test_a_secondary_may_not(upsd, tmp_path):
    """A user that is no primary is told so beforehand; at the halt the node goes down otherwise, and says why."""
    pid = tmp_path / "upsmon.pid"
    pid.write_text(f"{os.getpid()}\n")
    other = Noted()
    way = UpsmonFsd(feed(upsd, "secondary"), other, command=["/nowhere/upsmon"], pids=[pid])

    with pytest.raises(HaltNotPermitted, match="neither signal upsmon nor set FSD") as caught:
        way.prove()
    assert "upsmon primary" in caught.value.todo
    assert "noted; not by FSD, because /nowhere/upsmon" in way.halt("why")
    assert other.reasons == ["why"]
    assert not commanded(upsd)


def test_a_dead_upsd_doesnt_keep_the_node_up(upsd, tmp_path):
    """Nobody obeys: the other way is taken within the bounds."""
    feeds = feed(upsd)
    upsd.close()
    other = Noted()

    assert "not by FSD" in UpsmonFsd(feeds, other, pids=[tmp_path / "none"]).halt("why")
    assert other.reasons == ["why"]


def test_an_fsd_that_has_no_effect_is_not_waited_for_twice(upsd, tmp_path):
    """Asked again because the node is still up: the other way."""
    other = Noted()
    way = UpsmonFsd(feed(upsd), other, pids=[tmp_path / "none"])
    way.halt("why")
    assert other.reasons == []
    way.halt("still up")

    assert other.reasons == ["still up"]


# ---- logind, on a private bus ----------------------------------------------------------------------

BUS_CONFIG = """<!DOCTYPE busconfig PUBLIC "-//freedesktop//DTD D-Bus Bus Configuration 1.0//EN"
 "http://www.freedesktop.org/standards/dbus/1.0/busconfig.dtd">
<busconfig><type>system</type><listen>unix:path={path}</listen><auth>EXTERNAL</auth>
<policy context="default"><allow send_destination="*" eavesdrop="true"/><allow eavesdrop="true"/>
<allow own="*"/></policy>
</busconfig>"""


@pytest.fixture
def bus(tmp_path, monkeypatch):
    """A private D-Bus daemon in the place of the system's."""
    if not shutil.which("dbus-daemon"):
        pytest.skip("no dbus-daemon here")
    path = tmp_path / "bus"
    (tmp_path / "bus.conf").write_text(BUS_CONFIG.format(path=path))
    daemon = subprocess.Popen(
        ["dbus-daemon", f"--config-file={tmp_path / 'bus.conf'}", "--nofork", "--print-address=1"],
        stdout=subprocess.PIPE,
    )
    assert daemon.stdout is not None
    daemon.stdout.readline()
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={path}")
    yield
    daemon.terminate()
    daemon.wait(10)
    daemon.stdout.close()


class FakeLogind:
    """org.freedesktop.login1 with one answer for each method; None doesn't answer, an exception refuses."""

    def __init__(self, answers: dict[str, object]) -> None:
        from jeepney import DBusAddress
        from jeepney.io.blocking import open_dbus_connection
        from jeepney.wrappers import new_method_call

        self.calls: list[tuple[str, object]] = []
        self._answers = answers
        self._bus = open_dbus_connection("SYSTEM")
        own = DBusAddress("/org/freedesktop/DBus", "org.freedesktop.DBus", "org.freedesktop.DBus")
        self._bus.send_and_get_reply(
            new_method_call(own, "RequestName", "su", ("org.freedesktop.login1", 0)), timeout=5
        )
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        from jeepney import HeaderFields, MessageType, new_error, new_method_return

        while True:
            try:
                message = self._bus.receive(timeout=30)
            except Exception:
                return
            if message.header.message_type is not MessageType.method_call:
                continue
            name = message.header.fields[HeaderFields.member]
            self.calls.append((name, message.body))
            answer = self._answers.get(name)
            if isinstance(answer, Exception):
                self._bus.send(new_error(message, "org.freedesktop.DBus.Error.AccessDenied", "s", (str(answer),)))
            elif answer is not None:
                self._bus.send(new_method_return(message, "s" if answer else None, (answer,) if answer else ()))

    def close(self) -> None:
        self._bus.close()


@pytest.fixture
def logind(bus):
    made: list[FakeLogind] = []

    def make(answers: dict[str, object]) -> FakeLogind:
        made.append(FakeLogind(answers))
        return made[-1]

    yield make
    for fake in made:
        fake.close()


def test_logind_permission_is_asked_without_halting(logind):
    """`prove` calls CanPowerOff and nothing else; only "yes" is a yes."""
    fake = logind({"CanPowerOff": "yes"})

    assert "lets this user" in Logind().prove()
    assert [name for name, _ in fake.calls] == ["CanPowerOff"]


@pytest.mark.parametrize("answer", ["no", "challenge", "na", RuntimeError("go away")])
def test_logind_refusals_name_the_polkit_rule(logind, answer):
    """An answer that isn't yes, or an error, is HaltNotPermitted with what to do."""
    logind({"CanPowerOff": answer})
    with pytest.raises(HaltNotPermitted) as caught:
        Logind().prove()
    assert caught.value.todo


def test_logind_is_asked_to_power_off_without_dialogue(logind):
    """PowerOff(false): nobody is there to answer a question."""
    fake = logind({"PowerOff": ""})

    assert "logind was asked" in Logind().halt("why")
    assert fake.calls == [("PowerOff", (False,))]


def test_a_dead_bus_falls_back_to_systemctl(tmp_path, monkeypatch):
    """With no D-Bus at all the fallback is run, and the message says why."""
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/nobody")
    systemctl = script(tmp_path / "systemctl", f"touch {tmp_path}/ran")

    assert "because D-Bus" in Logind(systemctl=[systemctl]).halt("why")
    assert (tmp_path / "ran").exists()
    with pytest.raises(HaltNotPermitted):
        Logind().prove()


def test_process_1_is_asked_by_a_file_where_d_bus_is_dead(tmp_path, monkeypatch):
    """Where powerguard-halt.path is installed the file is made, and that is enough; elsewhere it isn't made."""
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/nobody")
    bad = [script(tmp_path / "bad", "exit 1")]
    file = tmp_path / "halt"
    with pytest.raises(HaltFailed):
        Logind(file, systemctl=bad, unit_folders=[str(tmp_path)]).halt("why")
    assert not file.exists()
    (tmp_path / "powerguard-halt.path").write_text("")
    way = Logind(file, systemctl=bad, unit_folders=[str(tmp_path)])

    assert "was made for powerguard-halt.path (why), because D-Bus" in way.halt("why")
    assert file.read_text() == "why\n"
    assert way.halt("again")


def test_a_refusal_falls_back_to_systemctl(logind, tmp_path):
    """logind's no isn't the last word; if the fallback fails too, the failure is told."""
    logind({"PowerOff": RuntimeError("interactive authentication required")})

    assert "logind refused PowerOff: interactive" in Logind(systemctl=[script(tmp_path / "ok", "exit 0")]).halt("why")
    with pytest.raises(HaltFailed):
        Logind(systemctl=[script(tmp_path / "bad", "exit 1")]).halt("why")


@pytest.mark.slow
def test_a_silent_bus_is_given_up(tmp_path, monkeypatch):
    """A bus that accepts and never speaks holds nothing up for long."""
    monkeypatch.setenv("DBUS_SYSTEM_BUS_ADDRESS", f"unix:path={tmp_path}/mute")
    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(tmp_path / "mute"))
        mute.listen()
        with pytest.raises(HaltNotPermitted, match="D-Bus"):
            Logind(bound_s=0.3).prove()


@pytest.mark.slow
def test_a_silent_logind_is_given_up(logind):
    """A logind that never answers costs one bound, not the halt."""
    logind({"CanPowerOff": None})
    with pytest.raises(HaltNotPermitted, match="D-Bus"):
        Logind(bound_s=0.3).prove()


def test_the_module_needs_no_bus_library_to_be_imported():
    """A node with another halt method works without jeepney."""
    code = "import sys; sys.modules['jeepney'] = None; import powerguard.node.halt_ways as p; print(p.DryRun().prove())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr

"""`powerguard check`, against a simulated upsd and a real one: each failure one line with what to do, and its code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from powerguard.cli import run
from powerguard.cli.plan import parse_bytes
from powerguard.sim.nut import RealNut, missing
from powerguard.sim.upsd import HEALTHY, SimUpsd

ROOT = Path(__file__).resolve().parents[1]


class Simulated:
    """A simulated upsd."""

    def __init__(self) -> None:
        self.server = SimUpsd().start()
        self.server.replace("demo", HEALTHY)

    def address(self) -> str:
        return self.server.address("demo")

    def kill_driver(self) -> None:
        self.server.fault("driver-gone", ups="demo")


class Real:
    """Debian's upsd with a dummy-ups."""

    def __init__(self, server: RealNut) -> None:
        self.server, self.dead = server, False

    def address(self) -> str:
        return self.server.address("demo")

    def kill_driver(self) -> None:
        self.dead = True
        self.server.stop("demo")

    def repair(self) -> None:
        if self.dead:
            self.server.start_driver("demo")
            self.server.wait_ready("demo")


@pytest.fixture(scope="module")
def real_nut() -> Iterator[RealNut]:
    """A real upsd for all tests of this file, which leave it as it was."""
    why = missing("upsd", "dummy-ups")
    if why:
        pytest.skip(why)
    with RealNut({"demo": {k: v for k, v in HEALTHY.items() if not k.startswith("driver.")}}) as running:
        running.wait_ready("demo")
        yield running


@pytest.fixture(params=["simulated", pytest.param("real", marks=[pytest.mark.nut, pytest.mark.slow])])
def nut(request) -> Iterator[Simulated | Real]:
    """One after the other: the simulated server, and a real one where it is installed."""
    if request.param == "simulated":
        simulated = Simulated()
        yield simulated
        simulated.server.close()
        return
    real = Real(request.getfixturevalue("real_nut"))
    yield real
    real.repair()


@pytest.fixture
def check(nut, tmp_path, capsys):
    """Runs `check` on a configuration; gives its code and its lines."""

    def call(ups: str = "", rest: str = "", *options: str, name: str = "", as_json: bool = False):
        file = tmp_path / "pg.toml"
        file.write_text(
            f'[node]\nrun_dir = "{tmp_path}/run"\nstate_dir = "{tmp_path}/state"\n'
            f'[[ups]]\nname = "{name or nut.address()}"\n{ups}\n{rest}'
        )
        file.chmod(0o600)
        code = run(["check", "-c", str(file), *options, *(["--json"] if as_json else [])])
        out, err = capsys.readouterr()
        assert err == ""
        return code, json.loads(out) if as_json else out.splitlines()

    return call


def failures(lines: list[str]) -> list[str]:
    return [line for line in lines if line.startswith("fail")]


SECONDARY = 'user = "secondary"\npassword = "secondarypw"'


def test_all_is_well(check):
    """A good configuration: no failure, code 0, runway, need and spare are printed."""
    code, lines = check(SECONDARY)

    assert (code, failures(lines)) == (0, [])
    assert any("user secondary may log in" in line for line in lines)
    assert any(line.startswith("runway ") for line in lines)
    assert any(line.startswith("need ") for line in lines)
    assert any("this UPS carries this job" in line for line in lines)


def test_a_wrong_password_is_found_before_it_is_needed(check):
    """upsd says so only at LOGIN: code 5, one line, and the password isn't in it."""
    code, lines = check('user = "secondary"\npassword = "hunter2"')
    (line,) = failures(lines)

    assert code == 5
    assert "user 'secondary' may not log in; compare user and password with upsd.users" in line
    assert line.endswith("(exit 5)")
    assert "hunter2" not in "".join(lines)


def test_a_wrong_name_is_told_with_the_right_ones(check, nut):
    """A UPS that the server doesn't have: code 6, and the names that it has."""
    code, lines = check(name=nut.address().replace("demo@", "dmeo@"))
    (line,) = failures(lines)

    assert code == 6
    assert "no UPS of that name; it has demo; correct the name (exit 6)" in line


def test_a_dead_driver_is_told_with_what_to_start(check, nut):
    """upsd answers, the driver doesn't: code 7 and the command that starts it."""
    nut.kill_driver()
    code, lines = check()
    (line,) = failures(lines)

    assert code == 7
    assert "upsdrvctl start demo" in line or "restart the driver" in line
    assert line.endswith("(exit 7)")


def test_no_server_is_told(check):
    """Nobody listens: code 4, one line, within the deadline."""
    code, lines = check(name="demo@127.0.0.1:1")
    (line,) = failures(lines)

    assert code == 4
    assert "check that upsd runs on 127.0.0.1" in line


def test_directories_that_cannot_be_written_are_told(check, tmp_path):
    """State, sockets and checkpoints each have their line and what to do; code 8."""
    code, lines = check("", "", "--dir", "/proc/powerguard")
    assert code == 8
    assert failures(lines) == ["fail  dir: /proc/powerguard isn't a directory; make it, or name the one given to "
                               "attach(dir=...) (exit 8)"]  # fmt: skip
    code, lines = check("", "", "--dir", "/dev/shm")
    assert code == 8
    assert "nothing in it survives a power cut; use a disk" in failures(lines)[0]
    assert check("", "", "--dir", str(tmp_path))[0] == 0


@pytest.mark.slow
def test_a_directory_of_somebody_else_is_told(nut, tmp_path):
    """As an unprivileged user: state_dir and checkpoint directory of another one are two lines with the owner's fix."""
    if os.geteuid() != 0:
        pytest.skip("changing user needs root")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chmod(folder, 0o755)
        closed = Path(folder, "closed")
        closed.mkdir(mode=0o700)
        file = Path(folder, "pg.toml")
        file.write_text(f'[node]\nrun_dir = "{closed}"\nstate_dir = "{closed}/x"\n[[ups]]\nname = "{nut.address()}"\n')
        code = (  # twice: the first time imports everything, which the unprivileged user may not be able to
            "import os, sys; from powerguard.cli.app import call; call(sys.argv[1:]); sys.stdout.flush(); "
            "print('=====', flush=True); os.setgid(65534); os.setuid(65534); sys.exit(call(sys.argv[1:]))"
        )
        command = [sys.executable, "-c", code, "check", "-c", str(file), "--dir", str(closed)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    bad = [line for line in done.stdout.partition("=====")[2].splitlines() if line.startswith("fail")]

    assert done.returncode == 8, done.stdout + done.stderr
    assert [line.split(":")[0] for line in bad] == ["fail  state", "fail  run", "fail  dir"]
    assert all("(exit 8)" in line and "; " in line for line in bad)


def test_a_halt_that_would_not_work_is_told(check):
    """The configured program isn't there: code 9, found without halting; a dry run is a warning."""
    code, lines = check("", '[halt]\nmethod = "command"\ncommand = ["/nowhere/halt"]')
    (line,) = failures(lines)
    assert code == 9
    assert "/nowhere/halt isn't a program that this user may run; correct [halt] command (exit 9)" in line
    code, lines = check()
    assert code == 0
    assert any(line.startswith("warn  halt: a dry run") for line in lines)


def test_the_first_failure_gives_the_code_and_all_are_shown(check):
    """Several things wrong: one line each, and the code of the first."""
    code, lines = check('user = "secondary"\npassword = "no"', '[halt]\nmethod = "command"\ncommand = ["/nowhere/h"]',
                        "--dir", "/proc/x")  # fmt: skip

    assert code == 5
    assert [line[-8:] for line in failures(lines)] == ["(exit 5)", "(exit 9)", "(exit 8)"]


def test_a_ups_that_cannot_carry_the_job_is_told_with_the_figures(check):
    """A state that takes longer to write than the battery lasts: code 15, runway and need in the line."""
    code, lines = check("", "", "--state-bytes", "2TB", "--write-mbps", "500")
    (line,) = failures(lines)

    assert code == 15
    assert "this UPS can't carry this job: runway" in line
    assert "short; less load" in line
    code, lines = check("", "", "--state-bytes", "10GB", "--write-mbps", "2000")
    assert code == 0
    assert any("save 6" in line and "10.0 GB at 2000 MB/s" in line for line in lines if line.startswith("need"))


def test_more_load_is_less_runway(check):
    """--load-pct says what the runway will be while the job trains, not while the node idles."""
    _, now = check("", "", as_json=True)
    _, busy = check("", "", "--load-pct", "90", as_json=True)

    assert busy["plan"]["runway_s"] < 0.6 * now["plan"]["runway_s"]
    assert busy["plan"]["load_pct"] == 90


def test_the_answer_in_json_holds_the_same(check):
    """--json: findings with level, what to do and code, the plan in numbers, and the verdict."""
    code, report = check('user = "secondary"\npassword = "no"', "", as_json=True)
    bad = [finding for finding in report["findings"] if finding["level"] == "fail"]

    assert code == report["exit_code"] == 5
    assert (len(bad), bad[0]["code"]) == (1, 5)
    assert bad[0]["todo"]
    assert report["plan"] is None
    code, report = check("", "", as_json=True)
    assert report["carries"] is True
    assert report["plan"]["spare_s"] > 0


@pytest.mark.slow
def test_the_disk_is_measured_where_checkpoints_go(check, tmp_path):
    """With a directory and a size the disk's own rate goes into the need, and nothing is left behind."""
    code, report = check("", "", "--dir", str(tmp_path), "--state-bytes", "1GB", as_json=True)

    assert report["plan"]["write_mbps"] > 0
    assert "MB/s" in report["plan"]["need_by"]
    assert not list(tmp_path.glob(".powerguard-*"))
    assert code in (0, 15)


def test_a_password_in_a_file_that_others_may_read_is_a_warning(nut, tmp_path, capsys):
    """An inline password and mode 644: it works, and is said."""
    file = tmp_path / "pg.toml"
    file.write_text(
        f'[node]\nrun_dir = "{tmp_path}"\nstate_dir = "{tmp_path}"\n[[ups]]\nname = "{nut.address()}"\n{SECONDARY}\n'
    )
    file.chmod(0o644)

    assert run(["check", "-c", str(file)]) == 0
    assert "holds a password and others may read it; chmod 600" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("text", "value"),
    [("80GB", 80e9), ("80 GiB", 80 * 2**30), ("512M", 512e6), ("1.5t", 1.5e12), ("1000", 1000.0), ("7b", 7.0)],
)
def test_sizes_are_read_as_people_write_them(text, value):
    """Decimal and binary units, with or without B."""
    assert parse_bytes(text) == value

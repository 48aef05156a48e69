"""The command line: a mistake is one line on standard error and a code of the table, never a traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import typer
from rich.text import Text

from powerguard import errors
from powerguard.cli import run
from powerguard.cli.app import build
from powerguard.cli.exit_codes import markdown, table, text, walk
from powerguard.core.decide import decide
from powerguard.core.policy import FeedPolicy, Policy
from powerguard.core.state import initial
from powerguard.core.types import Comm, Observation, Sample
from powerguard.journal import Journal

ROOT = Path(__file__).resolve().parents[1]
FEED = "rack@nut:3493"


@pytest.fixture
def files(tmp_path) -> Path:
    """A folder with a good and a bad configuration, a journal, and things that are neither."""
    (tmp_path / "good.toml").write_text(f'[node]\nrun_dir = "{tmp_path}/run"\n[[ups]]\nname = "{FEED}"\n')
    (tmp_path / "bad.toml").write_text('[node]\nmin_suplies = 1\n[[ups]]\nname = "a b"\n[policy]\nhalt_s = -1\n')
    (tmp_path / "empty").mkdir()
    (tmp_path / "trace.csv").write_text("t_s,status,charge_pct\n0,OB,100\n5,OB,90\n")
    (tmp_path / "noise").write_bytes(os.urandom(4096) + b"\n" + os.urandom(100))
    _journal(tmp_path)
    return tmp_path


def _journal(directory: Path) -> None:
    policy = Policy(feeds=(FeedPolicy(FEED),))
    book = Journal(directory, boot="0f7c1c3a-5e1e-4f7e-9d57-6a2f3f0c1b22", node="gpu7", version="0.1.0")
    state, now = initial("0f7c1c3a-5e1e-4f7e-9d57-6a2f3f0c1b22", 1000.0, node="gpu7"), 1000.0
    book.begin(now, policy, state)
    for status in ["OL"] * 3 + ["OB DISCHRG"] * 8 + ["OL CHRG"] * 8:
        now += 2.0
        values = {"ups.status": status, "battery.runtime": "900", "battery.charge": "90", "ups.load": "30"}
        seen = Observation(samples=(Sample(FEED, now, Comm.OK, values),))
        decision = decide(policy, state, seen, now)
        book.tick(now, state, seen, decision.state, actions=decision.actions, reason=decision.reason)
        state = decision.state
    book.close()
    next(directory.glob("journal-*")).rename(directory / "journal.jsonl")


def called(arguments: str, files: Path, capsys) -> tuple[int, str, str]:
    """Exit code, standard output, standard error of one command; @ stands for the folder of files."""
    code = run([word.replace("@", str(files)) for word in arguments.split()])
    out, err = capsys.readouterr()
    return code, out, err


MISTAKES = [
    ("report @/good.toml --outage -1", 2, "--outage': Input should be greater than or equal to 0"),
    ("bogus", 2, "No such command 'bogus'; try: powerguard --help"),
    ("--bogus", 2, "No such option: --bogus"),
    ("run -c", 2, "requires an argument"),
    ("run -c @/good.toml extra", 2, "unexpected extra argument"),
    ("run -c @/absent.toml", 3, "can't be read: No such file"),
    ("run -c @/absent.toml", 3, "name an existing file with -c; powerguard service install writes one"),
    ("run -c @/empty", 3, "can't be read: Is a directory"),
    ("run -c @/noise", 3, "isn't UTF-8"),
    ("check -c @/absent.toml", 3, "can't be read"),
    ("check -c @/good.toml --state-bytes many", 2, "'many' isn't a size; write it as 80GB"),
    ("check -c @/good.toml --write-mbps fast", 2, "try: powerguard check --help"),
    (
        "check -c @/good.toml --write-mbps nan --state-bytes 80GB",
        2,
        "--write-mbps nan isn't a number from 0.1 to 1000000",
    ),
    ("check -c @/good.toml --write-mbps -5 --state-bytes 80GB", 2, "--write-mbps -5 isn't a number from"),
    ("check -c @/good.toml --write-mbps inf --state-bytes 80GB", 2, "megabytes a second"),
    ("check -c @/good.toml --write-mbps 0 --state-bytes 80GB", 2, "leave it out and give --dir"),
    ("check -c @/good.toml --load-pct nan", 2, "--load-pct nan isn't a number from 1 to 200; give percent"),
    ("check -c @/good.toml --load-pct -40", 2, "--load-pct -40 isn't a number"),
    ("check -c @/good.toml --load-pct 0", 2, "--load-pct 0 isn't a number"),
    ("check -c @/good.toml --load-pct 1e9", 2, "--load-pct 1000000000 isn't a number"),
    ("check -c @/good.toml --state-bytes= --dir @", 2, "'' isn't a size; write it as 80GB"),
    ("check -c @/good.toml --state-bytes 80GB", 2, "give --dir, which is measured, or --write-mbps"),
    ("check -c @/good.toml --write-mbps 500", 2, "give --state-bytes, or --dir with a generation in it"),
    ("record rack@nut --every nan", 2, "--every nan isn't a number from 0.5 to 3600; upsd's drivers poll"),
    ("record rack@nut --every 0.1", 2, "--every 0.1 isn't a number from"),
    ("record rack@nut --every inf", 2, "--every inf isn't a number from"),
    ("record rack@nut --for nan", 2, "--for nan isn't a number of at least 0; give seconds, 0 to record until Ctrl-C"),
    ("record rack@nut --for -3", 2, "--for -3 isn't a number of at least 0"),
    ("wait-ready --run-dir @/empty --timeout nan", 2, "--timeout nan isn't a number of at least 0; give seconds"),
    ("wait-ready --run-dir @/empty --timeout -1", 2, "--timeout -1 isn't a number of at least 0"),
    ("slurm watch --node gpu7 --every nan", 2, "--every nan isn't a number from 1 to 600; give seconds"),
    ("shed show --pct nan", 2, "--pct nan isn't a number from 0 to 100"),
    ("exec --takes nan -- true", 2, "--takes nan isn't a number from 0 to 86400"),
    ("status --run-dir @/empty", 10, "no daemon serves"),
    ("status -c @/good.toml", 10, "start it: systemctl start powerguard"),
    ("status -c @/bad.toml --json --bogus", 2, "No such option"),
    ("flush --run-dir @/empty", 10, "no daemon serves"),
    ("park --run-dir @/empty", 10, "no daemon serves"),
    ("resume --run-dir @/empty", 10, "no daemon serves"),
    ("flush now", 2, "unexpected extra argument"),
    ("replay", 2, "Missing argument 'FILE'"),
    ("replay @/absent", 11, "can't be read: No such file"),
    ("replay @/empty", 11, "can't be read: Is a directory"),
    ("replay @/noise", 11, "not a journal of powerguard"),
    ("replay @/journal.jsonl --policy @/absent.toml", 3, "can't be read"),
    ("replay @/trace.csv --flush nan", 2, "--flush nan isn't a number from 0 to 86400; give the seconds"),
    ("replay @/trace.csv --flush -5", 2, "--flush -5 isn't a number"),
    ("replay @/trace.csv --flush inf", 2, "--flush inf isn't a number"),
    (
        "replay @/trace.csv --set =5",
        2,
        "--set =5: '' isn't a NUT variable; give what a UPS could say, each variable once",
    ),
    ("replay @/trace.csv --set load_pct=5", 2, "'load_pct' isn't a NUT variable"),
    ("replay @/trace.csv --set ups.load", 2, "--set ups.load: it has no value"),
    ("replay @/trace.csv --set ups.load=", 2, "--set ups.load=: it has no value"),
    ("replay @/trace.csv --set ups.load=5 --set ups.load=6", 2, "--set ups.load=6: ups.load is set already"),
    ("replay @/trace.csv --set ups.load=abc", 2, "ups.load 'abc' is ignored: not a number; give what a UPS could say"),
    ("replay @/trace.csv --set ups.load=900", 2, "ups.load '900' is ignored: out of 0..200"),
    ("checkpoints list @/absent", 8, "isn't a directory"),
    ("checkpoints verify @/absent", 8, "isn't a directory"),
    ("checkpoints verify @/empty", 12, "holds no generation"),
    ("checkpoints lst @/empty", 2, "No such command 'lst'"),
    ("exit-codes 3", 2, "unexpected extra argument"),
]


@pytest.mark.parametrize(("arguments", "code", "says"), MISTAKES)
def test_a_mistake_is_one_line_and_a_code(arguments, code, says, files, capsys):
    """Nothing on standard output, one line on standard error that says what to do, and the code of the table."""
    got, out, err = called(arguments, files, capsys)

    assert (got, out) == (code, "")
    assert err.startswith("powerguard: ")
    assert says in err
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert "; " in err
    assert code in {row[0] for row in table()}


def test_every_problem_of_a_configuration_is_a_line(files, capsys):
    """Three mistakes in a file are three lines, each with file and line number, and one exit code."""
    code, out, err = called("run -c @/bad.toml", files, capsys)

    assert (code, out) == (3, "")
    assert [line.split(": ")[1].rpartition(":")[2] for line in err.splitlines()] == ["2", "4", "6"]


GOOD = [
    ("--version", "powerguard "),
    ("--help", "Usage"),
    ("-h", "Usage"),
    ("run --help", "--really"),
    ("check --help", "--state-bytes"),
    ("status --help", "--json"),
    ("checkpoints --help", "verify"),
    ("checkpoints list @/empty", "no generations"),
    ("checkpoints list @/empty --json", "[]"),
    ("exit-codes", "requeue"),
    ("replay @/journal.jsonl", "0 differ"),
    ("replay @/trace.csv --set battery.type=li-ion --set ups.mfr=Acme --set battery.runtime=0", "2 rows"),
    ("keys list --help", "[peers] keys"),
    ("keys generate --help", "[node] name"),
    ("shed lower --help", "[shed]"),
    ("calibrate --help", "[policy]"),
]


@pytest.mark.parametrize(("arguments", "says"), GOOD)
def test_what_works_says_so_on_standard_output(arguments, says, files, capsys):
    """Results go to standard output, nothing to standard error, and the code is 0."""
    code, out, err = called(arguments, files, capsys)

    assert (code, err) == (0, "")
    assert says in out


def test_no_arguments_show_the_help(files, capsys):
    """Without a command the help is shown once, and the code says that nothing was done."""
    code, out, err = called("", files, capsys)

    assert code == 2
    assert (out + err).count("Usage:") == 1


def _commands(command: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(name in full, command) of *command* and all below it."""
    yield path, command
    for name, below in getattr(command, "commands", {}).items():
        yield from _commands(below, f"{path} {name}")


def test_no_help_loses_what_stands_in_brackets():
    """Help is rich markup, which takes a bare [policy] for a style and shows nothing of it: each is escaped."""
    root = typer.main.get_command(build())
    helps = [
        (name, text)
        for name, command in _commands(root, "powerguard")
        for text in (command.help, command.epilog, *(getattr(option, "help", None) for option in command.params))
        if text
    ]
    lost = [(name, text) for name, text in helps if Text.from_markup(text).plain != text.replace("\\[", "[")]

    assert [] == lost
    assert {"powerguard keys list", "powerguard shed lower"} <= {name for name, _ in helps}


@pytest.mark.parametrize("command", ["run", "check"])
def test_the_file_that_is_read_by_default_is_told(command, files, capsys):
    """Where the service has it; `run` itself isn't tried: it would watch the UPS of a machine that has one."""
    code, out, _ = called(f"{command} --help", files, capsys)
    assert code == 0
    assert "/etc/powerguard/powerguard.toml" in "".join(re.sub(r"[│ ]", "", line) for line in out.splitlines())


def test_replay_tells_the_night_in_order(files, capsys):
    """The timeline has each phase and its reason once, countdowns are not repeated, nothing differs."""
    code, out, _ = called("replay @/journal.jsonl", files, capsys)
    phases = [line.split()[2] for line in out.splitlines() if re.match(r"  \d\d \d\d:", line)]

    assert code == 0
    assert out.startswith("node gpu7, boot 0f7c1c3a")
    assert [p for n, p in enumerate(phases) if n == 0 or phases[n - 1] != p] == ["online", "on_battery", "online"]
    assert len(phases) < 14
    assert "!" not in out


def test_replay_draws_the_night(files, capsys):
    """What was left and what was needed, with each change of phase."""
    code, _, _ = called("replay @/journal.jsonl --plot @/night.svg", files, capsys)
    drawing = ElementTree.parse(files / "night.svg").getroot()
    texts = {text.text for text in drawing.iter("{http://www.w3.org/2000/svg}text")}

    assert code == 0
    assert {"on battery", "online", "need and margin", "journal.jsonl"} <= texts


def test_replay_shows_what_another_policy_would_have_done(files, capsys):
    """With a policy that parks at once the lines that differ are marked, and say what was done then."""
    policy = f'[[ups]]\nname = "{FEED}"\nuser = "u"\npassword_file = "/nowhere"\n[policy]\non_battery = "park"\n'
    (files / "other.toml").write_text(policy + "snapshot_after_s = 2\n")
    code, out, _ = called("replay @/journal.jsonl --policy @/other.toml", files, capsys)
    marked = [line for line in out.splitlines() if line.startswith("! ")]

    assert code == 0
    assert any("parked" in line for line in marked)
    assert "then: on_battery" in out
    code, out, _ = called("replay @/journal.jsonl --policy @/other.toml --json", files, capsys)
    *lines, summary = [json.loads(line) for line in out.splitlines()]
    assert summary["differ"] >= len(marked) > 0
    assert any(line.get("was_phase") == "on_battery" for line in lines)


def test_the_table_of_codes_is_the_tree_of_errors():
    """Each class has the code and the words of the drawing, no code is used twice, and all of them are listed."""
    rows = table()
    codes = [code for code, _, _ in rows]

    assert len(codes) == len(set(codes))
    assert {kind.__name__ for kind in walk() if "exit_code" in kind.__dict__} == {name for _, name, _ in rows if name}
    for kind in walk():
        assert f" {kind.__name__} " in f" {errors.__doc__} ", kind
    for code, name, meaning in rows:
        assert f"| {code} |" in markdown()
        assert meaning in text()
        if name:
            assert getattr(errors, name).exit_code == code


def test_an_unexpected_error_is_one_line_with_its_traceback_in_a_file(files, capsys, monkeypatch):
    """A bug of ours shows no traceback but says where it lies; --debug shows it."""
    (files / "tmp").mkdir()
    monkeypatch.setenv("TMPDIR", str(files / "tmp"))
    monkeypatch.setattr(tempfile, "tempdir", None)
    code = run(["replay", f"{files}/journal.jsonl", "--policy", f"{files}/good.toml", "--json", "--all"])
    assert code == 0
    capsys.readouterr()
    head = '{"k":"head","format":1,"version":"0","node":"n","boot":"b","at":1,"created":"no date"}'
    (files / "surprise.jsonl").write_text(head + '\n{"k":"done","n":0,"at":1.0,"what":"w"}\n')
    code, _, err = called("replay @/surprise.jsonl", files, capsys)

    assert code == 1
    assert err.count("\n") == 1
    assert "internal error: ValueError" in err
    (kept,) = (files / "tmp").glob("powerguard-traceback-*")
    assert str(kept) in err
    assert "Traceback (most recent call last)" in kept.read_text()
    _, _, shown = called("--debug replay @/surprise.jsonl", files, capsys)
    assert "Traceback" in shown


@pytest.mark.slow
def test_without_typer_the_command_says_what_to_install():
    """The base install has no command line; asking for it is a MissingDependency with the line to type."""
    code = "import sys; sys.modules['typer'] = None; from powerguard.cli import main; main(['status'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)

    assert (done.returncode, done.stdout) == (14, "")
    assert done.stderr == "powerguard: typer isn't installed; pip install 'powerguard[node]'\n"


@pytest.mark.slow
def test_a_closed_pipe_is_no_error(files):
    """`powerguard exit-codes | true` ends without a word."""
    done = subprocess.run(
        f"{sys.executable} -m powerguard.cli replay {files}/journal.jsonl --all | true",
        shell=True, capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
def test_the_daemon_never_imports_torch(files):
    """Neither the command line nor the service pulls torch in: a gigabyte, and seconds at the worst time."""
    code = (
        "import sys; from powerguard.cli.app import build; build(); import powerguard.node.service; "
        "print([m for m in ('torch', 'numpy', 'matplotlib') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=False)

    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_is_offered(shell):
    """Each usual shell gets its completion script."""
    env = {**os.environ, "_POWERGUARD_COMPLETE": f"source_{shell}"}
    code = "from powerguard.cli import main; main([])"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, cwd=ROOT, check=False)

    assert done.returncode == 0
    assert "powerguard" in done.stdout

"""`powerguard service` into a folder, and `powerguard shed` without a GPU."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from powerguard.cli import run
from powerguard.config import load

CONFIG = "etc/powerguard/powerguard.toml"


def service(*arguments: str) -> int:
    return run(["service", *arguments])


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_the_upses_that_are_found_are_in_the_configuration(upsd, tmp_path):
    """Discovered from the server that runs here; nothing needs to be typed."""
    upsd.describe("demo", 'the "rack" [1]')

    assert 0 == service("install", "--root", str(tmp_path), "--host", f"127.0.0.1:{upsd.port}", "--yes")
    config = load(tmp_path / CONFIG, secrets=False)
    assert [f"demo@127.0.0.1:{upsd.port}"] == [ups.name for ups in config.ups]
    assert '# the "rack" [1]' in (tmp_path / CONFIG).read_text()


def test_a_dry_run_shows_everything_and_does_nothing(tmp_path, capsys):
    """Each file, each command, and an untouched folder."""
    assert 0 == service("install", "--root", str(tmp_path), "--ups", "rack@nut", "--dry-run")
    shown = capsys.readouterr().out

    assert "/etc/systemd/system/powerguard.service" in shown
    assert "systemctl daemon-reload" in shown
    assert [] == files(tmp_path)


def test_nobody_to_ask_is_a_mistake(tmp_path, monkeypatch):
    """From a script it needs --yes."""
    with open(os.devnull) as nobody:
        monkeypatch.setattr("sys.stdin", nobody)
        assert 2 == service("install", "--root", str(tmp_path), "--ups", "rack@nut")
    assert [] == files(tmp_path)


def test_an_operators_configuration_is_never_touched(tmp_path):
    """Installed again, with other UPSes: the file stays, byte for byte."""
    service("install", "--root", str(tmp_path), "--ups", "rack@nut", "--yes")
    mine = (tmp_path / CONFIG).read_text().replace('name = "rack@nut"', 'name = "mine@nut"')
    (tmp_path / CONFIG).write_text(mine)

    assert 0 == service("install", "--root", str(tmp_path), "--ups", "other@nut", "--yes")
    assert mine == (tmp_path / CONFIG).read_text()
    assert not [name for name in files(tmp_path) if name.endswith(".new")]


def test_uninstall_keeps_what_is_an_operators(tmp_path, capsys):
    """Configuration and password stay, and what was edited; --purge takes those too."""
    service("install", "--root", str(tmp_path), "--ups", "rack@nut", "--yes")
    edited = tmp_path / "etc/polkit-1/rules.d/50-powerguard.rules"
    edited.write_text("// mine\n")
    (tmp_path / "var/lib/powerguard").mkdir(parents=True)

    assert 0 == service("uninstall", "--root", str(tmp_path), "--dry-run")
    assert 0 == service("uninstall", "--root", str(tmp_path), "--yes")
    assert ["etc/polkit-1/rules.d/50-powerguard.rules", "etc/powerguard/nut-password", CONFIG] == files(tmp_path)
    assert "was edited, and is kept" in capsys.readouterr().err
    assert 0 == service("uninstall", "--root", str(tmp_path), "--yes")
    assert "nothing of powerguard's is installed" in capsys.readouterr().out


def test_purge_leaves_nothing(tmp_path):
    """Not the password, not the journals."""
    service("install", "--root", str(tmp_path), "--ups", "rack@nut", "--yes")
    (tmp_path / "var/lib/powerguard").mkdir(parents=True)
    (tmp_path / "var/lib/powerguard/journal-1.jsonl").write_text("{}")

    assert 0 == service("uninstall", "--root", str(tmp_path), "--purge", "--yes")
    assert [] == files(tmp_path)


@pytest.mark.parametrize(("arguments", "code", "word"), [
    (("--ups", "rack@"), 3, "the host is empty"),
    (("--ups", 'a"b@nut'), 3, "is not the address"),
    (("--host", "127.0.0.1:1"), 4, "127.0.0.1:1"),
    (("--ups", "rack@nut", "--method", "magic"), 2, "not one of logind"),
    (("--ups", "rack@nut", "--password-file", "/nowhere"), 2, "/nowhere"),
])  # fmt: skip
def test_mistakes_are_one_line_and_change_nothing(tmp_path, capsys, arguments, code, word):
    """An exit code of the table, and what is wrong."""
    assert code == service("install", "--root", str(tmp_path), "--yes", *arguments)
    told = capsys.readouterr().err
    assert word in told
    assert 1 == told.count("\n")
    assert [] == files(tmp_path)


def test_a_given_password_is_used(tmp_path):
    """From a file, never from the command line."""
    given = tmp_path / "given"
    given.write_text("s3 cret\n")
    root = tmp_path / "root"

    assert 0 == service("install", "--root", str(root), "--ups", "rack@nut", "--yes", "--password-file", str(given))
    assert "s3 cret\n" == (root / "etc/powerguard/nut-password").read_text()


def test_shed_without_a_driver_is_one_line(tmp_path, capsys):
    """NVML's word and what to do; nothing was lowered, so restoring is fine."""
    note = str(tmp_path / "note")

    assert 1 == run(["shed", "lower", "--pct", "60", "--note", note])
    assert "NVML" in capsys.readouterr().err
    assert 0 == run(["shed", "restore", "--note", note])
    assert 2 == run(["shed", "lower", "--note", note])

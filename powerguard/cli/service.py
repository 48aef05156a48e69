"""`powerguard service install`, `uninstall`: a service on this system, shown first and done then."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from powerguard import config as configuration
from powerguard.cli.ask import fetch
from powerguard.cli.out import console, safe, say, warn
from powerguard.config import FILE
from powerguard.core.policy import Policy
from powerguard.errors import ConfigError, PowerguardError, UpsUnreachable, UsageError
from powerguard.node import install as steps
from powerguard.node import units
from powerguard.node.install import Command, Fate, File, Installed, Tools
from powerguard.node.ups_line import PORT, UpsAddress

_WORDS = {
    Fate.NEW: "[green]new[/]    ",
    Fate.SAME: "there  ",
    Fate.UPDATED: "[yellow]update[/] ",
    Fate.BESIDE: "[yellow]kept[/]   ",
    Fate.KEPT: "kept   ",
    Fate.REMOVED: "[yellow]remove[/] ",
    Fate.GONE: "gone   ",
}

Yes = Annotated[bool, typer.Option("--yes", "-y", help="don't ask")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="show what would be done, and do nothing")]
Root = Annotated[
    Path | None,
    typer.Option(help="an image's root: files go below it, and commands are only shown", show_default=False),
]


def register(app: typer.Typer) -> None:
    """Adds the commands to *app*."""
    group = typer.Typer(no_args_is_help=True, help="Install powerguard as a service of this system, or take it away.")
    group.command()(install)
    group.command()(uninstall)
    app.add_typer(group, name="service")


def install(
    *,
    ups: Annotated[
        list[str] | None, typer.Option(help="a UPS of this node, as ups@host; default: those of upsd on --host")
    ] = None,
    host: Annotated[str, typer.Option(help="where upsd runs, as host or host:port")] = "localhost",
    user: Annotated[str, typer.Option(help="this node's user in upsd.users; '' = none")] = "powerguard",
    password_file: Annotated[
        Path | None, typer.Option(help="holds its password; default: a new one is made up", show_default=False)
    ] = None,
    method: Annotated[str, typer.Option(help="how to power off: logind, upsmon-fsd or dry-run")] = "logind",
    root: Root = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Install the service: user, units, polkit rule, logind's patience, and a configuration from the UPSes found.

    Each file and command is shown before anything is done. Safe to repeat. A file that somebody has edited is kept,
    and ours goes beside it as .new. Ends with `powerguard check`, whose exit code it returns.
    """
    tools = Tools() if root is None else Tools(root=root)
    exe = steps.program() if root is None else "/usr/bin/powerguard"
    password = None if password_file is None else _password(password_file)
    files = steps.files(
        exe,
        _configuration(tools, ups or [], host, user=user, method=method),
        password=password,
        delay=steps.delay_s(Policy(), _measured()),
    )
    installed = Installed(tools)
    new_password = any(file.secret and installed.fate(file) is Fate.NEW for file in files)
    _show([(installed.fate(file), file.path, file.why) for file in files], steps.INSTALL)
    if dry_run or not _agreed(yes, root):
        return
    for file in files:
        _put(installed, file)
    installed.save()
    if root is None:
        _run(tools, steps.INSTALL)
    if user and new_password and password is None:
        _tell_user(user, "primary" if method == "upsmon-fsd" else "secondary")
    if root is None:
        raise typer.Exit(_check(exe))


def uninstall(
    *,
    purge: Annotated[bool, typer.Option("--purge", help="configuration, password and journals as well")] = False,
    root: Root = None,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Take the service away: ranks train on, unwatched. What somebody has edited stays, unless --purge.

    The user powerguard stays too: files of its may be left somewhere.
    """
    tools = Tools() if root is None else Tools(root=root)
    installed = Installed(tools)
    paths = [path for path in steps.paths(installed.digests) if purge or path not in (FILE, steps.PASSWORD)]
    if not installed.digests:
        say("nothing of powerguard's is installed here")
        return
    rows = [(Fate.REMOVED if purge else installed.leaving(path), path, "") for path in paths]
    rows += [(Fate.REMOVED, path, "journals and limits") for path in steps.STATE if purge]
    _show(rows, (*steps.UNINSTALL, *steps.AFTER_UNINSTALL))
    if dry_run or not _agreed(yes, root):
        return
    if root is None:
        _run(tools, steps.UNINSTALL)
    for path in paths:
        if installed.take(path, whatever=purge) is Fate.KEPT:
            warn(f"{path} was edited, and is kept")
    if purge:
        for path in steps.STATE:
            shutil.rmtree(tools.at(path), ignore_errors=True)
    else:
        installed.digests.clear()
    installed.save()
    with contextlib.suppress(OSError):  # something of somebody else's is left in it
        tools.at(FILE).parent.rmdir()
    if root is None:
        _run(tools, steps.AFTER_UNINSTALL)


# ---- what is needed beforehand ---------------------------------------------------------------------


def _configuration(tools: Tools, names: Sequence[str], host: str, *, user: str, method: str) -> str:
    """The file that is there, or a new one from the UPSes named or found."""
    try:
        return tools.at(FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as err:
        raise ConfigError(f"{FILE} can't be read: {err}", todo="run it as root") from None
    if method not in ("logind", "upsmon-fsd", "dry-run"):
        raise UsageError(f"--method {method}: not one of logind, upsmon-fsd, dry-run")
    text = units.configuration(_upses(names, host), user=user, method=method)
    configuration.loads(text, source="the new configuration", secrets=False)
    return text


def _upses(names: Sequence[str], host: str) -> dict[str, str]:
    """Each UPS as `ups@host`, with its description."""
    if names:
        return {_short(UpsAddress.parse(name)): "" for name in names}
    from powerguard.node.ups_probe import discover

    where = UpsAddress.parse(f"any@{host}")
    found = discover(where.host, where.port)
    if not found:
        raise UpsUnreachable(f"upsd on {host} has no UPS", todo="name one of another server: --ups ups@host")
    return {_short(UpsAddress(ups, where.host, where.port)): _plain(text) for ups, text in found.items()}


def _short(address: UpsAddress) -> str:
    full = str(UpsAddress.parse(str(address)))  # what upsd calls a UPS may be anything
    return full.removesuffix(f":{PORT}")


def _plain(text: str) -> str:
    return " ".join("".join(char if char.isprintable() else " " for char in text).split())


def _password(path: Path) -> str:
    try:
        lines = path.read_text().splitlines()
    except (OSError, ValueError) as err:
        raise UsageError(f"--password-file {path}: {err}") from None
    if len(lines) != 1 or not lines[0].isprintable() or not lines[0]:
        raise UsageError(f"--password-file {path} doesn't hold one line of text")
    return lines[0]


def _measured() -> float | None:
    """The time of a flush as a running daemon has measured it."""
    try:
        need = fetch("/run/powerguard").need
    except PowerguardError:
        return None
    return need.save_s if need.measured and need.save_s else None


# ---- showing and doing -----------------------------------------------------------------------------


def _show(rows: Sequence[tuple[Fate, str, str]], commands: Sequence[Command]) -> None:
    screen = console()
    for fate, path, why in rows:
        note = f"  {why}" if why else ""
        if fate is Fate.BESIDE:
            note = f"  it differs from ours, which goes to {path}.new"
        elif fate is Fate.KEPT and not why:
            note = "  was edited"
        screen.print(f"{_WORDS[fate]} {safe(path)}[dim]{safe(note)}[/]")
    for command in commands:
        note = f"  {command.why}" if command.why else ""
        screen.print(f"run     {safe(' '.join(command.argv))}[dim]{safe(note)}[/]")


def _agreed(yes: bool, root: Path | None) -> bool:
    """Whether it may be done. Raises UsageError where nobody can be asked."""
    if root is None and os.geteuid() != 0:
        raise UsageError("only root may do that", todo="sudo powerguard service ..., or --dry-run to look")
    if yes:
        return True
    if not sys.stdin.isatty():
        raise UsageError("there is nobody to be asked", todo="say --yes, or --dry-run to look")
    return typer.confirm("Do it?")


def _put(installed: Installed, file: File) -> None:
    fate = installed.put(file)
    if fate is Fate.BESIDE:
        warn(f"{file.path} is kept as it is; ours is {file.path}.new")


def _run(tools: Tools, commands: Sequence[Command]) -> None:
    for command in commands:
        failed = steps.do(tools, command)
        if failed:
            warn(failed)


def _tell_user(user: str, role: str) -> None:
    say("\nUntil upsd knows this node, the NUT primary doesn't wait for it. In upsd.users, on the UPS's server:\n")
    for line in units.upsd_users(user, role, steps.PASSWORD):
        say(f"    {line}")
    say("\nand then: upsd -c reload\n")


def _check(exe: str) -> int:
    """`powerguard check` as the service: its user, its credentials."""
    command = [exe, "check", "-c", FILE]
    runner = shutil.which("systemd-run")
    if runner is not None:
        as_service = ["-p", "User=powerguard", "-p", f"LoadCredential=nut-password:{steps.PASSWORD}"]
        command = [runner, "--quiet", "--pipe", "--wait", "--collect", *as_service, "--", *command]
    sys.stdout.flush()
    return subprocess.run(command, stdin=subprocess.DEVNULL, check=False).returncode

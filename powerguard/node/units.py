"""The files that a system needs to run powerguard as a service, as they lie in the package or in the source tree."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import powerguard
from powerguard.errors import PowerguardError

_PROGRAM = "/usr/bin/powerguard"
_UPS = re.compile(r"^\[\[ups\]\]$.*?(?=^# A second feed:)", re.MULTILINE | re.DOTALL)


def text(name: str) -> str:
    """The file *name* of `systemd/`. Raises PowerguardError."""
    package = Path(powerguard.__file__).parent
    for folder in (package / "systemd", package.parent / "systemd"):
        try:
            return (folder / name).read_text(encoding="utf-8")
        except OSError:
            continue
    raise PowerguardError(
        f"{name} isn't installed with powerguard", todo="reinstall it: pip install 'powerguard[node]'"
    )


def unit(name: str, program: str) -> str:
    """A unit that runs *program*."""
    return text(name).replace(_PROGRAM, program)


def logind(delay_s: int) -> str:
    """The drop-in by which a shutdown waits *delay_s* for training."""
    return re.sub(r"(?m)^InhibitDelayMaxSec=.*$", f"InhibitDelayMaxSec={delay_s}", text("powerguard.logind.conf"))


def configuration(upses: Mapping[str, str], *, user: str = "powerguard", method: str = "logind") -> str:
    """The commented example with *upses* (`ups@host` → its description), the first with all that can be said of one."""
    example = text("powerguard.toml")
    found = _UPS.search(example)
    assert found is not None, "the example has changed"
    tables = []
    for number, (name, description) in enumerate(upses.items()):
        comment = f"# {description}\n" if description else ""
        if number == 0:
            tables.append(comment + _filled(found[0].rstrip(), name, user) + "\n")
        else:
            lines = [f"{comment}[[ups]]", f'name = "{name}"']
            if user:
                lines += [f'user = "{user}"', 'password_file = "${CREDENTIALS_DIRECTORY}/nut-password"']
            tables.append("\n".join(lines) + "\n")
    whole = example[: found.start()] + "\n".join(tables) + "\n" + example[found.end() :]
    return re.sub(r'(?m)^method = "logind"', f'method = "{method}"', whole)


def _filled(table: str, name: str, user: str) -> str:
    """The example's table with its values; without *user* the lines of the LOGIN are commented out."""
    values = {"name": f'"{name}"', "user": f'"{user}"' if user else None}
    lines = []
    for line in table.splitlines():
        key = line.partition(" ")[0]
        if key in ("user", "password_file") and not user:
            lines.append(f"# {line}")
        elif values.get(key):
            comment = line.partition("#")[2]
            lines.append(f"{f'{key} = {values[key]}':<34} #{comment}")
        else:
            lines.append(line)
    return "\n".join(lines)


def upsd_users(user: str, role: str, path: str) -> Sequence[str]:
    """What the UPS's server must know of this node: lines of its upsd.users, with the password left where it is."""
    return (f"[{user}]", f"    password = ...             # the line in {path}", f"    upsmon {role}")

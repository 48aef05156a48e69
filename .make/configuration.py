"""Writes docs/configuration.md from the types that hold the configuration: names, defaults, and the comment on each.

python .make/configuration.py           prints the page
python .make/configuration.py --write   writes it
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VALUES = ROOT / "powerguard" / "config" / "values.py"
POLICY = ROOT / "powerguard" / "core" / "policy.py"
TABLES = (
    ("node", VALUES, "NodeConfig"),
    ("[ups]", VALUES, "UpsConfig"),
    ("policy", POLICY, "Policy"),
    ("halt", VALUES, "HaltConfig"),
    ("shed", VALUES, "ShedConfig"),
    ("peers", VALUES, "PeersConfig"),
    ("metrics", VALUES, "MetricsConfig"),
    ("log", VALUES, "LogConfig"),
    ("notify", VALUES, "NotifyConfig"),
)
BATTERY = ("battery_installed", "chemistry", "rated", "learned_phi")
"""What `[[ups]]` says of the battery; the other fields of FeedPolicy are derived."""
DERIVED = {"Policy": ("feeds", "min_supplies", "outages"), "UpsConfig": ("password_inline",)}
HEAD = """# Configuration

`/etc/powerguard/powerguard.toml`. Every default is meant to be left alone: what a node must say is its UPS, and how
it is powered off. The commented example is [systemd/powerguard.toml](../systemd/powerguard.toml).
`powerguard check -c FILE` reports every problem at once, and `systemctl reload powerguard` takes a changed file over
without forgetting an outage.

Seconds end in `_s`, percentages in `_pct`. In `password_file` and `tls_ca`, `${CREDENTIALS_DIRECTORY}` is the folder of
systemd's `LoadCredential=`; no other variable is expanded. This page is made from the code by `.make/configuration.py`,
and a test compares them.
"""
PASSWORD_FILE = "| `password_file` | | instead of `password`: a file that holds it |"


def main() -> int:
    text = page()
    if sys.argv[1:] == ["--write"]:
        (ROOT / "docs" / "configuration.md").write_text(text)
    else:
        sys.stdout.write(text)
    return 0


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for table, path, name in TABLES:
        node, lines = _class(path, name)
        brackets = f"[{table}]"
        parts.append(f"\n## `{brackets}`\n\n{_intro(node)}\n\n")
        rows = [_row(*each) for each in _fields(node, lines) if each[0] not in DERIVED.get(name, ())]
        if name == "UpsConfig":
            rows.insert(3, PASSWORD_FILE)
            battery, more = _class(POLICY, "FeedPolicy")
            rows += [_row(*each) for each in _fields(battery, more) if each[0] in BATTERY]
        parts += ["| key | default | is |\n|---|---|---|\n", "\n".join(rows), "\n"]
    return "".join(parts)


def _class(path: Path, name: str) -> tuple[ast.ClassDef, list[str]]:
    text = path.read_text()
    found = next(n for n in ast.parse(text).body if isinstance(n, ast.ClassDef) and n.name == name)
    return found, text.splitlines()


def _intro(node: ast.ClassDef) -> str:
    """The class's docstring without the name of its table."""
    text = " ".join((ast.get_docstring(node) or "").split())
    return text.split("`: ", 1)[1][:1].upper() + text.split("`: ", 1)[1][1:] if "`: " in text else text


def _fields(node: ast.ClassDef, lines: list[str]) -> list[tuple[str, str, str]]:
    """Name, default as TOML, comment."""
    found = []
    for item in node.body:
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
            comment = " ".join(_comment(line) for line in lines[item.lineno - 1 : item.end_lineno]).strip()
            found.append((item.target.id, _default(item.value), comment))
    return found


def _comment(line: str) -> str:
    return line.partition("  # ")[2].strip()


def _default(value: ast.expr | None) -> str:
    if value is None:
        return "must be given"
    if isinstance(value, ast.Constant) and value.value is not None:
        known = value.value
        return (
            f"`{str(known).lower()}`"
            if isinstance(known, bool)
            else f'`"{known}"`'
            if isinstance(known, str)
            else f"`{known:g}`"
        )
    if isinstance(value, ast.Tuple):
        return "`[]`"
    return ""


def _row(name: str, default: str, comment: str) -> str:
    return f"| `{name}` | {default} | {comment.replace('|', 'or')} |"


if __name__ == "__main__":
    sys.exit(main())

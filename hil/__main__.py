"""`python -m hil show|switch|run RIG.toml`: the bench by hand. Read hil/README.md first."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hil.bench import Bench
from hil.rig import load
from powerguard.errors import PowerguardError

RECORDINGS = Path(__file__).parent / "recordings"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code, as powerguard's own commands."""
    parser = argparse.ArgumentParser(prog="python -m hil", description=__doc__)
    acts = parser.add_subparsers(dest="act", required=True)
    for act, about in (
        ("show", "what the rig may switch"),
        ("switch", "one outlet, on or off"),
        ("run", "an outage as the rig plans it, recorded"),
    ):
        sub = acts.add_parser(act, help=about)
        sub.add_argument("rig", type=Path)
        if act == "switch":
            sub.add_argument("outlet")
            sub.add_argument("to", choices=("on", "off"))
        if act == "run":
            sub.add_argument("--recordings", type=Path, default=RECORDINGS, metavar="FOLDER")
    said = parser.parse_args(arguments)
    try:
        return _do(said)
    except PowerguardError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130


def _do(said: argparse.Namespace) -> int:
    rig = load(said.rig)
    bench = Bench(rig, getattr(said, "recordings", RECORDINGS), ask, tell)
    if said.act == "show":
        tell(f"{rig.name}: {rig.what}; UPS {rig.ups}")
        for outlet in rig.outlet:
            role = "  <- a run switches this one" if outlet.name == rig.mains else ""
            tell(f"  {outlet.name} ({type(outlet).__name__.lower()}) feeds {outlet.feeds}{role}")
    elif said.act == "switch":
        bench.switch(said.outlet, said.to == "on")
    else:
        tell(str(bench.run()))
    return 0


def ask(question: str) -> str:
    """An answer from the terminal; "" at its end."""
    print(question, flush=True)
    return sys.stdin.readline().strip()


def tell(text: str) -> None:
    """One line."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())

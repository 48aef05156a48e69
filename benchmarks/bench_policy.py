"""How well does each policy decide, over thousands of simulated outages? Closed loop, seeded, all cores.

    python benchmarks/bench_policy.py                      the table, on the reporting seed
    python benchmarks/bench_policy.py --json               one JSON document
    python benchmarks/bench_policy.py --plot policy.png    and a picture
    python benchmarks/bench_policy.py --flaw no-voltage    with one flaw made worse; "all" runs every one
    python benchmarks/bench_policy.py --quick              a tenth of it

What is simulated, and how far that may be believed: docs/simulation.md. It ranks policies; it is no field evidence.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from policy import show
from policy.cost import cost
from policy.study import F5, OURS, Setting, Study, study

from powerguard.sim.population import FLAWS, REPORTING, TUNING

SUSTAINED, RIDES = 3_450, 11_300
FLAW_SUSTAINED, FLAW_RIDES = 1_200, 1_500


def main() -> int:
    options = _options()
    flaws = list(FLAWS) if options.flaw == "all" else [options.flaw]
    documents = []
    for flaw in flaws:
        began = time.perf_counter()
        done = study(_setting(options, flaw), options.jobs)
        wall_s = time.perf_counter() - began
        documents.append(_document(done, wall_s))
        if len(flaws) > 1:
            print(f"{flaw}: {wall_s:.0f} s", file=sys.stderr)
        if options.plot is not None:
            path = options.plot if len(flaws) == 1 else options.plot.with_stem(f"{options.plot.stem}-{flaw}")
            show.plot(done, path)
        if not options.json:
            setting = done.setting
            print(f"\n# seed {setting.seed}, flaw {flaw}, {wall_s:.0f} s on {options.jobs} processes")
            print(show.table(done))
            if options.losses:
                print(show.losses(done))
    spent = cost(_setting(options, flaws[0]).seed)
    for document in documents:
        document["cost"] = {key: round(value, 1) for key, value in asdict(spent).items()}
    if not options.json:
        print(
            f"\na reading and its bound: {spent.median_us:.0f} us in the median, {spent.p99_us:.0f} us at 99 % "
            f"({spent.readings} readings); state {spent.state_bytes} bytes at most"
        )
    if options.json:
        print(json.dumps(documents[0] if len(documents) == 1 else documents))
    return 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of tables")
    parser.add_argument("--plot", type=Path, help="draw runs lost against training kept into this file")
    parser.add_argument("--flaw", default="none", choices=[*FLAWS, "all"], help="what to make worse")
    parser.add_argument("--quick", action="store_true", help="a tenth of the outages")
    parser.add_argument("--tuning", action="store_true", help="the seed and models that constants are tuned on")
    parser.add_argument("--seed", type=int, help="another seed; models come from it too")
    parser.add_argument("--needs", type=float, nargs="+", default=[20.0, 60.0, 120.0, 300.0], help="flush seconds")
    parser.add_argument("--ours", action="store_true", help="without the peers")
    parser.add_argument("--reference", action="store_true", help="with the f5 reference")
    parser.add_argument("--losses", action="store_true", help="list the outages in which the shipped policy lost a run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes")
    parser.add_argument("--sustained", type=int, help="sustained outages to draw")
    parser.add_argument("--rides", type=int, help="other outages to draw")
    return parser.parse_args()


def _setting(options: argparse.Namespace, flaw: str) -> Setting:
    seed = options.seed if options.seed is not None else TUNING if options.tuning else REPORTING
    sustained, rides = (SUSTAINED, RIDES) if flaw == "none" else (FLAW_SUSTAINED, FLAW_RIDES)
    if options.quick:
        sustained, rides = sustained // 10, rides // 10
    names = tuple(OURS) if options.ours else Setting(0, 0, 0).names
    return Setting(
        seed=seed,
        sustained=options.sustained or sustained,
        rides=options.rides or rides,
        needs=tuple(options.needs),
        flaw=flaw,
        names=(*names, *F5) if options.reference else names,
    )


def _document(done: Study, wall_s: float) -> dict[str, Any]:
    """Everything of one study; *ratio* is runs lost by NUT's rule for each one that ours loses, need 60 s."""
    rows = done.rows()
    return {
        "benchmark": "policy",
        "seed": done.setting.seed,
        "flaw": done.setting.flaw,
        "wall_s": round(wall_s, 1),
        "ratio": _ratio(rows),
        "rows": [
            {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items()} for row in rows
        ],
        "beyond": done.beyond,
        "losses": {
            f"{name}, {need:.0f} s": sums.losses
            for (name, need), sums in done.sums.items()
            if name in OURS and sums.losses
        },
    }


def _ratio(rows: list[dict[str, Any]]) -> float | None:
    lost = {row["policy"]: row["lost"] for row in rows if row["need_s"] == 60.0}
    if "upsmon OB+LB" not in lost or "powerguard" not in lost:
        return None
    return round(float(lost["upsmon OB+LB"]) / max(1, lost["powerguard"]), 1)


if __name__ == "__main__":
    sys.exit(main())

"""The table, and the picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from policy.study import OURS, Study

COLUMNS = (
    ("policy", "policy", "{}"),
    ("lost", "lost", "{}"),
    ("lost %", "lost_pct", "{:.2f}"),
    ("early save only", "early_only", "{}"),
    ("saved, not halted", "saved_not_halted", "{}"),
    ("saved and halted %", "saved_and_halted_pct", "{:.1f}"),
    ("kept %", "kept_pct", "{:.0f}"),
    ("maintained: lost", "maintained_lost", "{}"),
    ("kept %", "maintained_kept_pct", "{:.0f}"),
    ("needless halts", "needless_halts_per_1000", "{:.0f}"),
    ("needless saves", "needless_saves_per_1000", "{:.0f}"),
)


def table(study: Study) -> str:
    """Markdown, one table for each need."""
    lines: list[str] = []
    rows = study.rows()
    for need in study.setting.needs:
        mine = [row for row in rows if row["need_s"] == need]
        first = mine[0]
        lines.append(
            f"\nneed {need:.0f} s: {first['sustained']} sustained outages that an oracle saves "
            f"({first['maintained']} of them on maintained UPSes; {study.beyond.get(need, 0)} more nobody can save), "
            f"{first['rides']} that it rides through\n"
        )
        lines.append("| " + " | ".join(head for head, _, _ in COLUMNS) + " |")
        lines.append("|" + "---|" * len(COLUMNS))
        lines += ["| " + " | ".join(form.format(row[key]) for _, key, form in COLUMNS) + " |" for row in mine]
    return "\n".join(lines)


def losses(study: Study, most: int = 12) -> str:
    """Where the shipped policy lost runs."""
    lines = []
    for (name, need), sums in study.sums.items():
        if name in OURS and sums.losses:
            lines.append(f"\n{name}, need {need:.0f} s:")
            lines += [f"  {loss}" for loss in sums.losses[:most]]
    return "\n".join(lines)


def plot(study: Study, path: Path) -> None:
    """Runs lost against training kept, one panel for each need."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    needs = study.setting.needs
    figure, panels = pyplot.subplots(1, len(needs), figsize=(4.2 * len(needs), 4.6), sharey=True, squeeze=False)
    for panel, need in zip(panels[0], needs, strict=True):
        rows = [row for row in study.rows() if row["need_s"] == need]
        for row in rows:
            _point(panel, row)
        panel.set_title(f"flush takes {need:.0f} s, {rows[0]['sustained']} outages")
        panel.set_xlabel("training kept, % of the oracle's")
        panel.set_xlim(-3, 108)
        panel.set_yscale("symlog", linthresh=0.1, linscale=0.4)
        panel.set_ylim(-0.02, 100)
        panel.grid(visible=True, alpha=0.25)
    panels[0][0].set_ylabel("runs lost, %")
    panels[0][0].set_yticks([0, 0.1, 0.3, 1, 3, 10, 30, 100], ["0", "0.1", "0.3", "1", "3", "10", "30", "100"])
    figure.suptitle(f"simulated outages, seed {study.setting.seed}, flaw: {study.setting.flaw}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


LIFT = {"upsmon OB+LB": 9, "battery.runtime x1.0": 2, "battery.runtime x0.7": -6, "battery.runtime x0.5": -14}
"""Points of labels above their dots: these four lie on each other."""


def _point(panel: Any, row: dict[str, Any]) -> None:
    name, x, y = row["policy"], row["kept_pct"], row["lost_pct"]
    colour = "tab:blue" if name in OURS else "black" if name == "oracle" else "tab:red"
    panel.plot(x, y, "o", color=colour, markersize=5)
    leftward = x > 45
    panel.annotate(
        name,
        (x, y),
        textcoords="offset points",
        xytext=(-6 if leftward else 5, LIFT.get(name, 3)),
        ha="right" if leftward else "left",
        fontsize=6.5,
        color=colour,
    )

"""`powerguard check`: prove beforehand what will be needed in the dark."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from powerguard import config as configuration
from powerguard.cli import checks, checks_node, plan
from powerguard.cli.ask import fetch
from powerguard.cli.checks import SECONDARY, Finding
from powerguard.cli.limits import within
from powerguard.cli.out import console, safe, say_json, seconds
from powerguard.config import FILE, Config
from powerguard.core.need import Need
from powerguard.core.status import LOAD_MAX_PCT
from powerguard.core.types import Sample
from powerguard.errors import CannotCarry, DaemonUnreachable, PowerguardError, UsageError
from powerguard.node import clock, upsmon
from powerguard.node.batteries import about, outage_words
from powerguard.node.learned import LEARNED_FILE, looked_at
from powerguard.node.status import Status

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "bold red"}

WRITE_MBPS = (0.1, 1e6)
"""From a bad network to more than any node writes."""


class Report(msgspec.Struct):
    """The answer of `check --json`."""

    exit_code: int
    findings: list[Finding]
    plan: plan.Plan | None
    carries: bool | None


def register(app: typer.Typer) -> None:
    """Adds the command to *app*."""
    app.command()(check)


def check(
    file: Annotated[Path, typer.Option("-c", "--config", help="the configuration file", readable=False)] = Path(FILE),
    *,
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="where checkpoints go; its disk is measured", show_default=False, readable=False),
    ] = None,
    state_bytes: Annotated[
        str | None,
        typer.Option(
            help="size of the whole training state on this node, as 80GB; default: as measured", show_default=False
        ),
    ] = None,
    write_mbps: Annotated[
        float | None,
        typer.Option(help="megabytes a second that reach the disk; default: measured", show_default=False),
    ] = None,
    load_pct: Annotated[
        float | None,
        typer.Option(help="load of the UPS while the job trains; default: as it is now", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one line of JSON")] = False,
) -> None:
    """Prove everything that an outage will need, and say whether this UPS can carry this job.

    Each failure is one line with what to do. The exit code is the first failure's. Nothing is halted, ordered or kept.
    """
    config = configuration.load(file)
    size = None if state_bytes is None else plan.parse_bytes(state_bytes)
    _fit(directory, size, write_mbps, load_pct)
    findings: list[Finding] = list(checks.configuration(file, config))
    samples: list[Sample] = []
    for ups in config.ups:
        for found in checks.feed(ups):
            samples.append(found) if isinstance(found, Sample) else findings.append(found)
    findings.append(checks.own_directory("state", config.node.state_dir, "StateDirectory= in the unit makes it"))
    findings.append(checks.own_directory("run", config.node.run_dir, "RuntimeDirectory= in the unit makes it"))
    findings.append(checks.halt(config))
    findings += checks_node.peers(config)
    status = _daemon(config, findings)
    config = _learned(config, findings)
    size = size or plan.newest_bytes(directory)
    if directory is not None:
        findings += checks.checkpoint_directory(directory, size)
    made = None
    if len(samples) == len(config.ups):
        measured = write_mbps or _measure(directory, size, findings)
        need = _need(
            config,
            status,
            size,
            measured or None,
            own=state_bytes is not None or write_mbps is not None,
            rate_given=write_mbps is not None,
            directory=directory,
        )
        made = plan.make(
            config,
            tuple(samples),
            clock.now(),
            need=need,
            load_pct=load_pct,
            state_bytes=size,
            write_mbps=measured or None,
        )
        findings += _verdict(made)
        findings += _node(config, findings, tuple(samples), need, made)
    _answer(config, findings, made, as_json=as_json)


def _fit(directory: Path | None, size: float | None, write_mbps: float | None, load_pct: float | None) -> None:
    """UsageError for figures that no node has, and for half of what a save needs: the default would be planned with."""
    if write_mbps is not None:
        within("--write-mbps", write_mbps, *WRITE_MBPS, todo="give megabytes a second, or leave it out and give --dir")
    if load_pct is not None:
        within("--load-pct", load_pct, 1.0, LOAD_MAX_PCT, todo="give percent of what the UPS can carry")
    if size is not None and directory is None and write_mbps is None:
        raise UsageError(
            "--state-bytes doesn't say how long a save takes", todo="give --dir, which is measured, or --write-mbps"
        )
    if write_mbps is not None and directory is None and size is None:
        raise UsageError(
            "--write-mbps doesn't say how long a save takes",
            todo="give --state-bytes, or --dir with a generation in it",
        )


def _learned(config: Config, findings: list[Finding]) -> Config:
    """*config* as the daemon has it, with what outages taught."""
    learned, why = looked_at(Path(config.node.state_dir) / LEARNED_FILE)
    if why:
        findings.append(checks.warn("learned", f"can't be read: {why}", "use sudo; damaged, the daemon begins anew"))
        return config
    config = learned.applied(config)
    known = about(learned)
    findings += [checks.ok(f"battery {one.feed}", f"last outage: {one.last}") for one in known.batteries if one.last]
    findings.append(checks.ok("outages", outage_words(known.outages, known.back)))
    return config


def _daemon(config: Config, findings: list[Finding]) -> Status | None:
    try:
        status = fetch(config.node.run_dir)
    except DaemonUnreachable:
        findings.append(checks.ok("daemon", f"none answers in {config.node.run_dir} yet"))
        return None
    except PowerguardError as err:
        findings.append(checks.fail("daemon", err))
        return None
    ranks = sum(rank.alive for job in status.jobs for rank in job.ranks)
    findings.append(checks.ok("daemon", f"runs ({status.phase}, {ranks} ranks, halt by {status.halt})"))
    if status.halt != config.halt.method:
        findings.append(
            checks.warn("daemon", f"halts by {status.halt}, the file says {config.halt.method}", "run --really")
        )
    if status.journal_trouble:
        findings.append(checks.warn("daemon", f"its journal can't be written: {status.journal_trouble}"))
    return status


def _node(
    config: Config, findings: list[Finding], samples: tuple[Sample, ...], need: Need, made: plan.Plan
) -> list[Finding]:
    """Of what else may shut the node down, and of what would help it to last."""
    conf = upsmon.read()
    secondary = [
        u.name for u in config.ups if any(f.topic == f"ups {u.name}" and SECONDARY in f.text for f in findings)
    ]

    def at_load(load_pct: float) -> plan.Plan:
        return plan.make(config, samples, clock.now(), need=need, load_pct=load_pct)

    return [
        *checks_node.upsmon(config, conf, running=upsmon.runs()),
        *checks_node.hostsync(config, conf, secondary, need),
        *checks_node.shutdown(config, need),
        *checks_node.shedding(config, samples, made, at_load),
    ]


def _measure(directory: Path | None, size: float | None, findings: list[Finding]) -> float:
    """The disk's rate, where it would be used; 0 if not."""
    if directory is None or size is None or any(f.topic == "dir" and f.level == "fail" for f in findings):
        return 0.0
    try:
        rate = plan.measure_mbps(directory)
    except PowerguardError as err:
        findings.append(checks.fail("dir", err))
        return 0.0
    findings.append(checks.ok("dir", f"takes {rate:.0f} MB/s, synced"))
    return rate


def _need(
    config: Config,
    status: Status | None,
    size: float | None,
    rate: float | None,
    *,
    own: bool,
    rate_given: bool,
    directory: Path | None,
) -> Need:
    """By the operator's word, else by the daemon's of running jobs, by saves measured there, by size and rate."""
    if not own and status is not None and any(rank.alive for job in status.jobs for rank in job.ranks):
        told = status.need
        return Need(
            flush_s=told.flush_s, save_s=told.save_s, halt_s=told.halt_s, total_s=told.total_s, by=told.by,
            measured=told.measured,
        )  # fmt: skip
    kept = None if rate_given else plan.kept_need(config.policy, directory, size)
    return kept or plan.need_of(config, size, rate)


def _verdict(made: plan.Plan) -> list[Finding]:
    if made.carries is None:
        return [
            checks.warn("plan", "the runway is unknown on mains", "battery_installed and rated make it known sooner")
        ]
    if made.carries:
        return [checks.ok("plan", f"this UPS carries this job, with {seconds(made.spare_s)} to spare")]
    short = -(made.spare_s or 0.0)
    err = CannotCarry(
        f"this UPS can't carry this job: runway {seconds(made.runway_s)}, need {seconds(made.need_s)} "
        f"+ margin {seconds(made.margin_s)}: {seconds(short)} short",
        todo="less load, a faster disk, a shorter halt_s or a bigger battery; until then the save comes first, at once",
    )
    return [checks.fail("plan", err)]


def _answer(config: Config, findings: list[Finding], made: plan.Plan | None, *, as_json: bool) -> None:
    code = next((found.code for found in findings if found.level == "fail"), 0)
    if as_json:
        say_json(Report(code, findings, made, made.carries if made else None))
    else:
        _print(config, findings, made)
    if code:
        raise typer.Exit(code)


def _print(config: Config, findings: list[Finding], made: plan.Plan | None) -> None:
    screen = console()
    for found in findings:
        todo = f"; {found.todo}" if found.todo else ""
        code = f" (exit {found.code})" if found.code else ""
        line = f"[{_COLOURS[found.level]}]{found.level:<4}[/]  {safe(found.topic)}: {safe(found.text + todo + code)}"
        screen.print(line)
    if made is not None:
        screen.print()
        for words in plan.words(made, config.policy.on_battery):
            screen.print(safe(words))

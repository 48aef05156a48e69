"""Prometheus metrics, made from the status at each scrape. A value that isn't known is absent, never 0."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from powerguard.core.types import Phase
from powerguard.errors import MissingDependency, PowerguardError
from powerguard.node.status import FeedStatus, JobStatus, Status

TOKENS = (
    "OL",
    "OB",
    "LB",
    "HB",
    "RB",
    "CHRG",
    "DISCHRG",
    "BYPASS",
    "CAL",
    "OFF",
    "OVER",
    "TRIM",
    "BOOST",
    "FSD",
    "TEST",
)
"""Status tokens that always have a series, so that an alert on them can be written before they were ever seen."""


class Metrics:
    """The endpoint; *status* is asked at each scrape, on the server's threads."""

    def __init__(self, host: str, port: int, status: Callable[[], Status]) -> None:
        try:
            from prometheus_client import CollectorRegistry, start_http_server
        except ImportError:
            raise MissingDependency(
                "[metrics] listen is set, and prometheus-client isn't installed", todo="pip install 'powerguard[node]'"
            ) from None
        self._status = status
        self._counts: Counter[str] = Counter()
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as err:
            raise PowerguardError(
                f"[metrics] can't listen on {host} port {port}: {err.strerror}", todo="choose another address"
            ) from None

    def count(self, event: str) -> None:
        """One more of *event*: a phase entered, a halt ordered, a journal failure."""
        self._counts[event] += 1

    def close(self) -> None:
        """Ends the endpoint. Bounded."""
        thread = threading.Thread(target=self._server.shutdown, daemon=True)
        thread.start()
        thread.join(2.0)
        self._server.server_close()

    def collect(self) -> Iterator[Any]:
        """The families of one scrape."""
        from prometheus_client.core import CounterMetricFamily

        counted = CounterMetricFamily("powerguard_events", "What happened since the daemon started", labels=["event"])
        for event, count in sorted(self._counts.copy().items()):
            counted.add_metric([event], count)
        yield counted
        status = self._status()
        yield from _node(status)
        yield from _feeds(status.feeds)
        yield from _jobs(status.jobs)


def _gauge(name: str, text: str, labels: tuple[str, ...], values: Iterable[tuple[tuple[str, ...], Any]]) -> Any:
    from prometheus_client.core import GaugeMetricFamily

    family = GaugeMetricFamily(f"powerguard_{name}", text, labels=labels)
    for value in values:
        if value[1] is not None:
            family.add_metric(list(value[0]), float(value[1]))
    return family


def _node(status: Status) -> Iterator[Any]:
    phases = [((phase.value,), status.phase == phase.value) for phase in Phase]
    yield _gauge("phase", "1 for the phase of the node", ("phase",), phases)
    yield _gauge("on_battery", "Whether the node is on battery", (), [((), status.on_battery)])
    yield _gauge("runway_seconds", "Cautious time until power is gone", (), [((), status.runway_s)])
    yield _gauge("idle_runway_seconds", "The same with ranks parked", (), [((), status.idle_runway_s)])
    yield _gauge("need_seconds", "Time to be durable and off", (), [((), status.need.total_s)])
    yield _gauge("spare_seconds", "Runway minus need and margin", (), [((), status.spare_s)])
    yield _gauge("journal_ok", "Whether the journal can be written", (), [((), not status.journal_trouble)])
    yield _gauge("shutdown_waits", "Whether a shutdown would wait for training", (), [((), status.shutdown_waits)])
    yield _gauge("gpus_lowered", "Whether the GPUs run at less power", (), [((), status.gpus_lowered)])
    yield _gauge("ready", "Whether the batteries carry a flush and a halt", (), [((), not status.gate)])
    yield _gauge("build_info", "Version", ("version",), [((status.version,), 1)])


def _feeds(feeds: tuple[FeedStatus, ...]) -> Iterator[Any]:
    ups = ("ups",)
    yield _gauge("ups_up", "Whether the UPS can be read", ups, [((f.name,), f.comm == "ok") for f in feeds])
    yield _gauge("ups_login", "Whether LOGIN is held", ups, [((f.name,), f.login_held) for f in feeds])
    yield _gauge("ups_charge_percent", "As reported", ups, [((f.name,), f.charge_pct) for f in feeds])
    yield _gauge("ups_load_percent", "As reported", ups, [((f.name,), f.load_pct) for f in feeds])
    yield _gauge("ups_runtime_seconds", "As reported", ups, [((f.name,), f.runtime_s) for f in feeds])
    yield _gauge("ups_battery_volts", "As reported", ups, [((f.name,), f.voltage) for f in feeds])
    yield _gauge("ups_fresh_seconds", "Since the last good reading", ups, [((f.name,), f.fresh_s) for f in feeds])
    tokens = [
        ((feed.name, token), token in feed.tokens)
        for feed in feeds
        if feed.comm == "ok"
        for token in sorted({*TOKENS, *feed.tokens})
    ]
    yield _gauge("ups_status", "1 for each token of ups.status", ("ups", "token"), tokens)


_JOB = ("training_job",)
"""`job` is Prometheus's own label: it would come out as `exported_job`."""


def _jobs(jobs: tuple[JobStatus, ...]) -> Iterator[Any]:
    ranks = [((job.name,), sum(rank.alive for rank in job.ranks)) for job in jobs]
    yield _gauge("job_ranks", "Ranks that live", _JOB, ranks)
    yield _gauge("job_world_size", "Ranks that should", _JOB, [((job.name,), job.world_size) for job in jobs])
    steps = [((job.name,), min((r.step for r in job.ranks if r.step is not None), default=None)) for job in jobs]
    yield _gauge("job_step", "The slowest rank's step", _JOB, steps)
    yield _gauge(
        "job_saved_step", "Step of the newest sealed generation", _JOB, [((j.name,), j.saved_step) for j in jobs]
    )
    yield _gauge("job_saved_age_seconds", "Its age", _JOB, [((job.name,), job.saved_s) for job in jobs])

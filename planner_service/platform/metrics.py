"""Metrics: the counters and gauges of a process of the service, for Prometheus. Every application has its own registry.

Labels come from small closed sets (route templates, known methods, planners, kinds and states), never from a
request's free text: the number of series stays small.
"""

import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

MEDIA_TYPE = CONTENT_TYPE_PLAIN_0_0_4
REQUEST_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
SOLVE_BUCKETS_S = (0.001, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0)
ERROR_BUCKETS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 1.0, 2.0)
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
CACHED_S = 2.0

disable_created_metrics()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """The database's counts: jobs that have not ended, by kind and state, and agents that reported lately."""

    jobs: dict[tuple[str, str], int] = field(default_factory=dict)
    agents_alive: int = 0


class Metrics:
    """The metrics of one application. Those without a method here are counted directly, by their labels."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        self._requests = counter("pipeplan_http_requests", "Requests answered.", ("route", "method", "status"))
        help_text = "From the request's head to the end of the answer."
        self._request_s = histogram(
            "pipeplan_http_request_duration_seconds", help_text, ("route", "method"), buckets=REQUEST_BUCKETS_S
        )
        help_text = "The time that planners took to answer."
        self._solve_s = histogram("pipeplan_solve_duration_seconds", help_text, ("planner",), buckets=SOLVE_BUCKETS_S)
        help_text = "|predicted - measured| / measured throughput of runs that have ended."
        self._prediction_error = histogram("pipeplan_prediction_error_ratio", help_text, buckets=ERROR_BUCKETS)
        self.lease_expiries = counter(
            "pipeplan_lease_expiries", "Leases that expired, by the process that found them.", ("kind",)
        )
        self.database_errors = counter("pipeplan_database_errors", "Statements that the database refused.", ("error",))
        self.removed = counter("pipeplan_retention_removed", "Rows that retention removed.", ("noun",))
        self._chores = counter("pipeplan_chores", "Turns of upkeep, by how they ended.", ("chore", "outcome"))
        self._chore_done = gauge(
            "pipeplan_chore_done_timestamp_seconds", "When this process last completed it.", ("chore",)
        )
        self.unaudited = counter("pipeplan_audit_left_out", "Attempts without effect that are not in the audit log.")
        self.pool_in_use = gauge("pipeplan_database_connections_in_use", "Connections of the pool that are in use.")
        build = Info("pipeplan_build", "What is running.", registry=registry)
        build.info({"version": version("pipeplan"), "python": platform.python_version()})
        ProcessCollector(registry=registry)

    def observe_request(self, *, route: str, method: str, status: int, duration_s: float) -> None:
        """Counts an answered request; `route` is the template, never the path."""
        known = method if method in METHODS else "other"
        self._requests.labels(route, known, str(status)).inc()
        self._request_s.labels(route, known).observe(duration_s)

    def observe_solve(self, planner: str, duration_s: float) -> None:
        self._solve_s.labels(planner).observe(duration_s)

    def observe_prediction(self, *, predicted: float, measured: float) -> None:
        """Records a run that has ended: its predicted and its measured throughput."""
        if measured > 0:
            self._prediction_error.observe(abs(predicted - measured) / measured)

    def count_chore(self, chore: str, outcome: str) -> None:
        """Counts a turn of upkeep that was done, stopped (it continues later) or failed."""
        self._chores.labels(chore, outcome).inc()
        if outcome == "done":
            self._chore_done.labels(chore).set_to_current_time()

    def watch_stored(self, read: Callable[[], Stored | None], now_s: Callable[[], float] = time.monotonic) -> None:
        """Registers the function that reads the database's counts; it returns None if the database cannot be read."""
        self.registry.register(_StoredCollector(read, now_s))

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _StoredCollector(Collector):
    """Reads at a scrape, and not again for CACHED_S: many scrapers cost the database no more than one."""

    def __init__(self, read: Callable[[], Stored | None], now_s: Callable[[], float]) -> None:
        self._read = read
        self._now_s = now_s
        self._known: tuple[float, Stored | None] | None = None

    def collect(self) -> Iterable[Metric]:
        """The gauges; those from the database are missing while it does not answer."""
        now_s = self._now_s()
        if self._known is None or now_s - self._known[0] >= CACHED_S:
            self._known = (now_s, self._read())
        _, stored = self._known

        yield GaugeMetricFamily("pipeplan_database_up", "Whether the database answers.", float(stored is not None))
        if stored is None:
            return
        jobs = GaugeMetricFamily("pipeplan_jobs", "Jobs that have not ended.", labels=("kind", "state"))
        for labels, count in sorted(stored.jobs.items()):
            jobs.add_metric(labels, count)
        yield jobs
        yield GaugeMetricFamily("pipeplan_agents_alive", "Agents that reported in the last 90 s.", stored.agents_alive)

    def describe(self) -> Iterable[Metric]:
        """Nothing: the registry need not read the database to learn the names."""
        return ()

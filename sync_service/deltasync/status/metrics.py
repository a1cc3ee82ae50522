"""Prometheus metrics, computed for each scrape. A metric has no sample while its value is unknown."""

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from deltasync.access.limits import Limits
from deltasync.base.clock import Durations
from deltasync.base.events import EventCounts, EventKind
from deltasync.base.process import built_commit, built_version
from deltasync.consumers.consumer import Consumer
from deltasync.log.volume import Volume
from deltasync.model.feed import FeedStatus
from deltasync.status.lag import report
from deltasync.status.overview import volume_statuses
from deltasync.status.records import (
    ConsumerStatus,
    ModelStatus,
    ProcessStatus,
    ReplicaStatus,
    TableLag,
    TableStatus,
    VolumeStatus,
    declared,
)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The input of the metrics at one moment."""

    consumers: Sequence[tuple[Consumer, FeedStatus]] = ()
    models: Sequence[ModelStatus] = ()
    tables: Sequence[TableStatus] = ()
    process: ProcessStatus | None = None
    stages: Mapping[str, Mapping[str, Durations]] = field(default_factory=dict)
    volumes: Sequence[Volume] = ()
    events: EventCounts = field(default_factory=EventCounts)
    limits: Limits = field(default_factory=Limits)
    commits: Durations = field(default_factory=Durations)
    log_bytes: int = 0
    alive: int = 1
    risks: int = 0
    checkpoint_failures: int = 0
    certificates_expire: Mapping[str, float] = field(default_factory=dict)


def exposition(figures: Figures, now_unix_ns: int) -> bytes:
    """Format the metrics as Prometheus text. Any thread."""
    registry = CollectorRegistry()
    registry.register(_Snapshot(families(figures, now_unix_ns)))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


_PAUSE_SECONDS = 50e-6


class _Snapshot(Collector):
    """A collector of metrics that are already computed."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Yield the metrics with a pause after each.

        Without it, formatting all of them would hold the interpreter and delay the steps of a cut.
        """
        for each in self._metrics:
            yield each
            time.sleep(_PAUSE_SECONDS)


def families(figures: Figures, now_unix_ns: int) -> list[Metric]:
    """All metrics of the service, including those without samples. See `exposition`."""
    consumers = [report(*each, now_unix_ns) for each in figures.consumers]
    durations = [(each.name, each.durations) for each, _ in figures.consumers]
    return [
        *consumer_metrics(consumers),
        _histogram(
            "freshness_seconds",
            "Seconds from the end of a training step until a replica acknowledged its rows.",
            ["consumer"],
            (([name], each.freshness) for name, each in durations),
        ),
        _histogram(
            "delivery_seconds",
            "Seconds of each stage of a release, from the service's tables to a replica.",
            ["consumer", "part"],
            (([name, part], getattr(each, part)) for name, each in durations for part in ("release", "ack")),
        ),
        # Of a model that this process has not loaded, nothing is known but that it cannot be loaded.
        *record_metrics(
            ModelStatus, ["model"], [each for each in figures.models if each.head is not None or each.failed]
        ),
        *record_metrics(TableStatus, ["model", "table"], figures.tables),
        _histogram(
            "cut_seconds",
            "Seconds of each stage of a cut, until the service's tables had its rows.",
            ["model", "part"],
            (([name, part], each) for name, stages in figures.stages.items() for part, each in stages.items()),
        ),
        *record_metrics(VolumeStatus, ["volume"], volume_statuses(figures.volumes)),
        *_limit_metrics(figures.limits),
        *record_metrics(ProcessStatus, [], [figures.process] if figures.process else []),
        _histogram(
            "log_commit_seconds", "Duration of a commit to the log, in seconds.", [], [([], figures.commits)]
        ),
        _gauge("log_bytes", "Bytes of data in the log.", figures.log_bytes),
        _gauge("log_risks", "Accepted risks of losing acknowledged data.", figures.risks),
        _gauge("processes_alive", "Processes of the cluster that are alive, including this one.", figures.alive),
        _counter(
            "checkpoint_failures",
            "Failed attempts to write or copy a checkpoint since the service started.",
            figures.checkpoint_failures,
        ),
        _by(
            GaugeMetricFamily,
            "certificate_expires_seconds",
            "Earliest expiry of the certificates in a file, in seconds since 1970.",
            "setting",
            figures.certificates_expire,
        ),
        _by(
            CounterMetricFamily,
            "events",
            "Events since the service started, by kind.",
            "event",
            {kind.label: figures.events[kind] for kind in EventKind},
        ),
        _build_info(),
    ]


def consumer_metrics(consumers: Sequence[ConsumerStatus]) -> list[Metric]:
    """Metrics of consumers, their tables and their replicas."""
    paused = {each.consumer: each.paused is not None for each in consumers}
    return [
        *record_metrics(ConsumerStatus, ["consumer"], consumers),
        _by(
            GaugeMetricFamily,
            "consumer_paused",
            "1 if the consumer is paused and its replicas keep their current rows, else 0.",
            "consumer",
            paused,
        ),
        *_of_parts(TableLag, ["consumer", "table"], consumers, "tables"),
        *_of_parts(ReplicaStatus, ["consumer", "replica"], consumers, "replicas"),
    ]


_Sample = tuple[list[str], Any]


def record_metrics(record: type, labels: list[str], objects: Sequence[Any]) -> list[Metric]:
    """The declared metrics of a record, with a sample of each object; its fields `labels` name it."""
    return _families(record, labels, [([getattr(each, name) for name in labels], each) for each in objects])


def _of_parts(record: type, labels: list[str], consumers: Sequence[ConsumerStatus], part: str) -> list[Metric]:
    """The same for the tables or replicas of consumers, without guests."""
    named = [
        ([each.consumer, getattr(one, labels[1])], one)
        for each in consumers
        for one in getattr(each, part)
        if not getattr(one, "guest", False)
    ]
    return _families(record, labels, named)


def _families(record: type, labels: list[str], objects: Sequence[_Sample]) -> list[Metric]:
    families = dict[str, GaugeMetricFamily | CounterMetricFamily]()
    for path in declared(record):
        shown = path.shown
        if not (name := shown.gauge or shown.counter):
            continue
        kind = GaugeMetricFamily if shown.gauge else CounterMetricFamily
        own = [*labels, "state"] if shown.state or path.names == ("state",) else labels
        family = families.setdefault(name, kind(f"deltasync_{name}", shown.description, labels=own))
        for values, each in objects:
            value = path.value(each)
            if isinstance(value, str):
                family.add_metric([*values, value], 1.0)
            elif value is not None:
                number = len(value) if isinstance(value, list) else float(value)
                family.add_metric([*values, shown.state] if shown.state else values, number)
    return list(families.values())


def _by(kind: Any, name: str, text: str, label: str, numbers: Mapping[str, float]) -> Metric:
    """A metric with one label."""
    family: Metric = kind(f"deltasync_{name}", text, labels=[label])
    for value, number in numbers.items():
        family.add_metric([value], float(number))  # type: ignore[attr-defined]
    return family


def _gauge(name: str, text: str, number: float) -> Metric:
    return GaugeMetricFamily(f"deltasync_{name}", text, value=number)


def _counter(name: str, text: str, number: float) -> Metric:
    return CounterMetricFamily(f"deltasync_{name}", text, value=number)


def _histogram(name: str, text: str, labels: list[str], samples: Iterable[tuple[list[str], Durations]]) -> Metric:
    """A histogram of durations since the service started."""
    family = HistogramMetricFamily(f"deltasync_{name}", text, labels=labels)
    for values, durations in samples:
        counts, seconds = durations.read()
        ends = [*map(str, durations.bounds), "+Inf"]
        family.add_metric(values, list(zip(ends, accumulate(counts), strict=True)), sum_value=seconds)
    return family


def _limit_metrics(limits: Limits) -> Iterator[Metric]:
    """Each limit, its current use if the service counts it, and the requests that it refused."""
    names = limits.options.by_name
    yield _by(GaugeMetricFamily, "limit", "The value of the limit.", "limit", names)
    text = "Current use of the limit, if the service counts it."
    yield _by(GaugeMetricFamily, "limit_taken", text, "limit", dict(sorted(limits.numbers.items())))
    text = "Requests that the limit has refused since the service started."
    yield _by(CounterMetricFamily, "limit_refused", text, "limit", {name: limits.refused[name] for name in names})


def _build_info() -> Metric:
    family = GaugeMetricFamily(
        "deltasync_build_info", "Version and commit of the service; always 1.", labels=["version", "commit"]
    )
    family.add_metric([built_version(), built_commit() or "unknown"], 1.0)
    return family

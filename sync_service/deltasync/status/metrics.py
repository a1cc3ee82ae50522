"""Prometheus metrics, computed when they are asked for."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from deltasync.consumers.consumer import Consumer
from deltasync.core.durations import Durations
from deltasync.core.events import EventCounts, EventKind
from deltasync.core.limits import Limits
from deltasync.core.tables import TableSpec
from deltasync.feeds.standing import Standing
from deltasync.status.consumer_metrics import consumer_metrics
from deltasync.status.limit_metrics import limit_metrics
from deltasync.status.metric_families import counter, gauge, histogram
from deltasync.status.process_metrics import ProcessFigures, process_metrics
from deltasync.status.report import report
from deltasync.status.trainers import RankState
from deltasync.storage.volume import Volume

_PAUSE_SECONDS = 50e-6


@dataclass(frozen=True)
class ModelFigures:
    """What is shown of a model: its newest version, what was published since the service started, its tables,
    whether cuts cannot be sealed or applied, the time of the newest event it was trained on (nanoseconds since
    1970; None where nobody has said it), the state of each rank of the run that publishes it, and how long each
    part of cuts' way took.
    """

    name: str
    newest_version: int
    published_rows: int
    published_bytes: int
    tables: Sequence[TableSpec]
    failed: bool
    event_time_unix_ns: int | None
    ranks: Sequence[RankState] = ()
    parts: Mapping[str, Durations] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What metrics are computed from, taken at one moment; `consumers` do not change any more. `models` does not
    have those whose names are in `reloading`.
    """

    consumers: Sequence[tuple[Consumer, Standing]]
    models: Sequence[ModelFigures]
    events: EventCounts
    log_bytes: int
    commits: Durations
    volumes: Sequence[Volume]
    reloading: Sequence[str] = ()
    certificates_expire: Mapping[str, float] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    process: ProcessFigures = field(default_factory=ProcessFigures)


def exposition(figures: Figures, now_unix_ns: int) -> bytes:
    """The metrics in Prometheus' text format. Any thread.

    Args:
        figures: what they are computed from.
        now_unix_ns: the time, nanoseconds since 1970.
    """
    consumers = [consumer for consumer, _ in figures.consumers]
    lags = [report(consumer, standing, now_unix_ns) for consumer, standing in figures.consumers]
    registry = CollectorRegistry()
    found = [*consumer_metrics(consumers, lags), *_model_metrics(figures), *limit_metrics(figures.limits)]
    found += process_metrics(figures.process, now_unix_ns)
    registry.register(_Snapshot(found))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


class _Snapshot(Collector):
    """Metrics that were measured before."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """One after the other, with a pause after each: a cut's steps would otherwise wait for the interpreter
        until its switch interval is over, as long as they all take themselves.
        """
        for each in self._metrics:
            yield each
            time.sleep(_PAUSE_SECONDS)


def _model_metrics(figures: Figures) -> list[Metric]:
    models = figures.models
    tables = [(model.name, table) for model in models for table in model.tables]
    return [
        gauge(
            "head_version",
            "Newest sealed version.",
            ["model"],
            [([model.name], model.newest_version) for model in models],
        ),
        gauge(
            "head_event_time_seconds",
            "Time of the newest event that the newest sealed version had been trained on, in seconds since 1970.",
            ["model"],
            [
                ([model.name], model.event_time_unix_ns / 1e9)
                for model in models
                if model.event_time_unix_ns is not None
            ],
        ),
        counter(
            "published_rows",
            "Rows of sealed cuts since the service started.",
            ["model"],
            [([model.name], model.published_rows) for model in models],
        ),
        counter(
            "published_bytes",
            "Bytes of ids and values of sealed cuts.",
            ["model"],
            [([model.name], model.published_bytes) for model in models],
        ),
        gauge(
            "table_rows",
            "Rows of the table.",
            ["model", "table"],
            [([name, table.name], table.rows) for name, table in tables],
        ),
        gauge(
            "table_bytes",
            "Bytes of the table's values.",
            ["model", "table"],
            [([name, table.name], table.nbytes) for name, table in tables],
        ),
        gauge(
            "model_failed",
            "Whether cuts of the model cannot be sealed or applied, which is tried again.",
            ["model"],
            [*(([model.name], model.failed) for model in models), *(([name], True) for name in figures.reloading)],
        ),
        gauge(
            "publishing_ranks",
            "Ranks of the run that publishes the model.",
            ["model", "state"],
            [([model.name, state], model.ranks.count(state)) for model in models for state in get_args(RankState)],
        ),
        counter(
            "events",
            "How often what has happened since the service started.",
            ["event"],
            [([kind.value], figures.events[kind]) for kind in EventKind],
        ),
        gauge("log_bytes", "Bytes the log holds.", [], [([], figures.log_bytes)]),
        histogram("log_commit_seconds", "How long commits of the log took.", [], [([], figures.commits)]),
        histogram(
            "cut_seconds",
            "How long each part of the way of cuts took, until the tables had them.",
            ["model", "part"],
            [([model.name, part], found) for model in models for part, found in model.parts.items()],
        ),
        gauge(
            "certificate_expires_seconds",
            "When the first certificate of a file expires, in seconds since 1970.",
            ["setting"],
            [([name], ends) for name, ends in figures.certificates_expire.items()],
        ),
        *_volume_metrics(figures.volumes),
    ]


def _volume_metrics(volumes: Sequence[Volume]) -> list[Metric]:
    return [
        gauge(
            "volume_free_bytes",
            "Bytes that the volume has left for the service.",
            ["volume"],
            [([volume.name], free) for volume in volumes if (free := volume.free_bytes) is not None],
        ),
        gauge(
            "volume_failed",
            "Whether the volume refuses what the service writes, which is tried again.",
            ["volume"],
            [([volume.name], bool(volume.trouble)) for volume in volumes],
        ),
    ]

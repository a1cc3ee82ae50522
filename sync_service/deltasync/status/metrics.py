"""Prometheus metrics, computed for each scrape. A metric has no sample while its value is unknown."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import attrgetter
from typing import Any, get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from deltasync.access.limits import Limits
from deltasync.base.clock import Durations
from deltasync.base.events import EventCounts, EventKind
from deltasync.base.process import built_commit, built_version
from deltasync.consumers.consumer import Consumer
from deltasync.core.tables import TableSpec
from deltasync.log.volume import Volume
from deltasync.model.feed import FeedStatus
from deltasync.service.self_test import ProbeStatus
from deltasync.status.lag import ConsumerLag, report
from deltasync.status.overview import RankState


@dataclass(frozen=True)
class ModelFigures:
    """The figures of a model.

    Attributes:
        name: its name.
        newest_version: its newest sealed version.
        published_rows: rows in cuts sealed since the service started.
        published_bytes: bytes of their ids and values.
        tables: its tables.
        failed: whether cuts cannot be sealed or applied.
        event_time_unix_ns: time of the newest event it was trained on, nanoseconds since 1970; None if unknown.
        ranks: the state of each rank of the run that publishes it.
        parts: duration of each stage of its cuts.
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

    @property
    def event_time_seconds(self) -> float | None:
        """Time of that event, seconds since 1970."""
        return None if self.event_time_unix_ns is None else self.event_time_unix_ns / 1e9


@dataclass(frozen=True, kw_only=True)
class ProcessFigures:
    """The figures of this process at one moment.

    Attributes:
        confirmed: whether brokers confirmed its lease in time; True without a cluster.
        alive: number of processes that are alive, including this one.
        unowned: number of models that no process owns.
        made_unix_ns: when the newest checkpoint of each model was completed, nanoseconds since 1970.
        copied_versions: version of each model's newest checkpoint that is complete at the service's URL; empty
            without a URL.
        unsaved_bytes: bytes of each model in the log that are not in its newest checkpoint.
        failures: number of failed attempts to write or copy a checkpoint.
        risks: number of accepted risks of losing acknowledged data.
        probe: results of the probe; None if there is no probe.
    """

    confirmed: bool = True
    alive: int = 1
    unowned: int = 0
    made_unix_ns: Mapping[str, int] = field(default_factory=dict)
    copied_versions: Mapping[str, int] = field(default_factory=dict)
    unsaved_bytes: Mapping[str, int] = field(default_factory=dict)
    failures: int = 0
    risks: int = 0
    probe: ProbeStatus | None = None


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The input of the metrics at one moment.

    `consumers` are copies. `models` leaves out those in `reloading`. `kept_versions` counts those of each model.
    """

    consumers: Sequence[tuple[Consumer, FeedStatus]]
    models: Sequence[ModelFigures]
    events: EventCounts
    log_bytes: int
    commits: Durations
    volumes: Sequence[Volume]
    kept_versions: Mapping[str, int] = field(default_factory=dict)
    reloading: Sequence[str] = ()
    certificates_expire: Mapping[str, float] = field(default_factory=dict)
    limits: Limits = field(default_factory=Limits)
    process: ProcessFigures = field(default_factory=ProcessFigures)


def exposition(figures: Figures, now_unix_ns: int) -> bytes:
    """Format the metrics as Prometheus text. Any thread.

    Args:
        figures: the input.
        now_unix_ns: the current time, nanoseconds since 1970.
    """
    registry = CollectorRegistry()
    registry.register(_Snapshot(families(figures, now_unix_ns)))
    ProcessCollector(registry=registry)
    return generate_latest(registry)


def families(figures: Figures, now_unix_ns: int) -> list[Metric]:
    """All metrics of the service, including those without samples. See `exposition`."""
    consumers = [consumer for consumer, _ in figures.consumers]
    lags = [report(consumer, status, now_unix_ns) for consumer, status in figures.consumers]
    return [
        *consumer_metrics(consumers, lags, now_unix_ns),
        *_model_metrics(figures),
        *volume_metrics(figures.volumes),
        *_limit_metrics(figures.limits),
        *_process_metrics(figures.process, now_unix_ns),
    ]


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


# The labels' values and the number.
Sample = tuple[list[str], float]
# A metric of several objects: its name, its help text, and the attribute that is the value.
Declaration = tuple[str, str, str]


def _gauge(name: str, text: str, labels: list[str], samples: Iterable[Sample]) -> Metric:
    """A gauge: a number that can rise and fall."""
    return _filled(GaugeMetricFamily(f"deltasync_{name}", text, labels=labels), samples)


def _counter(name: str, text: str, labels: list[str], samples: Iterable[Sample]) -> Metric:
    """A counter since the service started; Prometheus adds `_total` to its name."""
    return _filled(CounterMetricFamily(f"deltasync_{name}", text, labels=labels), samples)


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[Sample]) -> Metric:
    for values, number in samples:
        family.add_metric(values, float(number))
    return family


def _each(
    make: Callable[[str, str, list[str], Iterable[Sample]], Metric],
    labels: list[str],
    objects: Sequence[tuple[list[str], Any]],
    *declared: Declaration,
) -> list[Metric]:
    """Build each declared metric, with a sample of every object whose attribute is not None."""
    return [
        make(
            name, text, labels, [(values, value) for values, value in _values(objects, path) if value is not None]
        )
        for name, text, path in declared
    ]


def _values(objects: Sequence[tuple[list[str], Any]], path: str) -> Iterable[tuple[list[str], Any]]:
    read = attrgetter(path)
    return ((values, read(each)) for values, each in objects)


def _histogram(name: str, text: str, labels: list[str], samples: Iterable[tuple[list[str], Durations]]) -> Metric:
    """A histogram of durations since the service started."""
    family = HistogramMetricFamily(f"deltasync_{name}", text, labels=labels)
    for values, durations in samples:
        counts, seconds = durations.read()
        ends = [*map(str, durations.bounds), "+Inf"]
        family.add_metric(values, list(zip(ends, accumulate(counts), strict=True)), sum_value=seconds)
    return family


def consumer_metrics(consumers: Sequence[Consumer], lags: Sequence[ConsumerLag], now_unix_ns: int) -> list[Metric]:
    """Metrics of consumers and of their lags."""
    of_consumer, of_table, of_replica = ["consumer"], ["consumer", "table"], ["consumer", "replica"]
    each_lag = [([lag.consumer], lag) for lag in lags]
    released = [(names, lag) for names, lag in each_lag if lag.release]
    tables = [([lag.consumer, table.table], table) for lag in lags for table in lag.tables]
    # A table without a norm has not been compared with the replicas' rows yet.
    compared = [(names, table) for names, table in tables if table.unsent_norm is not None]
    replicas = [([lag.consumer, replica.replica], replica) for lag in lags for replica in lag.fleet]
    counted = [([each.name], each) for each in consumers]
    return [
        _gauge(
            "consumer_state",
            "1 for the consumer's current state.",
            ["consumer", "state"],
            [([lag.consumer, lag.state], 1.0) for lag in lags],
        ),
        *_each(_gauge, of_consumer, each_lag, *_lag_metrics("consumer", "the consumer's slowest replica")),
        *_each(_gauge, of_consumer, released, *_RELEASE),
        *_each(_gauge, of_consumer, each_lag, *_UNSENT),
        *_each(_gauge, of_consumer, released, _OLDEST_ROW),
        *_each(_gauge, of_table, tables, *_TABLE),
        *_each(_gauge, of_table, compared, _TABLES_OLDEST_ROW),
        *_each(_gauge, of_replica, replicas, *_lag_metrics("replica", "the replica"), *_REPLICA),
        _gauge(
            "consumer_replicas",
            "Replicas of the consumer.",
            ["consumer", "state"],
            [
                ([lag.consumer, state], sum(each.connected == (state == "connected") for each in lag.fleet))
                for lag in lags
                for state in ("connected", "away")
            ],
        ),
        _gauge(
            "consumer_failed",
            "1 if an error keeps the consumer's replicas from receiving updates, else 0.",
            of_consumer,
            # A pause must not hide an error: operators need to see it before they resume the consumer.
            [([lag.consumer], (lag.paused.otherwise if lag.paused else lag.state) == "failed") for lag in lags],
        ),
        _gauge(
            "consumer_paused",
            "1 if the consumer is paused and its replicas keep their current rows, else 0.",
            of_consumer,
            [([lag.consumer], lag.paused is not None) for lag in lags],
        ),
        _gauge(
            "consumer_follows_seconds",
            "Seconds since the consumer began to follow its kept version; 0 if it follows the newest version.",
            of_consumer,
            [([each.name], _follows_seconds(each, now_unix_ns)) for each in consumers],
        ),
        _gauge(
            "consumer_damaged_tables",
            "Tables of replicas that are damaged now, summed over the replicas.",
            of_consumer,
            [([lag.consumer], sum(len(replica.damaged) for replica in lag.fleet)) for lag in lags],
        ),
        _gauge(
            "consumer_unbound_tables",
            "Tables that replicas of the consumer leave out, summed over the replicas.",
            of_consumer,
            [([lag.consumer], sum(len(replica.unbound) for replica in lag.fleet)) for lag in lags],
        ),
        _histogram(
            "freshness_seconds",
            "Seconds from the end of a training step until a replica acknowledged its rows.",
            of_consumer,
            [([each.name], each.durations.freshness) for each in consumers],
        ),
        _histogram(
            "delivery_seconds",
            "Seconds of each stage of a release, from the service's tables to a replica.",
            ["consumer", "part"],
            [
                ([each.name, part], getattr(each.durations, part))
                for each in consumers
                for part in ("release", "ack")
            ],
        ),
        *_each(_counter, of_consumer, counted, *_COUNTERS),
    ]


def _follows_seconds(consumer: Consumer, now_unix_ns: int) -> float:
    return max(0, now_unix_ns - consumer.follows.since_unix_ns) / 1e9 if consumer.follows else 0.0


def _lag_metrics(whose: str, who: str) -> list[Declaration]:
    """The lag metrics of a replica: `whose` is the prefix of the names, `who` the replica in words."""
    return [
        (f"{whose}_lag_versions", f"Sealed versions that {who} has not applied.", "lag.versions"),
        (f"{whose}_lag_rows", f"Upper bound of the rows in which {who} differs from the model.", "lag.rows"),
        (
            f"{whose}_lag_bytes",
            f"Size (ids and values) of the rows in which {who} differs from the model.",
            "lag.bytes",
        ),
        (
            f"{whose}_lag_seconds",
            f"Age in seconds of the oldest version or release that {who} has not applied.",
            "lag.seconds",
        ),
        (
            f"{whose}_seconds_behind_events",
            f"Age in seconds of the newest training event in the version that {who} holds.",
            "lag.seconds_behind_events",
        ),
    ]


_RELEASE: list[Declaration] = [
    ("consumer_release", "Number of the newest release.", "release.number"),
    ("consumer_release_rows", "Rows in the newest release.", "release.rows"),
    ("consumer_release_bytes", "Size (ids and values) of the rows in the newest release.", "release.bytes"),
    ("consumer_release_norm", "L2 norm of the change of the rows in the newest release.", "release.norm"),
    (
        "consumer_left_rows",
        "Changed rows that the newest release postponed.",
        "release.left_rows",
    ),
    ("consumer_left_bytes", "Size (ids and values) of the postponed rows.", "release.left_bytes"),
    ("consumer_left_norm", "L2 norm of the unsent change of the postponed rows.", "release.left_norm"),
]
_UNSENT: list[Declaration] = [
    (
        "consumer_unsent_norm",
        "L2 norm of the difference between the model and the replicas, as of the last release.",
        "lag.unsent_norm",
    ),
    ("consumer_unsent_share", "The unsent norm as a share of the tables' norm: 0.1 is 10 %.", "lag.unsent_share"),
]
_OLDEST_ROW: Declaration = (
    "consumer_oldest_row_seconds",
    "Age in seconds of the oldest postponed row; 0 if no row is postponed.",
    "oldest_row_seconds",
)
_TABLE: list[Declaration] = [
    (
        "consumer_table_lag_rows",
        "Upper bound of the rows of the table in which the consumer's slowest replica differs from the model.",
        "rows",
    ),
    ("consumer_table_lag_bytes", "Size (ids and values) of the rows of the table that differ.", "bytes"),
    ("consumer_table_unsent_share", "The table's unsent norm as a share of its norm.", "unsent_share"),
    (
        "consumer_table_unsent_norm",
        "L2 norm of the difference between the model's table and the replicas', as of the last release.",
        "unsent_norm",
    ),
]
_TABLES_OLDEST_ROW: Declaration = (
    "consumer_table_oldest_row_seconds",
    "Age in seconds of the oldest postponed row of the table.",
    "oldest_row_seconds",
)
_REPLICA: list[Declaration] = [
    (
        "replica_unsent_norm",
        "L2 norm of the difference between the model and the replica, once it holds the newest release.",
        "lag.unsent_norm",
    ),
    ("replica_checked", "1 if the replica's last acknowledgement had the right checksums, else 0.", "checked"),
]
_COUNTERS: list[Declaration] = [
    ("released_rows", "Rows sent to replicas since the service started.", "released_rows"),
    ("released_bytes", "Bytes of ids and values sent to replicas since the service started.", "released_bytes"),
    (
        "consumer_damages",
        "Damaged tables of replicas that were detected since the service started.",
        "damages",
    ),
    (
        "consumer_rewinds",
        "Replicas that connected with rows of a discarded history since the service started.",
        "rewinds",
    ),
]


def _model_metrics(figures: Figures) -> list[Metric]:
    models = [([model.name], model) for model in figures.models]
    tables = [([model.name, table.name], table) for model in figures.models for table in model.tables]
    return [
        *_each(
            _gauge,
            ["model"],
            models,
            ("head_version", "Newest sealed version.", "newest_version"),
            (
                "head_event_time_seconds",
                "Time of the newest training event in the newest sealed version, in seconds since 1970.",
                "event_time_seconds",
            ),
        ),
        *_each(
            _counter,
            ["model"],
            models,
            ("published_rows", "Rows in sealed cuts since the start.", "published_rows"),
            ("published_bytes", "Bytes of ids and values in sealed cuts since the start.", "published_bytes"),
        ),
        *_each(
            _gauge,
            ["model", "table"],
            tables,
            ("table_rows", "Rows of the table.", "rows"),
            ("table_bytes", "Bytes of the table's values.", "nbytes"),
        ),
        _gauge(
            "model_failed",
            "1 if the service cannot seal or apply cuts of the model and is retrying, else 0.",
            ["model"],
            [*((names, model.failed) for names, model in models), *(([name], True) for name in figures.reloading)],
        ),
        _gauge(
            "model_kept_versions",
            "Kept versions of the model.",
            ["model"],
            [([name], number) for name, number in sorted(figures.kept_versions.items())],
        ),
        _gauge(
            "publishing_ranks",
            "Ranks of the run that publishes the model.",
            ["model", "state"],
            [
                ([model.name, state], model.ranks.count(state))
                for model in figures.models
                for state in get_args(RankState)
            ],
        ),
        _counter(
            "events",
            "Events since the service started, by kind.",
            ["event"],
            [([kind.value], figures.events[kind]) for kind in EventKind],
        ),
        _gauge("log_bytes", "Bytes of data in the log.", [], [([], figures.log_bytes)]),
        _histogram(
            "log_commit_seconds", "Duration of a commit to the log, in seconds.", [], [([], figures.commits)]
        ),
        _histogram(
            "cut_seconds",
            "Seconds of each stage of a cut, until the service's tables had its rows.",
            ["model", "part"],
            [
                ([model.name, part], durations)
                for model in figures.models
                for part, durations in model.parts.items()
            ],
        ),
        _gauge(
            "certificate_expires_seconds",
            "Earliest expiry of the certificates in a file, in seconds since 1970.",
            ["setting"],
            [([name], ends) for name, ends in figures.certificates_expire.items()],
        ),
    ]


def volume_metrics(volumes: Sequence[Volume]) -> list[Metric]:
    """The free bytes of each volume, and whether it refuses writes. Asks the operating system."""
    return [
        *_each(
            _gauge,
            ["volume"],
            [([volume.name], volume) for volume in volumes],
            ("volume_free_bytes", "Free bytes of the volume that the service may use.", "free_bytes"),
        ),
        _gauge(
            "volume_failed",
            "1 if the volume refuses writes and the service is retrying, else 0.",
            ["volume"],
            [([volume.name], bool(volume.trouble)) for volume in volumes],
        ),
    ]


def _limit_metrics(limits: Limits) -> list[Metric]:
    """Each limit, its current use if the service counts it, and the requests that it refused."""
    names = limits.options.by_name
    return [
        _gauge("limit", "The value of the limit.", ["limit"], [([name], most) for name, most in names.items()]),
        _gauge(
            "limit_taken",
            "Current use of the limit, if the service counts it.",
            ["limit"],
            [([name], number) for name, number in sorted(limits.numbers.items())],
        ),
        _counter(
            "limit_refused",
            "Requests that the limit has refused since the service started.",
            ["limit"],
            [([name], limits.refused[name]) for name in names],
        ),
    ]


def _process_metrics(figures: ProcessFigures, now_unix_ns: int) -> list[Metric]:
    process = [(list[str](), figures)]
    probe = [(list[str](), figures.probe)] if figures.probe else []
    return [
        _gauge(
            "build_info",
            "Version and commit of the service; always 1.",
            ["version", "commit"],
            [([built_version(), built_commit() or "unknown"], 1)],
        ),
        *_each(
            _gauge,
            [],
            process,
            (
                "lease_confirmed",
                "1 if the brokers confirmed this process's lease in time, else 0.",
                "confirmed",
            ),
            ("processes_alive", "Processes of the cluster that are alive, including this one.", "alive"),
            ("models_without_owner", "Models that no process owns now.", "unowned"),
            ("log_risks", "Accepted risks of losing acknowledged data.", "risks"),
        ),
        _gauge(
            "checkpoint_age_seconds",
            "Seconds since the model's newest checkpoint was completed.",
            ["model"],
            [([name], max(0, now_unix_ns - made) / 1e9) for name, made in sorted(figures.made_unix_ns.items())],
        ),
        _gauge(
            "checkpoint_copied_version",
            "Version of the model's newest checkpoint that is complete at the URL of --checkpoints; 0 if none is.",
            ["model"],
            [([name], version) for name, version in sorted(figures.copied_versions.items())],
        ),
        _gauge(
            "log_bytes_since_checkpoint",
            "Bytes in the log that are not in the model's newest checkpoint.",
            ["model"],
            [([name], size) for name, size in sorted(figures.unsaved_bytes.items())],
        ),
        *_each(
            _gauge,
            [],
            probe,
            (
                "probe_seconds",
                "Seconds from publishing the probe's last row until its replica had it.",
                "seconds",
            ),
            (
                "probe_age_seconds",
                "Seconds since a row of the probe last arrived; since the start if none has.",
                "age_seconds",
            ),
        ),
        *_each(_counter, [], probe, ("probe_failures", "Rows of the probe that did not arrive.", "failures")),
        *_each(
            _counter,
            [],
            process,
            (
                "checkpoint_failures",
                "Failed attempts to write or copy a checkpoint since the service started.",
                "failures",
            ),
        ),
    ]

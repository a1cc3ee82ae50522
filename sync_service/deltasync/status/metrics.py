"""Prometheus metrics, computed when a scraper asks for them. A value that is not known has no sample."""

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
from deltasync.model.feed import Standing
from deltasync.service.self_test import ProbeStatus
from deltasync.status.lag import ConsumerLag, report
from deltasync.status.overview import RankState


@dataclass(frozen=True)
class ModelFigures:
    """What is shown of a model.

    Attributes:
        name: its name.
        newest_version: its newest sealed version.
        published_rows: rows of the cuts that were sealed since the service started.
        published_bytes: bytes of their ids and values.
        tables: its tables.
        failed: whether cuts cannot be sealed or applied.
        event_time_unix_ns: time of the newest event it was trained on, nanoseconds since 1970; None if unknown.
        ranks: the state of each rank of the run that publishes it.
        parts: how long each part of the way of its cuts took.
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
    """What this process is, at one moment.

    Attributes:
        confirmed: whether the others have heard of it within the lease; True where it is alone.
        alive: number of processes that are alive, including this one.
        unowned: number of models that no process owns.
        made_unix_ns: when the newest checkpoint of each model was complete, nanoseconds since 1970.
        unsaved_bytes: bytes of each model in the log that its newest checkpoint does not have.
        failures: number of checkpoints that could not be written or copied.
        risks: number of known ways to lose what the log has acknowledged.
        probe: how rows of the probe fare; None if there is no probe.
    """

    confirmed: bool = True
    alive: int = 1
    unowned: int = 0
    made_unix_ns: Mapping[str, int] = field(default_factory=dict)
    unsaved_bytes: Mapping[str, int] = field(default_factory=dict)
    failures: int = 0
    risks: int = 0
    probe: ProbeStatus | None = None


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What metrics are computed from, at one moment. `consumers` are copies. Models whose names are in `reloading`
    are not in `models`.
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
    registry.register(
        _Snapshot(
            [
                *consumer_metrics(consumers, lags),
                *_model_metrics(figures),
                *volume_metrics(figures.volumes),
                *_limit_metrics(figures.limits),
                *_process_metrics(figures.process, now_unix_ns),
            ]
        )
    )
    ProcessCollector(registry=registry)
    return generate_latest(registry)


_PAUSE_SECONDS = 50e-6


class _Snapshot(Collector):
    """Metrics that were measured before."""

    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """One after the other, with a pause after each: the steps of a cut would otherwise wait until the
        interpreter's switch interval is over, as long as all metrics take together.
        """
        for each in self._metrics:
            yield each
            time.sleep(_PAUSE_SECONDS)


# Values of the labels, and the number.
Sample = tuple[list[str], float]
# A metric of some objects: its name, its help, and the attribute of each object that is its value.
Declaration = tuple[str, str, str]


def _gauge(name: str, text: str, labels: list[str], samples: Iterable[Sample]) -> Metric:
    """A number that goes up and down."""
    return _filled(GaugeMetricFamily(f"deltasync_{name}", text, labels=labels), samples)


def _counter(name: str, text: str, labels: list[str], samples: Iterable[Sample]) -> Metric:
    """A number that only grows until the service restarts; `_total` is added to its name."""
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
    """Each metric that is declared, with a sample of every object whose attribute is not None."""
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
    """How often something took how long since the service started."""
    family = HistogramMetricFamily(f"deltasync_{name}", text, labels=labels)
    for values, durations in samples:
        counts, seconds = durations.read()
        ends = [*map(str, durations.bounds), "+Inf"]
        family.add_metric(values, list(zip(ends, accumulate(counts), strict=True)), sum_value=seconds)
    return family


def consumer_metrics(consumers: Sequence[Consumer], lags: Sequence[ConsumerLag]) -> list[Metric]:
    """Metrics of consumers and of their lags, which were measured before."""
    of_consumer, of_table, of_replica = ["consumer"], ["consumer", "table"], ["consumer", "replica"]
    each_lag = [([lag.consumer], lag) for lag in lags]
    released = [(names, lag) for names, lag in each_lag if lag.release]
    tables = [([lag.consumer, table.table], table) for lag in lags for table in lag.tables]
    # Without a norm, nobody has compared the table's rows with those that replicas hold.
    compared = [(names, table) for names, table in tables if table.unsent_norm is not None]
    replicas = [([lag.consumer, replica.replica], replica) for lag in lags for replica in lag.fleet]
    counted = [([each.name], each) for each in consumers]
    return [
        _gauge(
            "consumer_state",
            "1 for the state that the consumer is in.",
            ["consumer", "state"],
            [([lag.consumer, lag.state], 1.0) for lag in lags],
        ),
        *_each(_gauge, of_consumer, each_lag, *_lag_metrics("consumer", "the consumer's last replica")),
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
            "Whether an error keeps the consumer's replicas from what is new.",
            of_consumer,
            # A pause hides no damage: operators need to know of it before they resume the consumer.
            [([lag.consumer], (lag.paused.otherwise if lag.paused else lag.state) == "failed") for lag in lags],
        ),
        _gauge(
            "consumer_paused",
            "Whether the consumer is paused: its replicas are held at what they have.",
            of_consumer,
            [([lag.consumer], lag.paused is not None) for lag in lags],
        ),
        _gauge(
            "consumer_damaged_tables",
            "Tables of replicas that are damaged now.",
            of_consumer,
            [([lag.consumer], sum(len(replica.damaged) for replica in lag.fleet)) for lag in lags],
        ),
        _gauge(
            "consumer_unbound_tables",
            "Tables that replicas of the consumer do not hold.",
            of_consumer,
            [([lag.consumer], sum(len(replica.unbound) for replica in lag.fleet)) for lag in lags],
        ),
        _histogram(
            "freshness_seconds",
            "How long it took from the end of a trainer's step until a replica held what it had changed.",
            of_consumer,
            [([each.name], each.durations.freshness) for each in consumers],
        ),
        _histogram(
            "delivery_seconds",
            "How long each part of the way of releases took, from the tables to a replica.",
            ["consumer", "part"],
            [
                ([each.name, part], getattr(each.durations, part))
                for each in consumers
                for part in ("release", "ack")
            ],
        ),
        *_each(_counter, of_consumer, counted, *_COUNTERS),
    ]


def _lag_metrics(whose: str, who: str) -> list[Declaration]:
    """How far a replica is behind: `whose` begins the names, `who` is the replica in words."""
    return [
        (f"{whose}_lag_versions", f"Sealed versions that {who} has not applied.", "lag.versions"),
        (f"{whose}_lag_rows", f"Rows that {who} does not hold as the model has them, at most.", "lag.rows"),
        (
            f"{whose}_lag_bytes",
            f"Bytes of ids and values of the rows that {who} does not hold as the model has them.",
            "lag.bytes",
        ),
        (
            f"{whose}_lag_seconds",
            f"For how long {who} has lacked the oldest row or version that it lacks.",
            "lag.seconds",
        ),
        (
            f"{whose}_seconds_behind_events",
            f"Age of the newest event that the model had been trained on at the version whose rows {who} holds.",
            "lag.seconds_behind_events",
        ),
    ]


_RELEASE: list[Declaration] = [
    ("consumer_release", "Number of the newest release.", "release.number"),
    ("consumer_release_rows", "Rows the newest release took.", "release.rows"),
    ("consumer_release_bytes", "Bytes of ids and values of the rows the newest release took.", "release.bytes"),
    ("consumer_release_norm", "L2 norm of what these rows changed by.", "release.norm"),
    (
        "consumer_left_rows",
        "Rows that have changed and that the newest release left for later.",
        "release.left_rows",
    ),
    ("consumer_left_bytes", "Bytes of ids and values of the changed rows that it left.", "release.left_bytes"),
    ("consumer_left_norm", "L2 norm of what is unsent of these rows.", "release.left_norm"),
]
_UNSENT: list[Declaration] = [
    (
        "consumer_unsent_norm",
        "L2 norm of what the model has less what the replicas hold, as of the last release.",
        "lag.unsent_norm",
    ),
    ("consumer_unsent_share", "The same as a share of the norm of the tables: 0.1 is 10 %.", "lag.unsent_share"),
]
_OLDEST_ROW: Declaration = (
    "consumer_oldest_row_seconds",
    "For how long the oldest row that the newest release left has been unsent; 0 = it left none.",
    "oldest_row_seconds",
)
_TABLE: list[Declaration] = [
    (
        "consumer_table_lag_rows",
        "Rows of the table that the consumer's last replica does not hold as the model has them, at most.",
        "rows",
    ),
    ("consumer_table_lag_bytes", "Bytes of ids and values of these rows.", "bytes"),
    ("consumer_table_unsent_share", "What is unsent of the table as a share of its norm.", "unsent_share"),
    (
        "consumer_table_unsent_norm",
        "L2 norm of what the model has of the table less what the replicas hold, as of the last release.",
        "unsent_norm",
    ),
]
_TABLES_OLDEST_ROW: Declaration = (
    "consumer_table_oldest_row_seconds",
    "For how long the oldest row of the table that the newest release left has been unsent.",
    "oldest_row_seconds",
)
_REPLICA: list[Declaration] = [
    (
        "replica_unsent_norm",
        "L2 norm of what the model has less what the replica holds, where it holds the newest release.",
        "lag.unsent_norm",
    ),
    ("replica_checked", "Whether the replica's last acknowledgement had the right checksums.", "checked"),
]
_COUNTERS: list[Declaration] = [
    ("released_rows", "Rows sent to replicas since the service started.", "released_rows"),
    ("released_bytes", "Bytes of ids and values sent to replicas.", "released_bytes"),
    (
        "consumer_damages",
        "How often a table of a replica was found to be damaged since the service started.",
        "damages",
    ),
    (
        "consumer_rewinds",
        "How often a replica was found to hold rows of a discarded past since the service started.",
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
                "Time of the newest event that the newest sealed version had been trained on, in seconds since "
                "1970.",
                "event_time_seconds",
            ),
        ),
        *_each(
            _counter,
            ["model"],
            models,
            ("published_rows", "Rows of sealed cuts since the service started.", "published_rows"),
            ("published_bytes", "Bytes of ids and values of sealed cuts.", "published_bytes"),
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
            "Whether cuts of the model cannot be sealed or applied, which is tried again.",
            ["model"],
            [*((names, model.failed) for names, model in models), *(([name], True) for name in figures.reloading)],
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
            "How often what has happened since the service started.",
            ["event"],
            [([kind.value], figures.events[kind]) for kind in EventKind],
        ),
        _gauge("log_bytes", "Bytes the log holds.", [], [([], figures.log_bytes)]),
        _histogram("log_commit_seconds", "How long commits of the log took.", [], [([], figures.commits)]),
        _histogram(
            "cut_seconds",
            "How long each part of the way of cuts took, until the tables had them.",
            ["model", "part"],
            [
                ([model.name, part], durations)
                for model in figures.models
                for part, durations in model.parts.items()
            ],
        ),
        _gauge(
            "certificate_expires_seconds",
            "When the first certificate of a file expires, in seconds since 1970.",
            ["setting"],
            [([name], ends) for name, ends in figures.certificates_expire.items()],
        ),
    ]


def volume_metrics(volumes: Sequence[Volume]) -> list[Metric]:
    """What each volume has left, and whether it refuses writes. Asks the system."""
    return [
        *_each(
            _gauge,
            ["volume"],
            [([volume.name], volume) for volume in volumes],
            ("volume_free_bytes", "Bytes that the volume has left for the service.", "free_bytes"),
        ),
        _gauge(
            "volume_failed",
            "Whether the volume refuses what the service writes, which is tried again.",
            ["volume"],
            [([volume.name], bool(volume.trouble)) for volume in volumes],
        ),
    ]


def _limit_metrics(limits: Limits) -> list[Metric]:
    """Each limit, how much of it is in use where that is one number, and how often peers reached it."""
    names = limits.options.by_name
    return [
        _gauge(
            "limit", "The most that peers may take.", ["limit"], [([name], most) for name, most in names.items()]
        ),
        _gauge(
            "limit_taken",
            "How much of it is taken, where that is one number.",
            ["limit"],
            [([name], number) for name, number in sorted(limits.numbers.items())],
        ),
        _counter(
            "limit_refused",
            "How often it was reached since the service started.",
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
            "Which deltasync this is; always 1.",
            ["version", "commit"],
            [([built_version(), built_commit() or "unknown"], 1)],
        ),
        *_each(
            _gauge,
            [],
            process,
            (
                "lease_confirmed",
                "Whether the processes that share the log have heard of this one within the lease.",
                "confirmed",
            ),
            ("processes_alive", "Processes that share the log and are alive.", "alive"),
            ("models_without_owner", "Models that no process owns now.", "unowned"),
            ("log_risks", "Ways to lose what the log has acknowledged.", "risks"),
        ),
        _gauge(
            "checkpoint_age_seconds",
            "How long ago the model's newest checkpoint was complete.",
            ["model"],
            [([name], max(0, now_unix_ns - made) / 1e9) for name, made in sorted(figures.made_unix_ns.items())],
        ),
        _gauge(
            "log_bytes_since_checkpoint",
            "Bytes in the log that the model's newest checkpoint does not have.",
            ["model"],
            [([name], size) for name, size in sorted(figures.unsaved_bytes.items())],
        ),
        *_each(
            _gauge,
            [],
            probe,
            (
                "probe_seconds",
                "How long the probe's last row took from being published to being held by a replica.",
                "seconds",
            ),
            (
                "probe_age_seconds",
                "How long ago a row of the probe has come back, or for how long none has.",
                "age_seconds",
            ),
        ),
        *_each(_counter, [], probe, ("probe_failures", "Rows of the probe that did not come back.", "failures")),
        *_each(
            _counter,
            [],
            process,
            (
                "checkpoint_failures",
                "Checkpoints that could not be written or copied since the start.",
                "failures",
            ),
        ),
    ]

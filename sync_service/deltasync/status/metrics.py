"""Prometheus metrics, computed when they are asked for. What is not known has no sample."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import get_args

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from deltasync.access.limits import Limits
from deltasync.base.build import built_commit, built_version
from deltasync.base.durations import Durations
from deltasync.base.events import EventCounts, EventKind
from deltasync.consumers.consumer import Consumer
from deltasync.core.tables import TableSpec
from deltasync.log.volume import Volume
from deltasync.model.feed import Standing
from deltasync.service.probe import ProbeStatus
from deltasync.status.lag import ConsumerLag, Lag, ReleaseLag, ReplicaLag
from deltasync.status.report import report
from deltasync.status.trainers import RankState

# Values of the labels, and the number.
Sample = tuple[list[str], float]


def gauge(name: str, text: str, labels: list[str], samples: Iterable[Sample]) -> Metric:
    """A number that goes up and down."""
    return _filled(GaugeMetricFamily(f"deltasync_{name}", text, labels=labels), samples)


def counter(name: str, text: str, labels: list[str], samples: Iterable[Sample]) -> Metric:
    """A number that only grows until the service starts anew; `_total` is added to its name."""
    return _filled(CounterMetricFamily(f"deltasync_{name}", text, labels=labels), samples)


def histogram(name: str, text: str, labels: list[str], samples: Iterable[tuple[list[str], Durations]]) -> Metric:
    """How often something took how long since the service started."""
    family = HistogramMetricFamily(f"deltasync_{name}", text, labels=labels)
    for values, durations in samples:
        counts, seconds = durations.read()
        ends = [*map(str, durations.bounds), "+Inf"]
        family.add_metric(values, list(zip(ends, accumulate(counts), strict=True)), sum_value=seconds)
    return family


def _filled(family: GaugeMetricFamily | CounterMetricFamily, samples: Iterable[Sample]) -> Metric:
    for values, number in samples:
        family.add_metric(values, float(number))
    return family


def limit_metrics(limits: Limits) -> list[Metric]:
    """Each limit; of those of what there is in all, how much is taken; and how often one was reached."""
    return [
        gauge(
            "limit",
            "The most that peers may take.",
            ["limit"],
            [([name], most) for name, most in limits.options.by_name.items()],
        ),
        gauge(
            "limit_taken",
            "How much of it is taken, where that is one number.",
            ["limit"],
            [([name], number) for name, number in sorted(limits.taken.items())],
        ),
        counter(
            "limit_refused",
            "How often it was reached since the service started.",
            ["limit"],
            [([name], limits.refused[name]) for name in limits.options.by_name],
        ),
    ]


_LAG: dict[str, tuple[Callable[[Lag], float], str]] = {
    "versions": (lambda lag: lag.versions, "Sealed versions that {who} has not applied."),
    "rows": (lambda lag: lag.rows, "Rows that {who} does not hold as the model has them, at most."),
    "bytes": (
        lambda lag: lag.bytes,
        "Bytes of ids and values of the rows that {who} does not hold as the model has them.",
    ),
    "seconds": (lambda lag: lag.seconds, "For how long {who} has lacked the oldest row or version that it lacks."),
}
_UNSENT: dict[str, tuple[Callable[[Lag], float | None], str]] = {
    "norm": (
        lambda lag: lag.unsent_norm,
        "L2 norm of what the model has less what the replicas hold, as of the last release.",
    ),
    "share": (lambda lag: lag.unsent_share, "The same as a share of the norm of the tables: 0.1 is 10 %."),
}
# The keys are those of the lag's `release`.
_RELEASE: dict[str, tuple[Callable[[ReleaseLag], float], str]] = {
    "release": (lambda it: it.number, "Number of the newest release."),
    "release_rows": (lambda it: it.rows, "Rows the newest release took."),
    "release_bytes": (
        lambda it: it.bytes,
        "Bytes of ids and values of the rows the newest release took.",
    ),
    "release_norm": (lambda it: it.norm, "L2 norm of what these rows changed by."),
    "left_rows": (
        lambda it: it.left_rows,
        "Rows that have changed and that the newest release left for later.",
    ),
    "left_bytes": (
        lambda it: it.left_bytes,
        "Bytes of ids and values of the changed rows that it left.",
    ),
    "left_norm": (lambda it: it.left_norm, "L2 norm of what is unsent of these rows."),
}


_BEHIND_EVENTS = (
    "Age of the newest event that the model had been trained on at the version whose rows {who} holds."
)


def consumer_metrics(consumers: Iterable[Consumer], lags: list[ConsumerLag]) -> list[Metric]:
    """Metrics of these consumers, whose lags were measured before."""
    return [
        *_state_metrics(lags),
        *_lag_metrics(lags),
        *_release_metrics(lags),
        *_table_metrics(lags),
        *_replica_metrics(lags),
        *_counters(list(consumers)),
    ]


def _state_metrics(lags: list[ConsumerLag]) -> list[Metric]:
    states = [([each.consumer, each.state], 1.0) for each in lags]
    return [gauge("consumer_state", "1 for the state that the consumer is in.", ["consumer", "state"], states)]


def _lag_metrics(lags: list[ConsumerLag]) -> list[Metric]:
    who = "the consumer's last replica"
    return [
        gauge(
            f"consumer_lag_{unit}",
            text.format(who=who),
            ["consumer"],
            [([each.consumer], value(each.lag)) for each in lags],
        )
        for unit, (value, text) in _LAG.items()
    ] + [
        gauge(
            "consumer_seconds_behind_events",
            _BEHIND_EVENTS.format(who=who),
            ["consumer"],
            _behind_events(([each.consumer], each.lag) for each in lags),
        )
    ]


def _behind_events(lags: Iterable[tuple[list[str], Lag]]) -> list[Sample]:
    known = ((labels, lag.seconds_behind_events) for labels, lag in lags)
    return [(labels, seconds) for labels, seconds in known if seconds is not None]


def _release_metrics(lags: list[ConsumerLag]) -> list[Metric]:
    released = [(each, each.release) for each in lags if each.release]
    return [
        *[
            gauge(
                f"consumer_{name}",
                text,
                ["consumer"],
                [([each.consumer], value(release)) for each, release in released],
            )
            for name, (value, text) in _RELEASE.items()
        ],
        *[
            gauge(
                f"consumer_unsent_{name}",
                text,
                ["consumer"],
                [([each.consumer], known) for each in lags if (known := value(each.lag)) is not None],
            )
            for name, (value, text) in _UNSENT.items()
        ],
        gauge(
            "consumer_oldest_row_seconds",
            "For how long the oldest row that the newest release left has been unsent; 0 = it left none.",
            ["consumer"],
            [([each.consumer], each.oldest_row_seconds) for each, _ in released],
        ),
    ]


def _table_metrics(lags: list[ConsumerLag]) -> list[Metric]:
    tables = [([each.consumer, table.table], table) for each in lags for table in each.tables]
    known = [(labels, table, table.unsent_norm) for labels, table in tables if table.unsent_norm is not None]
    labels = ["consumer", "table"]
    return [
        gauge(
            "consumer_table_lag_rows",
            "Rows of the table that the consumer's last replica does not hold as the model has them, at most.",
            labels,
            [(names, table.rows) for names, table in tables],
        ),
        gauge(
            "consumer_table_lag_bytes",
            "Bytes of ids and values of these rows.",
            labels,
            [(names, table.bytes) for names, table in tables],
        ),
        gauge(
            "consumer_table_unsent_share",
            "What is unsent of the table as a share of its norm.",
            labels,
            [(names, table.unsent_share) for names, table in tables if table.unsent_share is not None],
        ),
        gauge(
            "consumer_table_unsent_norm",
            "L2 norm of what the model has of the table less what the replicas hold, as of the last release.",
            labels,
            [(names, norm) for names, _, norm in known],
        ),
        gauge(
            "consumer_table_oldest_row_seconds",
            "For how long the oldest row of the table that the newest release left has been unsent.",
            labels,
            [(names, table.oldest_row_seconds) for names, table, _ in known],
        ),
    ]


def _replica_metrics(lags: list[ConsumerLag]) -> list[Metric]:
    replicas = [([each.consumer, replica.replica], replica.lag) for each in lags for replica in each.fleet]
    states = [
        ([each.consumer, state], _count(each.fleet, connected=state == "connected"))
        for each in lags
        for state in ("connected", "away")
    ]
    unbound = [([each.consumer], sum(len(replica.unbound) for replica in each.fleet)) for each in lags]
    damaged = [([each.consumer], sum(len(replica.damaged) for replica in each.fleet)) for each in lags]
    return [
        *[
            gauge(
                f"replica_lag_{unit}",
                text.format(who="the replica"),
                ["consumer", "replica"],
                [(names, value(lag)) for names, lag in replicas],
            )
            for unit, (value, text) in _LAG.items()
        ],
        gauge(
            "replica_seconds_behind_events",
            _BEHIND_EVENTS.format(who="the replica"),
            ["consumer", "replica"],
            _behind_events(replicas),
        ),
        gauge(
            "replica_unsent_norm",
            "L2 norm of what the model has less what the replica holds, where it holds the newest release.",
            ["consumer", "replica"],
            [(names, lag.unsent_norm) for names, lag in replicas if lag.unsent_norm is not None],
        ),
        gauge(
            "replica_checked",
            "Whether the replica's last acknowledgement had the right checksums.",
            ["consumer", "replica"],
            [([each.consumer, replica.replica], replica.checked) for each in lags for replica in each.fleet],
        ),
        gauge("consumer_replicas", "Replicas of the consumer.", ["consumer", "state"], states),
        gauge(
            "consumer_failed",
            "Whether an error keeps the consumer's replicas from what is new.",
            ["consumer"],
            [([each.consumer], _failed(each)) for each in lags],
        ),
        gauge(
            "consumer_paused",
            "Whether the consumer is paused: its replicas are held at what they have.",
            ["consumer"],
            [([each.consumer], each.paused is not None) for each in lags],
        ),
        gauge("consumer_damaged_tables", "Tables of replicas that are damaged now.", ["consumer"], damaged),
        gauge(
            "consumer_unbound_tables", "Tables that replicas of the consumer do not hold.", ["consumer"], unbound
        ),
    ]


def _failed(lag: ConsumerLag) -> bool:
    # A pause hides no damage: who lets the consumer go on is to know of it before.
    return (lag.paused.otherwise if lag.paused else lag.state) == "failed"


def _count(replicas: list[ReplicaLag], *, connected: bool) -> int:
    return sum(replica.connected == connected for replica in replicas)


def _counters(consumers: list[Consumer]) -> list[Metric]:
    return [
        histogram(
            "freshness_seconds",
            "How long it took from the end of a trainer's step until a replica held what it had changed.",
            ["consumer"],
            [([each.name], each.durations.freshness) for each in consumers],
        ),
        histogram(
            "delivery_seconds",
            "How long each part of the way of releases took, from the tables to a replica.",
            ["consumer", "part"],
            [
                sample
                for each in consumers
                for sample in (
                    ([each.name, "release"], each.durations.release),
                    ([each.name, "ack"], each.durations.ack),
                )
            ],
        ),
        counter(
            "released_rows",
            "Rows sent to replicas since the service started.",
            ["consumer"],
            [([each.name], each.released_rows) for each in consumers],
        ),
        counter(
            "released_bytes",
            "Bytes of ids and values sent to replicas.",
            ["consumer"],
            [([each.name], each.released_bytes) for each in consumers],
        ),
        counter(
            "consumer_damages",
            "How often a table of a replica was found to be damaged since the service started.",
            ["consumer"],
            [([each.name], each.damages) for each in consumers],
        ),
        counter(
            "consumer_rewinds",
            "How often a replica was found to hold rows of a discarded past since the service started.",
            ["consumer"],
            [([each.name], each.rewinds) for each in consumers],
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class ProcessFigures:
    """What this process is, taken at one moment.

    Attributes:
        confirmed: whether the others have heard of it within the lease; True where it is alone.
        alive: how many processes are, this one among them.
        unowned: how many models there are that no process owns.
        made_unix_ns: when the newest checkpoint of each model was complete, nanoseconds since 1970.
        unsaved_bytes: bytes that the log has of each model that its newest checkpoint does not have.
        failures: number of checkpoints that could not be written or copied.
        probe: what has become of rows that go all the way; None if none do.
        risks: how many ways there are, as far as is known, to lose what the log has acknowledged.
    """

    confirmed: bool = True
    alive: int = 1
    unowned: int = 0
    made_unix_ns: Mapping[str, int] = field(default_factory=dict)
    unsaved_bytes: Mapping[str, int] = field(default_factory=dict)
    failures: int = 0
    risks: int = 0
    probe: ProbeStatus | None = None


def process_metrics(figures: ProcessFigures, now_unix_ns: int) -> list[Metric]:
    """What is known of it, at a time in nanoseconds since 1970."""
    probes = [figures.probe] if figures.probe else []
    ages = {model: max(0, now_unix_ns - made) / 1e9 for model, made in sorted(figures.made_unix_ns.items())}
    return [
        gauge(
            "build_info",
            "Which deltasync this is; always 1.",
            ["version", "commit"],
            [([built_version(), built_commit() or "unknown"], 1)],
        ),
        gauge(
            "lease_confirmed",
            "Whether the processes that share the log have heard of this one within the lease.",
            [],
            [([], figures.confirmed)],
        ),
        gauge("processes_alive", "Processes that share the log and are alive.", [], [([], figures.alive)]),
        gauge("models_without_owner", "Models that no process owns now.", [], [([], figures.unowned)]),
        gauge("log_risks", "Ways to lose what the log has acknowledged.", [], [([], figures.risks)]),
        gauge(
            "checkpoint_age_seconds",
            "How long ago the model's newest checkpoint was complete.",
            ["model"],
            [([model], age) for model, age in ages.items()],
        ),
        gauge(
            "log_bytes_since_checkpoint",
            "Bytes in the log that the model's newest checkpoint does not have.",
            ["model"],
            [([model], size) for model, size in sorted(figures.unsaved_bytes.items())],
        ),
        gauge(
            "probe_seconds",
            "How long the probe's last row took from being published to being held by a replica.",
            [],
            [([], probe.seconds) for probe in probes if probe.seconds is not None],
        ),
        gauge(
            "probe_age_seconds",
            "How long ago a row of the probe has come back, or for how long none has.",
            [],
            [([], probe.age_seconds) for probe in probes],
        ),
        counter(
            "probe_failures",
            "Rows of the probe that did not come back.",
            [],
            [([], probe.failures) for probe in probes],
        ),
        counter(
            "checkpoint_failures",
            "Checkpoints that could not be written or copied since the start.",
            [],
            [([], figures.failures)],
        ),
    ]


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

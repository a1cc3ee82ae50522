"""Metrics of consumers, of their tables and of their replicas. What is not known has no sample."""

from collections.abc import Callable, Iterable

from prometheus_client.core import Metric

from deltasync.consumers.consumer import Consumer
from deltasync.status.lag import ConsumerLag, Lag, ReleaseLag, ReplicaLag
from deltasync.status.metric_families import Sample, counter, gauge, histogram

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

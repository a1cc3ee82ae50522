"""What the service shows: one record each for model, rank, consumer, replica, table, version and process.

A field is declared once, with its description. HTTP answers have it as a key, the command and the page as a column
if it has a title, and `/metrics` as a metric if it has a name.
"""

from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields, replace
from functools import cache
from typing import Any, Literal

from deltasync.base.events import RecentEvent

Unit = Literal["", "bytes", "seconds", "share", "age of ns"]


@dataclass(frozen=True)
class Shown:
    """How a field is shown.

    Attributes:
        description: what it means, for openapi.json, `--help` and the help text of the metric.
        title: title of its column in tables of the command and the page; empty = no column.
        unit: how tables format it.
        gauge: name of its metric, without `deltasync_`; empty = no metric.
        counter: the same for a number that only grows while the service runs.
        state: for fields that share a metric, the value of its label `state`. A text is its own; a list counts.
    """

    description: str
    title: str = ""
    unit: Unit = ""
    gauge: str = ""
    counter: str = ""
    state: str = ""


def shown(
    description: str,
    title: str = "",
    unit: Unit = "",
    gauge: str = "",
    counter: str = "",
    state: str = "",
    default: Any = MISSING,
    default_factory: Any = MISSING,
) -> Any:
    """Declare a field of a record; see `Shown`."""
    metadata = {"description": description, "shown": Shown(description, title, unit, gauge, counter, state)}
    return field(default=default, default_factory=default_factory, metadata=metadata)


def part(
    record: type, prefix: str = "", *, without: str = "", columns: bool = True, default: Any = MISSING
) -> Any:
    """Declare a field that is a record whose columns, and metrics with a prefix, are those of the outer one."""
    return field(default=default, metadata={"part": (record, prefix, without, columns)})


@dataclass(frozen=True)
class Path:
    """A declared field, also of a part of a record.

    Attributes:
        names: its names from outside to inside.
        shown: how it is shown.
        number: whether it is a number.
    """

    names: tuple[str, ...]
    shown: Shown
    number: bool

    def value(self, record: Any) -> Any:
        """Its value in a record, or in the JSON of one; None if the part that has it is None."""
        for name in self.names:
            if record is not None:
                record = record[name] if isinstance(record, dict) else getattr(record, name)
        return record


@cache
def declared(record: type) -> tuple[Path, ...]:
    """The declared fields of a record and of its parts, in their order."""
    return tuple(path for each in fields(record) for path in _paths(each))


def _paths(declaration: Field[Any]) -> Iterator[Path]:
    name, metadata = declaration.name, declaration.metadata
    if "shown" in metadata:
        yield Path((name,), metadata["shown"], declaration.type in (int, float, int | None, float | None))
    elif "part" in metadata:
        record, prefix, without, with_columns = metadata["part"]
        for inner in declared(record):
            gauge = prefix + inner.shown.gauge if inner.shown.gauge not in ("", without) else ""
            title = inner.shown.title if with_columns else ""
            yield replace(inner, names=(name, *inner.names), shown=replace(inner.shown, gauge=gauge, title=title))


def columns(record: type) -> list[Path]:
    """The fields of a record that are columns of tables."""
    return [each for each in declared(record) if each.shown.title]


State = Literal[
    "in sync",
    "current",
    "delivered",
    "partial",
    "behind",
    "waiting",
    "damaged",
    "failed",
    "away",
    "empty",
    "paused",
]
# The most urgent state first.
URGENCY: tuple[State, ...] = (
    *("failed", "damaged", "away", "waiting", "behind", "partial", "delivered", "paused", "empty", "current"),
    "in sync",
)
ReplicaState = Literal["connected", "guest", "partial", "late", "waiting", "rewound", "damaged", "away"]


@dataclass(frozen=True)
class Lag:
    """Lag of a replica behind the model."""

    versions: int = shown("Sealed versions not applied yet.", "versions", gauge="lag_versions")
    rows: int = shown("Upper bound of the rows that differ from the model's.", "rows", gauge="lag_rows")
    bytes: int = shown(
        "Size (ids and values) of the rows that differ from the model's.", "bytes", "bytes", "lag_bytes"
    )
    seconds: float = shown(
        "Age in seconds of the oldest version or release not applied yet.", "seconds", "seconds", "lag_seconds"
    )
    unsent_norm: float | None = shown(
        "With a policy, once the newest release is held: L2 norm of the difference from the model.",
        gauge="unsent_norm",
        default=None,
    )
    unsent_share: float | None = shown(
        "The unsent norm as a share of the tables' norm: 0.1 is 10 %.",
        "unsent",
        "share",
        "unsent_share",
        default=None,
    )
    seconds_behind_events: float | None = shown(
        "Age in seconds of the newest training event in the version held.",
        gauge="seconds_behind_events",
        default=None,
    )


@dataclass(frozen=True, slots=True)
class TableLag:
    """Lag of a consumer in one table."""

    table: str = shown("Name of the table.", "table")
    rows: int = shown(
        "Upper bound of the rows of the table in which the slowest replica differs from the model.",
        "rows",
        gauge="consumer_table_lag_rows",
    )
    bytes: int = shown(
        "Size (ids and values) of the rows of the table that differ.", "bytes", "bytes", "consumer_table_lag_bytes"
    )
    oldest_row_seconds: float | None = shown(
        "Age in seconds of the oldest postponed row of the table.",
        "oldest row",
        "seconds",
        "consumer_table_oldest_row_seconds",
        default=None,
    )
    unsent_norm: float | None = shown(
        "L2 norm of the difference between the model's table and the replicas', as of the last release.",
        "unsent norm",
        gauge="consumer_table_unsent_norm",
        default=None,
    )
    unsent_share: float | None = shown(
        "The table's unsent norm as a share of its norm.",
        "unsent",
        "share",
        "consumer_table_unsent_share",
        default=None,
    )


@dataclass(frozen=True)
class RewindLag:
    """A replica connected with rows of a discarded history.

    `held` is its version or release in `history`. The service has been replacing its rows for `seconds`.
    """

    held: int
    history: str
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ReplicaStatus:
    """Lag and state of one replica. A guest does not count in the consumer's offset, lag, state and replicas."""

    replica: str = shown("Its name.", "replica")
    state: ReplicaState = shown(
        "Its worst problem: away, damaged, rewound (it returned with rows of a discarded history), waiting (for "
        "the end of a pause), late (it lacks rows at least 10 seconds old) or partial (it leaves out tables); "
        "otherwise connected, or guest (it only watches and is not counted).",
        "state",
    )
    connected: bool
    since_seconds: float = shown(
        "Seconds since it connected, or left; at most since the service started.", "since", "seconds"
    )
    offset: int = shown("Last version that it acknowledged; with a policy, last release.", "offset")
    lag: Lag = part(Lag, "replica_", without="unsent_share")
    checked: bool = shown(
        "Whether its last acknowledgement had the right checksums: 1 or 0.",
        "checked",
        gauge="replica_checked",
    )
    seconds_since_ack: float
    damaged: list[str] = shown("Tables whose rows differ from those sent; the service sends them again.")
    unbound: list[str] = shown("Tables of the consumer that it leaves out.")
    rewound: RewindLag | None = None
    left: str = shown("Why its last stream ended; empty if none has since the service started.", default="")
    unacked: int = shown("Sent releases that it has not acknowledged.", default=0)
    unacked_seconds: float = shown("Seconds since the first of these was sent.", default=0.0)
    damages: int = shown("Number of times that its rows differed from those sent to it.", default=0)
    damaged_seconds_ago: float | None = shown("Seconds since the last of these times.", default=None)
    behind: bool = shown(
        "Whether it lacks rows of the newest version or release that no policy or pause holds back.", default=False
    )
    waits_for: str = shown("What keeps the service from sending it rows; empty if nothing does.", default="")
    guest: bool = False
    reason: str = shown("All its problems, in words; empty without any.", "why", default="")

    @property
    def needs_attention(self) -> bool:
        """Whether an operator should look at it."""
        return self.state not in ("connected", "guest")


@dataclass(frozen=True, kw_only=True)
class ReleaseLag:
    """Rows that the newest release of a policy sent, and rows that it postponed."""

    number: int = shown("Number of the newest release.", gauge="release")
    version: int
    seconds_ago: float
    rows: int = shown("Rows in the newest release.", gauge="release_rows")
    bytes: int = shown("Size (ids and values) of the rows in the newest release.", gauge="release_bytes")
    norm: float = shown("L2 norm of the change of the rows in the newest release.", gauge="release_norm")
    left_rows: int = shown("Changed rows that the newest release postponed.", gauge="left_rows")
    left_bytes: int = shown("Size (ids and values) of the postponed rows.", gauge="left_bytes")
    left_norm: float = shown("L2 norm of the unsent change of the postponed rows.", gauge="left_norm")
    reason: str


@dataclass(frozen=True)
class PauseStatus:
    """A consumer's pause: its start in UTC, its author and its reason, which may be empty.

    `otherwise` is the consumer's state without the pause.
    """

    since: str
    by: str
    reason: str
    otherwise: State


@dataclass(frozen=True)
class Freshness:
    """Seconds from the end of a step until replicas had its rows.

    `counts` is the histogram of all deliveries since the service started, with the bounds `freshness_bounds`; its
    last entry counts longer ones.
    """

    counts: list[int]
    count: int = shown("The last deliveries, at most 500, of which p50 and p99 are.")
    p50: float | None = shown(
        "Time from the end of a step until replicas had it: half of the last 500 deliveries.",
        "p50",
        "seconds",
        default=None,
    )
    p99: float | None = shown("The same for 99 % of these deliveries.", "p99", "seconds", default=None)


@dataclass(frozen=True, kw_only=True)
class ConsumerStatus:
    """A consumer: its state, the lag of its slowest replica, its policy, and its replicas and tables.

    A list of consumers has only the replicas that need attention, and no tables. Numbers are null until this
    process has loaded the model.
    """

    consumer: str = shown("Its name.", "consumer")
    model: str = shown("The model that it follows.", "model")
    state: State = shown(
        "Its state, explained in operating.md; the metric is 1 for the current one.",
        "state",
        gauge="consumer_state",
    )
    history: str = ""
    head: int | None = shown("Newest sealed version of the model.", default=None)
    head_step: int | None = None
    offset: int | None = shown(
        "Newest version that all replicas have acknowledged; with a policy, newest release. Releases have their "
        "own numbers, which can exceed the version.",
        default=None,
    )
    lag: Lag | None = part(Lag, "consumer_", default=None)
    connected: int | None = shown(
        "Replicas that are connected; the metric also counts those that are away.",
        "connected",
        gauge="consumer_replicas",
        state="connected",
        default=None,
    )
    away: int | None = shown(
        "Replicas that are not connected.", gauge="consumer_replicas", state="away", default=None
    )
    fleet: int | None = shown("All its replicas, without guests.", "replicas", default=None)
    failed: bool = shown(
        "1 if an error keeps the consumer's replicas from receiving updates, even while it is paused, else 0.",
        gauge="consumer_failed",
        default=False,
    )
    freshness: Freshness = part(Freshness)
    released_rows: int = shown(
        "Rows sent to replicas since the service started.", counter="released_rows", default=0
    )
    released_bytes: int = shown(
        "Bytes of ids and values sent to replicas since the service started.", counter="released_bytes", default=0
    )
    damages: int = shown(
        "Damaged tables of replicas that were detected since the service started.",
        counter="consumer_damages",
        default=0,
    )
    rewinds: int = shown(
        "Replicas that connected with rows of a discarded history since the service started.",
        counter="consumer_rewinds",
        default=0,
    )
    damaged_tables: int = shown(
        "Tables of replicas that are damaged now, summed over the replicas.",
        gauge="consumer_damaged_tables",
        default=0,
    )
    unbound_tables: int = shown(
        "Tables that replicas of the consumer leave out, summed over the replicas.",
        gauge="consumer_unbound_tables",
        default=0,
    )
    head_seconds_behind_events: float | None = shown(
        "Age in seconds of the newest training event at the head.", default=None
    )
    oldest_row_seconds: float | None = shown(
        "Age in seconds of the oldest postponed row; 0 if no row is postponed.",
        gauge="consumer_oldest_row_seconds",
        default=None,
    )
    release: ReleaseLag | None = part(ReleaseLag, "consumer_", default=None)
    policy: dict[str, Any] = field(default_factory=dict)
    policy_words: str = shown("How the policy differs from the default.", default="")
    paused: PauseStatus | None = None
    follows: str = shown(
        "The kept version that it follows, since when and by whom; empty for the newest version.", default=""
    )
    follows_seconds: float = shown(
        "Seconds since the consumer began to follow its kept version; 0 if it follows the newest version.",
        gauge="consumer_follows_seconds",
        default=0.0,
    )
    objects: str = shown("Its objection to what it serves; empty without one.", default="")
    reason: str = shown("Reason for its state.", "why")
    replicas: list[ReplicaStatus] = field(default_factory=list)
    tables: list[TableLag] = field(default_factory=list)

    def in_list(self) -> "ConsumerStatus":
        """The same for a list of consumers."""
        wrong = [each for each in self.replicas if each.needs_attention]
        return replace(self, replicas=wrong, tables=[])


@dataclass(frozen=True, kw_only=True)
class CheckpointStatus:
    """The newest checkpoint of a model."""

    version: int = shown("Version of the newest checkpoint; 0 without one.", "version")
    behind_versions: int = shown("Versions since the checkpoint.", "behind")
    age_seconds: float | None = shown(
        "Seconds since the model's newest checkpoint was completed.", "age", "seconds", "checkpoint_age_seconds"
    )
    bytes: int = shown("Size of all its files.", "bytes", "bytes")
    new_bytes: int = shown("Bytes of files not in the previous checkpoint.", "new", "bytes")
    copied_version: int | None = shown(
        "Version of the model's newest checkpoint that is complete at the URL of --checkpoints; 0 if none is.",
        "at URL",
        gauge="checkpoint_copied_version",
    )
    log_bytes: int = shown(
        "Bytes in the log that are not in the model's newest checkpoint.", gauge="log_bytes_since_checkpoint"
    )
    reason: str = shown("Why the last attempt to write or copy a checkpoint failed, or why old ones stay.", "why")


@dataclass(frozen=True)
class RefusalStatus:
    """The last time that the service refused a cut because of its rows, and why."""

    seconds_ago: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class ModelStatus:
    """A model and its trainer. Unknown numbers are null, and there is no checkpoint, until it is loaded."""

    model: str = shown("Its name.", "model")
    head: int | None = shown("Newest sealed version.", "version", gauge="head_version", default=None)
    step: int | None = shown("The trainer's step of the newest version.", "step", default=None)
    seconds_since_cut: float | None = shown(
        "Seconds since that version was sealed.", "since cut", "seconds", default=None
    )
    head_event_time_seconds: float | None = shown(
        "Time of the newest training event in the newest sealed version, in seconds since 1970.",
        gauge="head_event_time_seconds",
        default=None,
    )
    run: str = shown("The run that publishes it; empty until the first rank connects.", default="")
    ranks: int = shown("Ranks of that run.", "ranks", default=0)
    connected: int = shown(
        "Ranks that are connected; the metric also counts those that finished or are away.",
        "connected",
        gauge="publishing_ranks",
        state="connected",
        default=0,
    )
    finished: int = shown(
        "Ranks that said goodbye.", "finished", gauge="publishing_ranks", state="finished", default=0
    )
    away: int = shown("Ranks that left without a goodbye.", gauge="publishing_ranks", state="away", default=0)
    tables: int | None = shown("Its tables.", "tables", default=None)
    bytes: int | None = shown("Size of its tables.", "bytes", "bytes", default=None)
    published_rows: int = shown(
        "Rows in sealed cuts since the start.", "rows sent", counter="published_rows", default=0
    )
    published_bytes: int = shown(
        "Bytes of ids and values in sealed cuts since the start.", counter="published_bytes", default=0
    )
    kept_versions: int | None = shown("Kept versions of the model.", gauge="model_kept_versions", default=None)
    failed: bool = shown(
        "1 if the service cannot seal or apply cuts of the model and is retrying, else 0.",
        gauge="model_failed",
        default=False,
    )
    refused: RefusalStatus | None = None
    quarantine: str = shown("Versions that are withheld from consumers, and why.", default="")
    trouble: str = shown(
        "What keeps cuts from being sealed or applied, or the model from being loaded.", "trouble", default=""
    )
    checkpoint: CheckpointStatus | None = part(CheckpointStatus, columns=False, default=None)


@dataclass(frozen=True, kw_only=True)
class RankStatus:
    """A rank of a run that publishes a model. One that is neither connected nor finished is lost."""

    model: str
    run: str
    ranks: int
    rank: int
    process: str = shown("The name that the rank's process gives itself.")
    connected: bool
    finished: bool = shown("Whether it said goodbye.")
    since_seconds: float = shown("Seconds since it connected, or left.")
    left: str = shown("Why its last stream ended; empty while it is connected.")
    tables: int = shown("Number of tables that it publishes.")


@dataclass(frozen=True)
class TableConsumer:
    """The lag of a consumer in a table."""

    consumer: str
    state: str
    lag: TableLag


@dataclass(frozen=True, kw_only=True)
class TableStatus:
    """A table of a model. A list of tables has no consumers."""

    model: str = shown("Its model.", "model")
    table: str = shown("Its name.", "table")
    kind: str = shown("Its kind: embedding, parameter, buffer, or map of a managed collision module.", "kind")
    rows: int = shown("Rows of the table.", "rows", gauge="table_rows")
    dim: int = shown("Values of a row.", "dim")
    dtype: str = shown("Type of a value.", "type")
    bytes: int = shown("Bytes of the table's values.", "bytes", "bytes", "table_bytes")
    head: int = shown("Newest version of the model.", "version")
    ranks_differ: bool = shown(
        "Whether ranks of the trainer have different rows; the service keeps the first rank's.", "ranks differ"
    )
    refused: str = shown("Why the last cut was refused, if rows of this table were the reason.", "refused")
    consumers: list[TableConsumer] = field(default_factory=list)


@dataclass(frozen=True)
class StageSeconds:
    """Seconds of each stage of a cut; null until it ends. `release` and `ack` are the slowest consumer's."""

    gather: float | None = shown(
        "From the end of the step until the slowest rank had collected its changed rows.",
        "gather",
        "seconds",
        default=None,
    )
    send: float | None = shown(
        "Until the service had every rank's part; compares two machines' clocks.", "send", "seconds", default=None
    )
    seal: float | None = shown("Checks, and waiting for the previous version.", "seal", "seconds", default=None)
    log: float | None = shown("Until the version was durable.", "log", "seconds", default=None)
    apply: float | None = shown("Until the model's tables had it.", "apply", "seconds", default=None)
    release: float | None = shown(
        "Until the slowest consumer had sent all of it to a replica.", "release", "seconds", default=None
    )
    ack: float | None = shown("Until that replica acknowledged it.", "ack", "seconds", default=None)


@dataclass(frozen=True)
class Delivery:
    """A version's delivery to `replicas` of a consumer; `release` and `ack` are the seconds of the slowest."""

    consumer: str
    replicas: int
    release: float
    ack: float


@dataclass(frozen=True, kw_only=True)
class VersionStatus:
    """A version of a model that was sealed since the service started; `sealed` is the time in UTC."""

    model: str = shown("Its model.", "model")
    version: int = shown("Its number.", "version")
    step: int = shown("The trainer's step.", "step")
    run: str
    rows: int = shown("Its rows.", "rows")
    bytes: int = shown("Size (ids and values) of its rows.", "bytes", "bytes")
    sealed: str
    seconds_ago: float = shown("Seconds since it was durable.", "ago", "seconds")
    seconds: StageSeconds = part(StageSeconds)
    consumers: list[Delivery]


@dataclass(frozen=True, kw_only=True)
class KeptStatus:
    """A kept version of a model. Times are nanoseconds since 1970."""

    model: str
    version: int = shown("Its number.", "version")
    name: str = shown("Its name; may be empty.", "name")
    step: int = shown("The trainer's step.", "step")
    sealed_unix_ns: int
    event_time_unix_ns: int | None = shown(
        "Age of the newest event on which it was trained.", "events", "age of ns"
    )
    kept_unix_ns: int = shown("Time since it was kept.", "kept", "age of ns")
    bytes: int = shown("Size of all its files.", "bytes", "bytes")
    own_bytes: int | None = shown(
        "Bytes that releasing it makes free; null if its checkpoint cannot be read.", "own", "bytes"
    )
    by: str = shown("Who kept it.", "by")
    followers: list[str] = shown("The consumers that follow it.", "followed by")


@dataclass(frozen=True)
class Check:
    """A readiness check: its name, and why it fails; `trouble` is empty if it passes."""

    check: str
    trouble: str

    @property
    def ok(self) -> bool:
        """Whether the check passes."""
        return not self.trouble


@dataclass(frozen=True)
class ProbeResults:
    """Results of the probe, which sends rows from the service's own publisher to its own replica."""

    seconds: float | None = shown(
        "Seconds from publishing the probe's last row until its replica had it.", gauge="probe_seconds"
    )
    age_seconds: float = shown(
        "Seconds since a row of the probe last arrived; since the start if none has.", gauge="probe_age_seconds"
    )
    turns: int = shown("Rows of the probe that arrived.")
    failures: int = shown("Rows of the probe that did not arrive.", counter="probe_failures")
    trouble: str = shown("Why the probe fails; empty if it works.")


@dataclass(frozen=True, kw_only=True)
class VolumeStatus:
    """A volume that a process writes to."""

    volume: str
    free_bytes: int | None = shown("Free bytes of the volume that the service may use.", gauge="volume_free_bytes")
    failed: bool = shown(
        "1 if the volume refuses writes and the service is retrying, else 0.", gauge="volume_failed"
    )
    refused: str = shown("Why the volume refuses writes; empty if it accepts them.")


@dataclass(frozen=True, kw_only=True)
class ProcessStatus:
    """A process of the service. Only the answering process, marked by `here`, knows more than its addresses."""

    process: str = shown("Its name.", "process")
    grpc: str = shown("Its gRPC address.", "grpc")
    http: str = shown("Its HTTP address.", "http")
    here: bool
    alive: bool = shown("Whether its lease is valid, or it signed off.", "alive")
    draining: bool = shown("Whether it hands over its models.", "draining")
    confirmed: bool = shown(
        "1 if the brokers confirmed the answering process's lease in time, else 0.", gauge="lease_confirmed"
    )
    models: list[str] = shown("The models that it owns.", "models")
    unowned: list[str] = shown("Models that no process owns now.", gauge="models_without_owner")
    started_unix_ns: int = shown("When it started, by its own clock; 0 if unknown.")
    started: str = shown("The same in UTC.", default="")
    ready: bool | None = shown("Result of its /readyz.", default=None)
    checks: list[Check] = field(default_factory=list)
    troubles: list[str] = shown("Problems that do not affect /readyz.", default_factory=list)
    work: list[str] = shown("Progress of long operations.", default_factory=list)
    probe: ProbeResults | None = part(ProbeResults, default=None)
    volumes: list[VolumeStatus] = field(default_factory=list)


@dataclass(frozen=True)
class Overview:
    """The state of a process at `unix_ms`, milliseconds since 1970.

    `missing` names the other live processes: each has its own overview.
    """

    unix_ms: int
    freshness_bounds: list[float]
    processes: list[ProcessStatus]
    missing: list[str]
    models: list[ModelStatus]
    trainers: list[RankStatus]
    consumers: list[ConsumerStatus]
    cuts: list[VersionStatus]
    kept: list[KeptStatus]
    events: list[RecentEvent]

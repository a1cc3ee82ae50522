"""A consumer, its pause, its replicas, and the verification of their rows."""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from deltasync.base.arguments import check_name
from deltasync.base.clock import Moment, steady_ns
from deltasync.base.errors import DeltasyncError, InvalidInput
from deltasync.base.waiting import Signal
from deltasync.base.words import LONGEST_TEXT, utc
from deltasync.consumers.follow import Follow, Objection, RolloutDelay
from deltasync.core.cut_times import DeliveryDurations
from deltasync.core.policy import Policy
from deltasync.core.position import Position


@dataclass(frozen=True)
class Quarantine:
    """Versions withheld from consumers. `reason` is that of the first; later ones, up to `newest`, may be good."""

    first: int
    newest: int
    versions: int
    reason: str

    @property
    def description(self) -> str:
        """The versions and the reason, in a line of bounded length."""
        several = f"{self.versions} versions from {self.first} to {self.newest} are"
        which = f"version {self.first} is" if self.versions == 1 else several
        return f"{which} in quarantine: {self.reason}"[:LONGEST_TEXT]


def extended(before: Quarantine | None, version: int, reason: str) -> Quarantine:
    """Add a version to a quarantine. It may already be there, after a failed attempt to seal it."""
    if before is None:
        return Quarantine(version, version, 1, reason[:LONGEST_TEXT])
    if version <= before.newest:
        return before
    return replace(before, newest=version, versions=before.versions + 1)


# The author of changes that the service makes by itself.
ITSELF = "the service itself"


@dataclass(frozen=True)
class Pause:
    """A pause of a consumer: its replicas keep their rows.

    Attributes:
        since_unix_ns: when it began, nanoseconds since 1970.
        by: name of the person or program that requested it.
        reason: their reason; may be empty.
        quarantine: versions that are withheld from the consumer; None if there are none.
        since_ns: when it began, by `steady_ns`; None if that was before the service started.
    """

    since_unix_ns: int
    by: str
    reason: str = ""
    quarantine: Quarantine | None = None
    since_ns: int | None = field(default=None, compare=False)

    @classmethod
    def now(cls, by: str, reason: str = "", quarantine: Quarantine | None = None) -> "Pause":
        """A pause that begins now."""
        now = Moment.now()
        return cls(now.unix_ns, by, reason, quarantine, now.steady_ns)

    def __post_init__(self) -> None:
        if len(self.reason) > LONGEST_TEXT or not self.reason.isprintable():
            raise InvalidInput(f"reason: use at most {LONGEST_TEXT} printable characters in one line")

    @property
    def why(self) -> str:
        """All reasons; may be empty."""
        withheld = self.quarantine.description if self.quarantine else ""
        return "; ".join(filter(None, [withheld, self.reason]))[:LONGEST_TEXT]

    @property
    def description(self) -> str:
        """The start, the author and the reason, in words."""
        return f"paused since {utc(self.since_unix_ns)} by {self.by}{f': {self.why}' if self.why else ''}"

    def behind_ns(self, next_sealed: Moment | None, min_interval_seconds: float) -> int:
        """Nanoseconds by which a replica was behind when the pause began, `min_interval_seconds` after the version
        that it lacks was sealed, if there is one. The pause itself does not count.
        """
        if next_sealed is None:
            return 0
        began = Moment(self.since_unix_ns, self.since_ns)
        return max(0, began.after_ns(next_sealed) - int(min_interval_seconds * 1e9))


def joined(before: Pause | None, now: Pause) -> Pause:
    """Join the pause of a consumer that is paused again: the earlier one continues, with both reasons."""
    if before is None:
        return now
    before = replace(before, quarantine=now.quarantine or before.quarantine)
    if now.reason in before.reason:
        return before
    return replace(before, reason="; ".join(filter(None, [now.reason, before.reason]))[:LONGEST_TEXT])


def pause_of_record(fields: Mapping[str, Any] | None) -> Pause | None:
    """The pause in a record of a consumer. Its `since_ns` was of an earlier process."""
    if fields is None:
        return None
    quarantine = Quarantine(**fields["quarantine"]) if fields["quarantine"] else None
    return Pause(**{**fields, "quarantine": quarantine, "since_ns": None})


# Requests count from a random number of this many bits, because a replica may remember those of another process.
_BITS = 62
# Replicas of a consumer may prove a version this many versions apart.
_REMEMBERED_VERSIONS = 64


class ComparisonStatus(Enum):
    """The result of comparing a replica's table."""

    EQUAL = "equal"
    """Every row is equal."""
    DIFFERS = "differs"
    """Some rows differ."""
    NOT_HELD = "not held"
    """The replica does not have the table."""
    NOT_SHOWN = "not shown"
    """The replica's rows cannot be read back."""


@dataclass(frozen=True)
class TableComparison:
    """The comparison of one table.

    Attributes:
        table: the table's name.
        rows: number of compared rows.
        status: the result.
        checksum: the expected checksum of these rows, 16 hexadecimal digits; empty if unknown.
        held: the replica's checksum; empty if unknown.
        reason: the result in words; empty if the rows are equal.
    """

    table: str
    rows: int
    status: ComparisonStatus
    checksum: str = ""
    held: str = ""
    reason: str = ""


@dataclass(frozen=True)
class VerificationResult:
    """The result of reading a replica's rows again, as of a version of the model."""

    version: int
    tables: Sequence[TableComparison]


class ReplicaVerification:
    """Verification requests to one replica and its answers, across its streams. Used in the event loop.

    `signal` wakes with each request, report and answer. `rows` counts the rows read so far, and all rows.
    """

    def __init__(self) -> None:
        self.signal = Signal()
        self._asked = self._answered = secrets.randbits(_BITS)
        self._result: VerificationResult | DeltasyncError | None = None
        self.rows = (0, 0)

    def ask(self) -> int:
        """Ask the replica to read its rows again; return the number of the request."""
        self._asked += 1
        self.rows = (0, 0)
        self.signal.wake()
        return self._asked

    @property
    def open(self) -> int:
        """The number of the last request while it is unanswered, else 0."""
        return self._asked if self._asked > self._answered else 0

    def note(self, read: int, rows: int) -> None:
        """Record that the replica has read `read` of its `rows`."""
        self.rows = (read, rows)
        self.signal.wake()

    def answer(self, number: int, result: VerificationResult | DeltasyncError) -> None:
        """Answer a request and all earlier ones."""
        if number > self._answered:
            self._answered, self._result = number, result
            self.signal.wake()

    def answer_to(self, number: int) -> VerificationResult | None:
        """The answer to a request, or None while it is unanswered; raises why the replica could not answer it."""
        if self._answered < number:
            return None
        if isinstance(self._result, DeltasyncError):
            raise self._result
        return self._result


@dataclass(frozen=True)
class Rewind:
    """Rows of a discarded history at position `held`, which the service replaces since `since_ns`."""

    held: Position
    since_ns: int


@dataclass
class Replica:
    """One replica of a consumer.

    Attributes:
        name: its name, unique in the consumer.
        applied: the position that it last acknowledged.
        acked_unix_ns: when it last acknowledged, nanoseconds since 1970.
        instance: id of its process, to distinguish it from others of its name; empty if it sent none.
        by: name of the identity that it last connected as; None if it has not since the service started.
        acked_ns: when it last acknowledged, by `steady_ns`; None if it has not since the service started.
        stream: event that ends its open stream; None while it is away.
        since_ns: when it connected or left, by `steady_ns`; at the earliest when the service started.
        left: why its last stream ended; empty if none has ended since the service started.
        checked: whether its last acknowledgement had the right checksums.
        unbound: tables of the consumer that it leaves out.
        damaged: tables whose bits differ from those sent to it; the service sends them again.
        rewind: set while the service replaces its rows of a discarded history; otherwise None.
        damages: number of times that its bits differed from those sent to it.
        damaged_ns: the last of these times, by `steady_ns`.
        unacked: number of sent releases that it has not acknowledged.
        unacked_ns: when the first of these was sent, by `steady_ns`.
        sent_number: number of the newest release sent on its stream, or of the one from which it continued.
        verification: requests to verify its rows, and its answers.
        has_held: whether it has ever acknowledged a version.
        held: seals of the last versions that its process has proven exactly, in order.
        guest: whether it is forgotten after its stream, never written to the log, and not counted.
    """

    name: str
    applied: Position = field(default_factory=Position)
    acked_unix_ns: int = 0
    acked_ns: int | None = None
    instance: str = ""
    by: str | None = None
    stream: asyncio.Event | None = None
    since_ns: int = field(default_factory=steady_ns)
    left: str = ""
    checked: bool = False
    unbound: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()
    rewind: Rewind | None = None
    has_held: bool = False
    held: dict[int, None] = field(default_factory=dict)
    guest: bool = False
    damages: int = 0
    damaged_ns: int = 0
    unacked: int = 0
    unacked_ns: int = 0
    sent_number: int = 0
    verification: ReplicaVerification = field(default_factory=ReplicaVerification)

    def note_held(self, seal: int) -> None:
        """Record that it holds the rows of exactly the version with a seal; 0 is none."""
        if seal and seal not in self.held:
            self.held[seal] = None
            if len(self.held) > _REMEMBERED_VERSIONS:
                del self.held[next(iter(self.held))]

    def end_stream(self) -> None:
        """End its open stream, if it has one."""
        if self.stream:
            self.stream.set()

    def note_damage(self, tables: tuple[str, ...]) -> None:
        """Record the tables whose bits differ from those sent. Counts only the change from right to wrong."""
        if not self.damaged:
            self.damages, self.damaged_ns = self.damages + 1, steady_ns()
        self.damaged, self.checked = tables, False


@dataclass(frozen=True)
class ConsumerOptions:
    """A request to create or change a consumer; without a policy, an existing one keeps its own."""

    name: str
    model: str
    policy: Policy | None = None

    @classmethod
    def described(cls, name: str, model: object, policy: object) -> "ConsumerOptions":
        """Read the options of consumer `name` from JSON or TOML."""
        if not isinstance(model, str):
            got = f", got {model!r}" if model is not None else ""
            raise InvalidInput(f"model: expected the name of a model{got}")
        if not isinstance(policy, Mapping):
            raise InvalidInput("policy: expected an object")
        return cls(check_name("consumer", name), check_name("model", model), Policy.from_dict(policy))


@dataclass
class Consumer:
    """A named subscription to a model.

    Attributes:
        released_rows: rows sent to its replicas since the service started.
        released_bytes: bytes of the ids and values of these rows.
        damages: damaged tables of replicas since the service started.
        rewinds: replicas that connected with rows of a discarded history since the service started.
        signal: wakes with each change of the policy, of a replica or of an offset.
        pause: the pause; None if the consumer is not paused.
        follows: the kept version that it follows; None = the newest version.
        waits: why it does not go on to a later kept version; empty if it does not follow at a distance.
        objection: its last objection; None if it never raised one.
        pause_changed: wakes the streams that wait for the end of a pause.
        moved: whether its model has left this process.
        durations: durations of the deliveries to its replicas.
    """

    name: str
    model: str
    created_unix_ns: int
    policy: Policy = field(default_factory=Policy)
    replicas: dict[str, Replica] = field(default_factory=dict)
    released_rows: int = 0
    released_bytes: int = 0
    damages: int = 0
    rewinds: int = 0
    signal: Signal = field(default_factory=Signal)
    pause: Pause | None = None
    follows: Follow | None = None
    waits: str = ""
    objection: Objection | None = None
    pause_changed: Signal = field(default_factory=Signal)
    moved: bool = False
    durations: DeliveryDurations = field(default_factory=DeliveryDurations)

    @property
    def fleet(self) -> list[Replica]:
        """All replicas except guests."""
        return [replica for replica in self.replicas.values() if not replica.guest]

    @property
    def connected(self) -> list[Replica]:
        """The connected replicas, without guests."""
        return [replica for replica in self.fleet if replica.stream]

    def has_held(self, seal: int) -> bool:
        """Whether every connected replica has held exactly the version with a seal, and there is one."""
        return bool(self.connected) and all(seal in each.held for each in self.connected)

    @property
    def distance(self) -> RolloutDelay | None:
        """How it follows another consumer; None if it does not."""
        return self.follows.distance if self.follows else None

    def add_pause(self, pause: Pause) -> None:
        """Pause it; an earlier pause stays in force, with both reasons."""
        self.pause = joined(self.pause, pause)

    def end_streams(self) -> None:
        """End the open streams of its replicas."""
        for replica in self.replicas.values():
            replica.end_stream()

    def copy(self) -> "Consumer":
        """A copy of the consumer and its replicas, for another thread."""
        return replace(self, replicas={name: replace(replica) for name, replica in self.replicas.items()})

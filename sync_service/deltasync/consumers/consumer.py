"""A consumer: a named subscription with its policy, its pause, and the versions that it is kept from."""

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from deltasync.base.arguments import check_name
from deltasync.base.clock import steady_ns
from deltasync.base.errors import DeltasyncError, InvalidInput
from deltasync.base.waiting import Signal
from deltasync.consumers.pause import Pause
from deltasync.core.cut_times import DeliveryDurations
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.core.verified import VerifiedTable

# Questions are counted from a random number of so many bits on: a replica may remember those of another process.
_BITS = 62


@dataclass(frozen=True)
class Verified:
    """What a replica has found.

    Attributes:
        version: the model's, of which what it holds was made.
        tables: those that its consumer follows.
    """

    version: int
    tables: Sequence[VerifiedTable]


class ReplicaVerification:
    """Of one replica, whichever stream it has. Used in the event loop.

    Attributes:
        signal: wakes when something was asked, when some more rows were read, and when it was answered.
        rows: that were read so far, and that there are.
    """

    def __init__(self) -> None:
        self.signal = Signal()
        self._asked = self._answered = secrets.randbits(_BITS)
        self._found: Verified | DeltasyncError | None = None
        self.rows = (0, 0)

    def ask(self) -> int:
        """Ask for rows to be read again from now on; the number of the question."""
        self._asked += 1
        self.rows = (0, 0)
        self.signal.wake()
        return self._asked

    @property
    def open(self) -> int:
        """The number of the last question, as long as it is not answered; else 0."""
        return self._asked if self._asked > self._answered else 0

    def note(self, read: int, rows: int) -> None:
        """So many of so many rows were read."""
        self.rows = (read, rows)
        self.signal.wake()

    def answer(self, number: int, found: Verified | DeltasyncError) -> None:
        """Answer a question, and all before it."""
        if number > self._answered:
            self._answered, self._found = number, found
            self.signal.wake()

    def answer_to(self, number: int) -> Verified | None:
        """The answer to a question, if there is one.

        Raises:
            DeltasyncError: it could not be answered.
        """
        if self._answered < number:
            return None
        if isinstance(self._found, DeltasyncError):
            raise self._found
        return self._found


@dataclass(frozen=True)
class Rewind:
    """That a replica came with what is of a discarded past: the position that it held, and since when, by
    `steady_ns`, it is being given what there is now.
    """

    held: Position
    since_ns: int


@dataclass
class Replica:
    """One process of a consumer's fleet.

    Attributes:
        name: its name inside the fleet.
        applied: the position it last acknowledged.
        acked_unix_ns: when it last acknowledged, nanoseconds since 1970.
        instance: what tells it, as long as it lives, from others of its name; empty where it does not say.
        by: the name of the identity that it last connected as; None if it has not since the service started.
        acked_ns: the same by `steady_ns`; None if it has not since the service started.
        stream: ends its open stream when set; None while it is away.
        since_ns: since when it is connected, or away, by `steady_ns`: at most since the service started.
        left: why its last stream ended; empty if it has had none since the service started.
        checked: whether its last ack had checksums of what it holds, and they were right.
        unbound: tables that the consumer follows and that it does not hold.
        damaged: tables of which it holds other bits than it was sent; they are sent again.
        rewind: until it holds what it is given instead of rows of a discarded past; None if it came with none.
        damages: how often it was found to hold other bits than it was sent, since it is known here.
        damaged_ns: when that was last, by `steady_ns`.
        unacked: how many releases were sent to it that it has not acknowledged.
        unacked_ns: when the first of these was sent, by `steady_ns`.
        sent_number: that of the newest release that it was sent on its stream, or went on from.
        verification: its rows, read again when somebody asks.
        has_held: whether it has ever acknowledged a version, as far as that is known.
        guest: whether it is forgotten once its stream has ended, and never written down, and counts nowhere.
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
    guest: bool = False
    damages: int = 0
    damaged_ns: int = 0
    unacked: int = 0
    unacked_ns: int = 0
    sent_number: int = 0
    verification: ReplicaVerification = field(default_factory=ReplicaVerification)

    def note_damage(self, tables: tuple[str, ...]) -> None:
        """Note of which tables it holds other bits than it was sent: anew, where these were right in between."""
        if not self.damaged:
            self.damages, self.damaged_ns = self.damages + 1, steady_ns()
        self.damaged, self.checked = tables, False


@dataclass(frozen=True)
class ConsumerOptions:
    """A consumer that is wanted. Without a policy an existing one keeps its own."""

    name: str
    model: str
    policy: Policy | None = None

    @classmethod
    def described(cls, name: str, model: object, policy: object) -> "ConsumerOptions":
        """The consumer of that name that JSON or TOML describes.

        Raises:
            InvalidInput: a name that cannot be one, or something else than a policy.
        """
        if not isinstance(model, str):
            raise InvalidInput(
                "model: expected the name of a model" + (f", got {model!r}" if model is not None else "")
            )
        if not isinstance(policy, Mapping):
            raise InvalidInput("policy: expected an object")
        return cls(check_name("consumer", name), check_name("model", model), Policy.from_dict(policy))


@dataclass
class Consumer:
    """A named subscription to a model.

    Attributes:
        released_rows: rows sent to its replicas since the service started.
        released_bytes: bytes of their ids and values.
        damages: how often a table of a replica was found to be damaged, since the service started.
        rewinds: how often a replica was found to hold what is of a discarded past, likewise.
        signal: wakes all who wait for a change of the policy, of a replica or of an offset.
        pause: what holds its replicas at what they have; None if nothing does.
        brake: wakes the streams that wait for the end of a pause.
        moved: whether its model is not here any more.
        durations: how long the way to its replicas took.
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
    brake: Signal = field(default_factory=Signal)
    moved: bool = False
    durations: DeliveryDurations = field(default_factory=DeliveryDurations)

    @property
    def fleet(self) -> list[Replica]:
        """The replicas that count: all but guests."""
        return [replica for replica in self.replicas.values() if not replica.guest]

    def copy(self) -> "Consumer":
        """The consumer and its replicas as they are now, for another thread."""
        return replace(self, replicas={name: replace(replica) for name, replica in self.replicas.items()})

"""What a replica is fed from, a model or a view of one, and where that stands."""

import math
from asyncio import Future
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deltasync.base.clock import Moment
from deltasync.base.decision import Decision
from deltasync.checkpoints.writing import Source
from deltasync.core.delivery import Delivery
from deltasync.core.policy import Policy
from deltasync.core.position import NOWHERE, Position
from deltasync.core.seal import Seal
from deltasync.core.stamped_table import StampedTable
from deltasync.core.tables import TableSpec
from deltasync.model.releases import NO_TABLES, Release


@dataclass(frozen=True)
class RowTotals:
    """Some dirty rows: how many, the bytes of their ids and values as sent, and the L2 norm of their deltas."""

    rows: int = 0
    bytes: int = 0
    norm: float = 0.0


@dataclass(frozen=True)
class Backlog:
    """The dirty rows of one table that are left for later releases.

    Attributes:
        amount: how much they are.
        table_norm: the L2 norm of all rows of the model's table.
        oldest_version: the version since which the oldest of them is dirty; 0 = there is none, or it is not known.
    """

    amount: RowTotals
    table_norm: float = 0.0
    oldest_version: int = 0


@dataclass(frozen=True, kw_only=True)
class ReleaseStatistics:
    """One release of a view.

    Attributes:
        number: the release's number.
        version: the version it was made at.
        made_unix_ns: when it was made, nanoseconds since 1970.
        taken: the rows it took.
        backlog: the rows of all tables that are left for later, as of the last time they were looked for.
        reason: why these rows were taken, in one sentence.
    """

    number: int
    version: int
    made_unix_ns: int
    taken: RowTotals
    backlog: RowTotals
    reason: str


def total(amounts: Iterable[RowTotals]) -> RowTotals:
    """The amounts of several tables together."""
    every = list(amounts)
    rows, size = sum(each.rows for each in every), sum(each.bytes for each in every)
    return RowTotals(rows, size, math.hypot(*(each.norm for each in every)))


@dataclass(frozen=True)
class TableStanding:
    """One table that a consumer follows.

    Attributes:
        spec: the table.
        row_bytes: bytes that a row takes as it is sent: id and values, or id and norm.
        lacking: how many rows a replica at an offset does not hold as the model has them; never too few.
        backlog: what the last release left of it; None where that is not known.
    """

    spec: TableSpec
    row_bytes: int
    lacking: Callable[[int], int]
    backlog: Backlog | None = None

    @property
    def name(self) -> str:
        """Its name."""
        return self.spec.name


def _unknown(_version: int) -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Standing:
    """Where a feed stands. Taken in the event loop, where it costs next to nothing; then read in any thread, while
    cuts and releases go on: rows are counted as of then.

    Attributes:
        history: the id of the history that offsets belong to.
        seals: those of the model that are kept, oldest first.
        tables: finds the tables that the consumer follows.
        version_of: the version of the rows that a replica at an offset holds.
        seal_of: the checksum of the seal that an offset has; 0 where it is not known.
        seconds_since: how long ago a version was sealed, by a clock that nobody sets; None where it does not know.
        newest_release: its number, 0 before the first one; None where offsets are versions.
        release: what the newest release took and left; None if there is none.
        released: when it was made; likewise.
        compared: whether the backlogs are as of the newest version.
        trouble: why the policy is not in force; empty if it is.
        failure: the error that keeps replicas from what is new, and is tried again; empty if there is none.
        unpublished: that there is nothing to hold yet; empty if there is something.
        refused: why the last cut was refused, for what was in it; empty if it was not.
        unsaved: why the last checkpoint of the model could not be written or copied; empty if it could.
        unfit: that no table fits what the consumer wants; empty if one does.
    """

    history: str
    seals: Sequence[Seal]
    tables: Callable[[], list[TableStanding]]
    version_of: Callable[[int], int]
    seal_of: Callable[[int], int]
    seconds_since: Callable[[int], float | None] = _unknown
    newest_release: int | None = None
    release: ReleaseStatistics | None = None
    released: Moment | None = None
    compared: bool = True
    trouble: str = ""
    failure: str = ""
    unpublished: str = ""
    refused: str = ""
    unsaved: str = ""
    unfit: str = ""


def nothing_published(model: str, others: Iterable[str]) -> Standing:
    """Where the consumers of a model stand of which nothing is published, beside `others`."""
    text = f"nothing of model {model!r} is published; models: {', '.join(sorted(others)) or 'none yet'}"
    return Standing(
        history="", seals=(), tables=list, version_of=lambda _: 0, seal_of=lambda _: 0, unpublished=text
    )


def table_standing(table: StampedTable, newest: int, policy: Policy) -> TableStanding:
    """Where a model's table stands, to replicas that read it as it is; `newest` is the model's newest version."""
    counts = table.counts
    return TableStanding(
        spec=table.spec,
        row_bytes=policy.row_bytes(table.spec),
        # Whoever has the newest version lacks nothing of it, though a later one may be there by now.
        lacking=lambda version: counts.after(version) if version < newest else 0,
    )


class Feed(Protocol):
    """What replicas are fed from: a history of numbered releases of some tables. Used in the event loop."""

    @property
    def history(self) -> str:
        """The id of the history that its numbers belong to."""

    @property
    def model_history(self) -> str:
        """The id of the history of the model whose rows these are."""

    @property
    def position(self) -> Position:
        """What a replica that has everything holds."""

    @property
    def deliveries(self) -> Sequence[Delivery]:
        """What replicas are sent of each table, by slot."""

    def may_serve(self, policy: Policy) -> bool:
        """Whether there is something to send to replicas of a consumer with this policy."""

    def resume(self, held: Position, acknowledged: Position = NOWHERE) -> tuple[Decision, Position]:
        """Whether a replica that holds `held` can go on from there, and what that is in this history.

        `acknowledged` is its offset.
        """

    def discards(self, held: Position, version: Position) -> bool:
        """Whether what a replica holds is of a discarded past. `version` is the model's that it was made of, empty
        where the replica does not say it.
        """

    def model_position(self, version: int) -> Position:
        """A version as a position of the model's history, with its seal where that is known."""

    def seal_of(self, number: int) -> int:
        """The checksum of the seal of a number of this history; 0 where it is not known."""

    def version_of(self, number: int) -> int:
        """The version of the model's rows that a replica at `number` holds, as far as it is known."""

    def behind_ns(self, number: int, policy: Policy) -> int:
        """For how long a replica at `number` has not held the newest there is for a consumer with this policy,
        nanoseconds; 0 if it does, `FOREVER_NS` or more where nobody knows.
        """

    def outdated(self, number: int) -> Moment | None:
        """When the version was sealed that comes after the one whose rows a replica at `number` holds, or None."""

    def event_time_of(self, version: int) -> int | None:
        """The time of the newest event that the model had been trained on at a version, nanoseconds since 1970.

        None where it is not known.
        """

    def release(self, after: int, whole: frozenset[int] = NO_TABLES) -> "Future[Release]":
        """What a replica at `after` lacks, with every row of the tables in the slots `whole`.

        It fails with `DamagedRows` where some do not fit their digests.
        """

    def standing(self, policy: Policy) -> Standing:
        """Where it stands to a consumer with this policy, for those who ask how far replicas are behind."""

    def changed(self) -> Awaitable[object]:
        """To be awaited: another position, other tables or other trouble, from this call on."""


class Derived(Source, Protocol):
    """A view: tables that are made of a model's tables and of the log."""

    def cut_log(self, state: Mapping[str, Any]) -> None:
        """Drop what the log has up to a state that checkpoints have. Blocks; any thread.

        Raises:
            StorageFailed: the log could not be written; nothing was lost.
        """

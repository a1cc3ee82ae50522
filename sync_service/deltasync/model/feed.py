"""The interface of a replica's feed, a model or a view of one, and reports of its position."""

import math
from asyncio import Future
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from deltasync.base.clock import Moment
from deltasync.base.decision import Decision
from deltasync.checkpoints.writing import Source
from deltasync.core.policy import Policy
from deltasync.core.position import NOWHERE, Position
from deltasync.core.seal import Seal, SealHistory
from deltasync.core.stamped_table import StampedTable
from deltasync.core.table_form import TableForm
from deltasync.core.tables import TableSpec
from deltasync.model.releases import NO_TABLES, Head, Release


@dataclass(frozen=True)
class RowTotals:
    """Totals of dirty rows: count, bytes of ids and values as sent, and L2 norm of the deltas."""

    rows: int = 0
    bytes: int = 0
    norm: float = 0.0


@dataclass(frozen=True)
class Backlog:
    """The dirty rows of one table that a release left for later.

    Attributes:
        table_norm: the L2 norm of all rows of the model's table.
        oldest_version: the version since which the oldest of them is dirty; 0 if there is none or it is unknown.
    """

    amount: RowTotals
    table_norm: float = 0.0
    oldest_version: int = 0


@dataclass(frozen=True)
class ReleaseStatistics:
    """Statistics of one release of a view.

    Attributes:
        version: the model version from which it was made.
        made_unix_ns: when it was made, nanoseconds since 1970.
        backlog: the rows of all tables left for later, as of the last comparison.
        reason: why it contains these rows, in one sentence.
    """

    number: int
    version: int
    made_unix_ns: int
    taken: RowTotals
    backlog: RowTotals
    reason: str


def total(amounts: Iterable[RowTotals]) -> RowTotals:
    """Add up the amounts of several tables."""
    every = list(amounts)
    rows, size = sum(each.rows for each in every), sum(each.bytes for each in every)
    return RowTotals(rows, size, math.hypot(*(each.norm for each in every)))


@dataclass(frozen=True)
class TableStatus:
    """One table that a consumer follows.

    Attributes:
        row_bytes: bytes of a row as sent: id and values, or id and norm.
        lacking: upper bound of the rows that a replica at an offset lacks.
        backlog: the rows that the last release left; None if unknown.
    """

    spec: TableSpec
    row_bytes: int
    lacking: Callable[[int], int]
    backlog: Backlog | None = None

    @property
    def name(self) -> str:
        """The table's name."""
        return self.spec.name


def _unknown(_version: int) -> None:
    return None


def _none(_number: int) -> int:
    return 0


@dataclass(frozen=True, kw_only=True)
class FeedStatus:
    """The position of a feed. Made in the event loop at almost no cost, then read in any thread while cuts and
    releases continue. Its row counts may be newer than the rest.

    Attributes:
        history: the id of the history to which offsets belong.
        seals: the model's recent seals, oldest first.
        tables: returns the tables that the consumer follows.
        version_of: the version of the rows that a replica at an offset holds.
        seal_of: the checksum of an offset's seal; 0 if unknown.
        seconds_since: seconds since a version was sealed, by a monotonic clock; None if unknown.
        newest_release: number of the newest release, 0 before the first; None if offsets are versions.
        release: statistics of the newest release; None if there is none.
        released: when it was made; None if there is none.
        compared: whether the backlogs are as of the newest version.
        trouble: why the policy is not in force; empty if it is.
        failure: the error that prevents new releases and is being retried; empty if there is none.
        unpublished: why replicas cannot hold anything yet; empty if they can.
        refused: why the last cut was refused for its content; empty if it was not.
        unsaved: why the last checkpoint of the model could not be written or copied; empty if it could.
        unfit: why no table matches the consumer's policy; empty if one does.
        newest: the version that replicas are to hold, in words.
    """

    history: str
    seals: Sequence[Seal]
    tables: Callable[[], list[TableStatus]]
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
    newest: str = "the newest version"


def nothing_published(model: str, others: Iterable[str]) -> FeedStatus:
    """The status of consumers of an unpublished model; `others` are the published models."""
    text = f"model {model!r} is not published yet; published models: {', '.join(sorted(others)) or 'none'}"
    return FeedStatus(history="", seals=(), tables=list, version_of=_none, seal_of=_none, unpublished=text)


def table_status(table: StampedTable, newest: int, policy: Policy) -> TableStatus:
    """The status of a model's table for replicas that read it directly; `newest` is the newest version."""
    counts = table.counts

    def lacking(version: int) -> int:
        # A replica at the newest version lacks nothing of that version, even if a later one already exists.
        return counts.after(version) if version < newest else 0

    return TableStatus(table.spec, policy.row_bytes(table.spec), lacking)


class Feed(Protocol):
    """The source of replicas' rows: a history of numbered releases of some tables. Used in the event loop."""

    seals: SealHistory

    @property
    def history(self) -> str:
        """The id of the history to which its numbers belong."""

    @property
    def model_history(self) -> str:
        """The id of the history of the model that the rows come from."""

    @property
    def position(self) -> Position:
        """The position of a replica that has everything."""

    @property
    def forms(self) -> Sequence[TableForm]:
        """The form in which replicas get each table, by slot."""

    def may_serve(self, policy: Policy) -> bool:
        """Whether it can serve replicas of a consumer with this policy."""

    def continue_from(self, held: Position, acknowledged: Position = NOWHERE) -> tuple[Decision, Position]:
        """Decide whether a replica can continue from its position. Return that position in this history too.

        `acknowledged` is the replica's offset.
        """

    def discards(self, held: Position, version: Position) -> bool:
        """Whether a replica holds rows of a discarded history. `version` is the model's version of these rows,
        empty if the replica does not report it.
        """

    def seal_of(self, number: int) -> int:
        """The checksum of the seal of a number in this history; 0 if unknown."""

    def version_of(self, number: int) -> int:
        """The version of the model's rows that a replica at `number` holds, as far as known."""

    def head_of(self, number: int) -> Head | None:
        """The version or release with a number; None if unknown."""

    def behind_ns(self, number: int, policy: Policy) -> int:
        """Nanoseconds for which a replica at `number` has lacked the newest release for this policy: 0 if it lacks
        nothing, `FOREVER_NS` or more if unknown.
        """

    def release(self, after: int, whole: frozenset[int] = NO_TABLES) -> "Future[Release]":
        """The rows that a replica at `after` lacks, with every row of the tables in the slots `whole`.

        The future fails with `DamagedRows` if rows do not match their digests.
        """

    def status(self, policy: Policy) -> FeedStatus:
        """The position for a consumer with this policy, for reports of the lag of its replicas."""

    def changed(self) -> Awaitable[object]:
        """Wait for a change of position, tables or trouble after this call."""


class ViewStorage(Source, Protocol):
    """What checkpoints need of a view: its tables, which are derived from a model's, and its part of the log."""

    def truncate_log(self, state: Mapping[str, Any]) -> None:
        """Drop records up to a state that checkpoints contain. Blocks; any thread may call it."""

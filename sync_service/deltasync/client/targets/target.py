"""The interface of targets, into which replicas write rows."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np

from deltasync.base.arguments import type_in_words
from deltasync.base.errors import Contradiction, DeltasyncError, InvalidInput
from deltasync.core.digests import RowDigests
from deltasync.core.position import Position
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.seal import seconds_behind
from deltasync.core.table_form import ReplicaSpec
from deltasync.core.tables import TableSpec

Reads = Literal["pause", "copies"]


class TornTarget(DeltasyncError):
    """The target cannot be read: a release was only partly written, or the first one has not arrived yet."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """The version of a target's rows.

    Attributes:
        position: the position of the last release; empty before the first.
        version: the model's version; 0 before the first release.
        step: the trainer's step of that version; None before the first release.
        step_end_unix_ns: end of that step, nanoseconds since 1970; None before the first release.
        event_time_unix_ns: the time of the newest event that the model had been trained on at that version,
            nanoseconds since 1970; None if the trainer does not report it.
        kept: the name of the kept version that the consumer followed; empty if it followed the newest version, or
            a version without a name.
    """

    position: Position = field(default_factory=Position)
    version: int = 0
    step: int | None = None
    step_end_unix_ns: int | None = None
    event_time_unix_ns: int | None = None
    kept: str = ""

    @property
    def age_seconds(self) -> float | None:
        """Seconds since the newest event, or else since the end of the step; None if both are unknown.

        Uses the clock of this machine, and is never negative.
        """
        since = self.step_end_unix_ns if self.event_time_unix_ns is None else self.event_time_unix_ns
        return seconds_behind(since, time.time_ns())


def reading_fields(of: object) -> dict[str, Any]:
    """The fields of `Reading` that a release or a store has."""
    return {each.name: getattr(of, each.name) for each in fields(Reading)}


def number_of_copies(reads: str) -> int:
    """The number of copies that a target keeps."""
    copies = {"pause": 1, "copies": 2}
    if reads not in copies:
        raise InvalidInput(f"reads: {reads!r}, expected one of {', '.join(copies)}")
    return copies[reads]


@dataclass(frozen=True)
class Release:
    """The changes that bring a replica to `position`.

    If the target `takes_parts`, a large first copy may arrive as several releases. Only the last of them has a
    position, a version and a step.

    Attributes:
        position: the replica's position after the release.
        step: the trainer's step of that version.
        step_end_unix_ns: end of that step, nanoseconds since 1970.
        resync: whether the release has all rows, or is a part of such a release. See `resets`.
        tables: all tables that the consumer follows, changed or not, in the target's form: a `ReplicaSpec` if rows
            are sent in another type than the table's own.
        rows: the changed rows. A table may appear several times with different rows. A part of a first copy may
            repeat rows of an earlier part; the later ones count.
        whole: names of the tables that have all rows although `resync` is false. See `resets`.
        version: the model's version from which the release was made.
        bytes: size of ids and values on the wire.
        event_time_unix_ns: the time of the newest event that the model had been trained on at that version,
            nanoseconds since 1970; None if the trainer does not report it.
        model: the model's name.
        kept: the name of the kept version to which it brings the replica; empty for the newest version, or a
            version without a name.
        more: whether more parts of this first copy follow. The target must not be read before the last one.
        continues: whether this is a later part of a first copy.
    """

    position: Position
    step: int
    step_end_unix_ns: int
    resync: bool
    tables: list[TableSpec]
    rows: list[RowBatch] = field(default_factory=list)
    whole: frozenset[str] = frozenset()
    version: int = 0
    bytes: int = 0
    event_time_unix_ns: int | None = None
    model: str = ""
    kept: str = ""
    more: bool = False
    continues: bool = False

    def resets(self, table: TableSpec) -> bool:
        """Whether to set all rows of a table to zero first."""
        return not self.continues and (self.resync or table.name in self.whole)

    @property
    def changes(self) -> bool:
        """Whether the release has rows or resets a table."""
        return bool(self.rows or self.resync or self.whole)

    def check_values(self) -> None:
        """Raise Contradiction if rows have no values, because the consumer's mode is `ids`."""
        if any(rows.norms is not None for rows in self.rows):
            raise Contradiction("the consumer's mode is `ids`, so its rows have no values: use a CallbackTarget")

    def check_numbers(self) -> None:
        """Raise Contradiction if rows are bytes of a quantised module instead of numbers."""
        for table in self.tables:
            if isinstance(table, ReplicaSpec) and table.value_type.tbe_bits:
                raise Contradiction(
                    f"table {table.name!r}: rows are sent as {table.value_type.value}, the bytes of a module that "
                    "TorchRec quantised: use a TorchTarget with such a module, or another value type (deltasync "
                    "consumers update NAME --value-type int8)"
                )


# Digests [n] of the rows of each batch; None for a batch that must be read back.
BatchDigests: TypeAlias = Sequence[RowDigests | None]


@dataclass(frozen=True, eq=False)
class Written:
    """Digests of the rows of each batch of a release, computed from the target's own memory after the write."""

    digests: BatchDigests

    def same_as(self, other: "Written | None") -> bool:
        """Whether another copy of the target has the same digests."""
        return other is not None and all(
            one is not None and another is not None and np.array_equal(one, another)
            for one, another in zip(self.digests, other.digests, strict=True)
        )


class Target(Protocol):
    """The interface that every target has."""

    def apply(self, release: Release) -> Written | None:
        """Write a release. The subscriber's thread calls this; an exception stops the subscriber.

        A readable target may return the digests of the written rows. Otherwise they are read back.
        """


@runtime_checkable
class ReadableTarget(Target, Protocol):
    """A target whose rows can be read back for checksums."""

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        """The rows `ids` ([n], strictly ascending) as [n, D], or None if the target does not keep the table.

        The subscriber's thread calls this.
        """


@runtime_checkable
class PartialTarget(Target, Protocol):
    """A target that may keep only some of the tables that its consumer follows."""

    def bound(self) -> frozenset[str]:
        """Names of the tables of the last release that it keeps. The subscriber's thread calls this."""


@runtime_checkable
class GradualTarget(Target, Protocol):
    """A target that can write a first copy in parts as it arrives, so that rows are not in memory twice."""

    @property
    def takes_parts(self) -> bool:
        """Whether it accepts parts now. The subscriber's thread calls this."""


def check_target(call: str, target: object) -> None:
    """A TypeError unless the argument is a target."""
    apply = getattr(target, "apply", None)
    # A torch module has another `apply`, for functions.
    if not callable(apply) or isinstance(target, type) or getattr(apply, "__qualname__", "") == "Module.apply":
        raise TypeError(
            f"{call}: target is {type_in_words(target)}, expected a target: NumpyTarget(), "
            "KeyedTarget(), TorchTarget(model) for a torch module, CallbackTarget(function) for a function"
        )


class CallbackTarget:
    """Passes every release to a function. Rows cannot be verified, so lag reports `delivered`."""

    def __init__(self, callback: Callable[[Release], None]) -> None:
        if not callable(callback):
            kind = type_in_words(callback)
            raise TypeError(f"CallbackTarget(callback): callback is {kind}, expected a function")
        self.apply = callback

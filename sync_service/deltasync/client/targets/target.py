"""What a target is: where a replica puts rows, and how they are read at one version."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, TypeAlias, runtime_checkable

import numpy as np

from deltasync.base.arguments import type_in_words
from deltasync.base.errors import Contradiction, DeltasyncError, InvalidInput
from deltasync.core.digests import RowDigests
from deltasync.core.position import Position
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.seal import seconds_behind
from deltasync.core.tables import TableSpec

Reads = Literal["pause", "copies"]


class TornTarget(DeltasyncError):
    """A target cannot be read: a release was not written to its end, or its first copy is still arriving."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Which version a target's rows are of, all of them.

    Attributes:
        position: the one that the last release took the target to; empty before any.
        version: the model's version that it was made of; 0 before any.
        step: the trainer's step of that version; None before any release.
        step_end_unix_ns: when that step ended, nanoseconds since 1970; None before any release.
        event_time_unix_ns: the time of the newest event that the model had been trained on at that version,
            nanoseconds since 1970; None where the trainer does not say it.
    """

    position: Position = field(default_factory=Position)
    version: int = 0
    step: int | None = None
    step_end_unix_ns: int | None = None
    event_time_unix_ns: int | None = None

    @property
    def age_seconds(self) -> float | None:
        """Seconds since the newest event that the model had been trained on; where the trainer does not say it,
        since its step ended; None where neither is known. By the clock of this machine, and never negative.
        """
        known = self.step_end_unix_ns if self.event_time_unix_ns is None else self.event_time_unix_ns
        return seconds_behind(known, time.time_ns())


def number_of_copies(reads: str) -> int:
    """How many copies of its rows a target keeps.

    Raises:
        InvalidInput: no such way of reading.
    """
    copies = {"pause": 1, "copies": 2}
    if reads not in copies:
        raise InvalidInput(f"reads: {reads!r}, expected one of {', '.join(copies)}")
    return copies[reads]


@dataclass(frozen=True)
class Release:
    """A release: what takes a replica to `position`.

    It is whole, unless the target `takes_parts` of a large first copy: then it may come as several, of which only
    the last has a position, a version and a step.

    Attributes:
        position: what the replica holds once the release is applied.
        step: the trainer's step of that version.
        step_end_unix_ns: when that step ended, nanoseconds since 1970.
        resync: the release holds everything, or is a part of it. Ask `resets` whether to reset a table first.
        tables: every table the consumer follows, changed or not: as a target holds it, a `HeldSpec` where rows are
            sent in another type than the table's own.
        rows: the changed rows; a table may appear several times, with different rows each time. A part of a first
            copy may have rows again that an earlier part had: the later ones count.
        whole: names of the tables of which it holds all rows, where it is no resync. Ask `resets`.
        version: the model's version that the release was made of.
        bytes: what ids and values took on the wire.
        event_time_unix_ns: the time of the newest event that the model had been trained on at that version,
            nanoseconds since 1970; None where the trainer does not say it.
        model: the model's name.
        more: more rows of this first copy follow, and nothing may be read until they are there.
        continues: this goes on with the first copy that the release before has begun.
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
    more: bool = False
    continues: bool = False

    def resets(self, table: TableSpec) -> bool:
        """Whether a table must be reset to zero first."""
        return not self.continues and (self.resync or table.name in self.whole)

    @property
    def changes(self) -> bool:
        """Whether it has rows, or resets a table."""
        return bool(self.rows or self.resync or self.whole)

    def check_values(self) -> None:
        """Check that the rows have values.

        Raises:
            Contradiction: the consumer's mode is `ids`.
        """
        if any(rows.norms is not None for rows in self.rows):
            raise Contradiction("the consumer streams ids and norms, no values: take them with a CallbackTarget")


# Digests [n] of the rows of each of some batches; None for a batch whose rows have to be read.
BatchDigests: TypeAlias = Sequence[RowDigests | None]


@dataclass(frozen=True, eq=False)
class Written:
    """Digests of the rows that a target has written, each made of the target's own memory.

    Attributes:
        digests: of the batches of the release, in their order.
    """

    digests: BatchDigests

    def same_as(self, other: "Written | None") -> bool:
        """Whether another copy of the target holds the same bits."""
        return other is not None and all(
            one is not None and another is not None and np.array_equal(one, another)
            for one, another in zip(self.digests, other.digests, strict=True)
        )


class Target(Protocol):
    """What a subscriber needs of a target."""

    def apply(self, release: Release) -> Written | None:
        """Take over a release, whole. Called in the subscriber's thread; an exception stops the subscriber.

        A readable target may return the digests of what it has written. Otherwise the rows are read back.
        """


@runtime_checkable
class ReadableTarget(Target, Protocol):
    """A target whose rows can be read back, so that checksums can show that it holds the right ones."""

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        """The rows `ids` ([n], strictly ascending) as [n, D], or None if the target does not keep the table.

        Called in the subscriber's thread.
        """


@runtime_checkable
class PartialTarget(Target, Protocol):
    """A target that may hold only some of the tables that its consumer follows, and says which."""

    def bound(self) -> frozenset[str]:
        """Names of the tables of the last release that it holds. Called in the subscriber's thread."""


@runtime_checkable
class GradualTarget(Target, Protocol):
    """A target that can take a first copy in parts, as its rows arrive: they are then not held twice."""

    @property
    def takes_parts(self) -> bool:
        """Whether it takes them now. Called in the subscriber's thread."""


def check_target(call: str, target: object) -> None:
    """Check that an argument takes releases, see `base.arguments`.

    Raises:
        TypeError: it does not.
    """
    apply = getattr(target, "apply", None)
    # A torch module has an `apply` too, for functions.
    if not callable(apply) or isinstance(target, type) or getattr(apply, "__qualname__", "") == "Module.apply":
        raise TypeError(
            f"{call}: target is {type_in_words(target)}, expected an object that takes releases: NumpyTarget(), "
            "KeyedTarget(), TorchTarget(model) for a torch module, CallbackTarget(function) for a function"
        )


class CallbackTarget:
    """Hands every release to a function. Nothing shows what that makes of it: lag says `delivered`."""

    def __init__(self, callback: Callable[[Release], None]) -> None:
        if not callable(callback):
            kind = type_in_words(callback)
            raise TypeError(f"CallbackTarget(callback): callback is {kind}, expected a function")
        self.apply = callback

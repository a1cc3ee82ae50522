"""Where a subscriber puts the rows it receives."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np

from deltasync.core.errors import Contradiction
from deltasync.core.position import Position
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.tables import TableSpec


@dataclass(frozen=True)
class Release:
    """A whole release: what takes a replica to `position`.

    Attributes:
        position: what the replica holds once the release is applied.
        step: the trainer's step of that version.
        step_end_unix_ns: when that step ended, nanoseconds since 1970.
        resync: all tables must be reset to zero first: the release holds everything.
        tables: every table the consumer follows, changed or not: as a target holds it, a `HeldSpec` where rows are
            sent in another type than the table's own.
        rows: the changed rows; a table may appear several times, with different rows each time.
        whole: names of the tables that must be reset to zero first, where it is no resync: the release holds all
            of their rows. Ask `resets`.
        version: the model's version that the release was made of.
        bytes: what ids and values took on the wire.
        event_time_unix_ns: the time of the newest event that the model had been trained on at that version,
            nanoseconds since 1970; None where the trainer does not say it.
        model: the model's name.
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

    def resets(self, table: TableSpec) -> bool:
        """Whether a table must be reset to zero first."""
        return self.resync or table.name in self.whole

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


class Target(Protocol):
    """What a subscriber needs of a target."""

    def apply(self, release: Release) -> None:
        """Take over a release, whole. Called in the subscriber's thread; an exception stops the subscriber."""


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


class CallbackTarget:
    """Hands every release to a function. Nothing shows what that makes of it: lag says `delivered`."""

    def __init__(self, callback: Callable[[Release], None]) -> None:
        self.apply = callback


class NumpyTarget:
    """Keeps every table as a NumPy array.

    Attributes:
        tables: [rows, dim] array by table name.
        position: the one that these are at, and
        event_time_unix_ns: the time of the newest event that the model had been trained on there, nanoseconds
            since 1970; None where it is not known.

    Read all of them inside `reading()`.
    """

    def __init__(self) -> None:
        self.tables: dict[str, Values] = {}
        self.position = Position()
        self.event_time_unix_ns: int | None = None
        self._lock = threading.Lock()

    @contextmanager
    def reading(self) -> Iterator[dict[str, Values]]:
        """The tables, with no release applied while the block runs."""
        with self._lock:
            yield self.tables

    def apply(self, release: Release) -> None:
        """Write the rows of a release into the arrays; those of tables no longer followed are dropped.

        Raises:
            Contradiction: the consumer streams ids only.
        """
        release.check_values()
        with self._lock:
            for name in self.tables.keys() - {table.name for table in release.tables}:
                del self.tables[name]
            for table in release.tables:
                held = None if release.resets(table) else self._rows_of(table)
                if held is None or len(held) < table.rows:
                    self.tables[table.name] = _with_room(table, held)
            for rows in release.rows:
                self.tables[rows.table.name][rows.ids] = rows.values
            self.position, self.event_time_unix_ns = release.position, release.event_time_unix_ns

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        """Some rows of a table; zeros for those that it has grown by since the last release."""
        rows = self._rows_of(table)
        if rows is None:
            return None
        found, held = np.zeros((len(ids), table.dim), table.dtype), ids[: np.searchsorted(ids, len(rows))]
        found[: len(held)] = rows[held]
        return found

    def _rows_of(self, table: TableSpec) -> Values | None:
        """What is held of a table, if it is held in that form: a policy may have come to send another."""
        rows = self.tables.get(table.name)
        return rows if rows is not None and (rows.shape[1], rows.dtype) == (table.dim, table.dtype) else None


def _with_room(table: TableSpec, rows: Values | None) -> Values:
    """An array for all rows of a table, of which some are there already."""
    array = np.zeros((table.rows, table.dim), table.dtype)
    if rows is not None:
        array[: len(rows)] = rows
    return array

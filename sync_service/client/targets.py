"""Where a subscriber puts the rows it receives."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from sync_service.tables import Ids, Position, Table, Values


@dataclass(frozen=True)
class ReleasedRows:
    """Some changed rows of a table: global ids ([n] int64, strictly ascending) and current values ([n, D]).

    The arrays are read-only views of the received message.
    """

    table: Table
    ids: Ids
    values: Values


@dataclass(frozen=True)
class Release:
    """A whole release: what takes a replica to `position`.

    Attributes:
        position: what the replica holds once the release is applied.
        step: the trainer's step of that version.
        step_end_unix_ns: when that step ended, nanoseconds since 1970.
        resync: the tables must be reset to zero first: the release holds everything.
        tables: every table of the model, changed or not.
        rows: the changed rows; a table may appear several times, with other rows each time.
    """

    position: Position
    step: int
    step_end_unix_ns: int
    resync: bool
    tables: list[Table]
    rows: list[ReleasedRows] = field(default_factory=list)


class Target(Protocol):
    """What a subscriber needs of a target."""

    def apply(self, release: Release) -> None:
        """Take over a release, whole. Called in the subscriber's thread; an exception stops the subscriber."""


class CallbackTarget:
    """Hands every release to a function."""

    def __init__(self, callback: Callable[[Release], None]) -> None:
        self.apply = callback


class NumpyTarget:
    """Keeps every table as a NumPy array.

    Attributes:
        tables: [rows, dim] array by table name. Read it inside `reading()`.
    """

    def __init__(self) -> None:
        self.tables: dict[str, Values] = {}
        self._lock = threading.Lock()

    @contextmanager
    def reading(self) -> Iterator[dict[str, Values]]:
        """The tables, with no release applied while the block runs."""
        with self._lock:
            yield self.tables

    def apply(self, release: Release) -> None:
        """Write the rows of a release into the arrays."""
        with self._lock:
            for table in release.tables:
                if release.resync or table.name not in self.tables:
                    self.tables[table.name] = np.zeros((table.rows, table.dim), table.dtype)
            for rows in release.rows:
                self.tables[rows.table.name][rows.ids] = rows.values

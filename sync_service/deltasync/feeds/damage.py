"""Rows that do not fit their digests: found, told, and mended."""

from asyncio import Future
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from typing import Any, TypeAlias

import numpy as np

from deltasync.core.damage import DamagedRows, ranges
from deltasync.core.events import EventKind, Events
from deltasync.core.id_sets import difference, union
from deltasync.core.rows import Ids
from deltasync.core.stamps import StampedTable
from deltasync.core.threads import EVENT_LOOP, MODEL_THREAD, SET_BY_EVENT_LOOP, confined
from deltasync.feeds.sweep import Sweep
from deltasync.storage.data_directory import RESTORE

# Ids [n], strictly ascending, by the table's name; of no table none.
IdsByTable: TypeAlias = Mapping[str, Ids]

# What becomes of damaged rows of a model that the log does not mend.
FROM_TRAINERS = (
    "the trainer publishes them again with its next cut; where none runs any more, start one that publishes the "
    f"model, or {RESTORE}"
)
_NONE: Ids = np.empty(0, np.int64)


@confined(rows=SET_BY_EVENT_LOOP, _found=EVENT_LOOP, _mended=EVENT_LOOP, _sweep=MODEL_THREAD)
class Damage:
    """The damaged rows of some tables, as far as they were found. Used in the event loop.

    Attributes:
        rows: those that are not mended yet. Replaced whole, so that every thread may read it.
    """

    def __init__(
        self,
        tables: Callable[[], Sequence[StampedTable]],
        run: Callable[..., Awaitable[Any]],
        mend: Callable[[IdsByTable], Awaitable[IdsByTable]],
    ) -> None:
        """`run` runs a function on the thread that changes the tables; `mend` mends rows, if there are any, and
        returns those that are left.
        """
        self.rows: IdsByTable = {}
        self._tables = tables
        self._run = run
        self._mend = mend
        self._sweep = Sweep()
        self._found: IdsByTable = {}
        self._mended: IdsByTable = {}

    def note(self, error: DamagedRows) -> None:
        """Note rows that were found."""
        found = {error.table: error.ids}
        self._found = joined(self._found, without(found, self.rows))
        self.rows = joined(self.rows, found)

    def note_mended(self, rows: IdsByTable) -> None:
        """Note that rows are whole again."""
        self._mended = joined(self._mended, rows)
        self.rows = without(self.rows, rows)

    def note_failure(self, reading: "Future[Any]") -> None:
        """Note the rows that a task has failed for, if it has: to be called once it is done."""
        if not reading.cancelled() and isinstance(error := reading.exception(), DamagedRows):
            self.note(error)

    async def sweep(self) -> None:
        """Look at some more rows of the tables."""
        try:
            await self._run(self._go_on_sweeping)
        except DamagedRows as error:
            self.note(error)

    async def mend(self) -> IdsByTable:
        """Mend what can be mended; returns what is whole again."""
        before = self.rows
        mended = without(before, await self._mend(before))
        self.note_mended(mended)
        return mended

    async def look_after(self, events: Events, *, sweep: bool = True, **subject: str) -> None:
        """Look at some more rows if they are to be swept, mend what can be mended, and tell of both.

        What fails is told as well, and comes again with the next call.
        """
        try:
            if sweep:
                await self.sweep()
            found, self._found = self._found, {}
            _tell(events, EventKind.ROWS_DAMAGED, "other bits than were stored in ", found, subject)
            await self.mend()
            mended, self._mended = self._mended, {}
            _tell(events, EventKind.ROWS_MENDED, "", mended, subject)
        except Exception as error:  # noqa: BLE001  # the trouble of these tables is their own
            events.emit(EventKind.FAILED, "its rows are looked at again later", error, **subject)

    def in_words(self, remedy: str, names: Set[str] | None = None) -> str:
        """What is wrong, in the tables of these names or in all, and what becomes of it; empty if nothing is."""
        found = [
            f"{ranges(ids)} of table {name!r}" for name, ids in self.rows.items() if names is None or name in names
        ]
        return (
            f"other bits than were stored in {'; '.join(found)}: they are not sent, and {remedy}" if found else ""
        )

    def _go_on_sweeping(self) -> None:
        self._sweep.go_on(self._tables())


def joined(some: IdsByTable, others: IdsByTable) -> IdsByTable:
    """The rows of both."""
    names = sorted({*some, *others})
    return {name: union(some.get(name, _NONE), others.get(name, _NONE)) for name in names}


def without(rows: IdsByTable, others: IdsByTable) -> IdsByTable:
    """The rows that are not among the others."""
    left = {name: difference(ids, others[name]) if name in others else ids for name, ids in rows.items()}
    return {name: ids for name, ids in left.items() if len(ids)}


def _tell(events: Events, kind: EventKind, text: str, rows: IdsByTable, subject: Mapping[str, str]) -> None:
    for table, ids in rows.items():
        events.emit(kind, f"{text}{ranges(ids)}", None, **subject, table=table)

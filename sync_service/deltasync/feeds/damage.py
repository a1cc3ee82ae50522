"""Rows that do not fit their digests: found, told, and mended."""

import asyncio
from asyncio import Future
from collections.abc import Awaitable, Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, TypeAlias

import numpy as np

from deltasync.core.damage import DamagedRows, ranges
from deltasync.core.events import EventKind, Events
from deltasync.core.id_sets import difference, union
from deltasync.core.progress import Progress
from deltasync.core.rows import Ids
from deltasync.core.shares import in_shares
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
_BYTES_AT_ONCE = 64 << 20
RESTAMPED = "other stamps than were stored, so that they are taken for changed now and sent again, of "
_NONE: Ids = np.empty(0, np.int64)
_NO_TABLES: IdsByTable = MappingProxyType({})


@dataclass(frozen=True)
class Look:
    """What a look at all rows has found, by the table's name; some may be mended by now.

    Attributes:
        rows: so many were looked at.
        damaged: those that did not fit their digests.
        restamped: those whose stamps were not those that were stored.
    """

    rows: Mapping[str, int]
    damaged: IdsByTable
    restamped: IdsByTable


@confined(rows=SET_BY_EVENT_LOOP, _found=EVENT_LOOP, _mended=EVENT_LOOP, restamped=EVENT_LOOP, _sweep=MODEL_THREAD)
class Damage:
    """The damaged rows of some tables, as far as they were found. Used in the event loop.

    Attributes:
        rows: those that are not mended yet. Replaced whole, so that every thread may read it.
        restamped: those whose stamps were not those that were stored, and that nobody was told of yet.
    """

    def __init__(
        self,
        tables: Callable[[], Sequence[StampedTable]],
        run: Callable[..., Awaitable[Any]],
        mend: Callable[[IdsByTable], Awaitable[IdsByTable]],
        newest: Callable[[], int],
    ) -> None:
        """`run` runs a function on the thread that changes the tables, where `newest` returns the newest number;
        `mend` mends rows, if there are any, and returns those that are left.
        """
        self.rows: IdsByTable = {}
        self._tables = tables
        self._run = run
        self._mend = mend
        self._newest = newest
        self._sweep = Sweep()
        self._found: IdsByTable = {}
        self._mended: IdsByTable = {}
        self.restamped: IdsByTable = {}

    def note(self, error: DamagedRows) -> None:
        """Note rows that were found."""
        self._note({error.table: error.ids})

    def note_mended(self, rows: IdsByTable) -> None:
        """Note that rows are whole again."""
        self._mended = joined(self._mended, rows)
        self.rows = without(self.rows, rows)

    def forget(self, table: str) -> None:
        """Forget a table that is no more."""
        self.rows, self._found, self._mended = (
            {name: ids for name, ids in rows.items() if name != table}
            for rows in (self.rows, self._found, self._mended)
        )

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
        self.restamped = joined(self.restamped, await self._run(self._take_restamped))

    async def look_at_all(self, what: str) -> Look:
        """Look at all rows of the tables, in threads of their own; `what` they are is said in the log. Those that
        may be damaged are looked at again on the thread that changes them.
        """
        tables = list(self._tables())
        rows = {table.spec.name: table.spec.rows for table in tables}
        progress, damaged = Progress(f"{what}: looking at all rows", sum(rows.values())), _NO_TABLES
        restamped = await self._run(self._take_restamped)  # Those found when they were opened, too.
        self.restamped = joined(self.restamped, restamped)
        for table in tables:
            size = max(1, _BYTES_AT_ONCE // table.spec.row_bytes)
            for first in range(0, rows[table.spec.name], size):
                last = min(first + size, rows[table.spec.name])
                if await asyncio.to_thread(_may_be_damaged, table, first, last):
                    found = await self._run(self._look, table, first, last)
                    damaged, restamped = joined(damaged, found[0]), joined(restamped, found[1])
                    self._note(*found)
                progress.add(last - first)
        return Look(rows, damaged, restamped)

    def _look(self, table: StampedTable, first: int, last: int) -> tuple[IdsByTable, IdsByTable]:
        """Which of some rows are damaged, and which had other stamps than were stored."""
        table.retag(table.untagged(first, last), self._newest())
        damaged = table.damaged(first + np.flatnonzero(table.stamps[first:last]))
        return {table.spec.name: damaged} if len(damaged) else {}, self._take_restamped()

    def _note(self, damaged: IdsByTable, restamped: IdsByTable = _NO_TABLES) -> None:
        self._found = joined(self._found, without(damaged, self.rows))
        self.rows, self.restamped = joined(self.rows, damaged), joined(self.restamped, restamped)

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
            restamped, self.restamped = self.restamped, {}
            _tell(events, EventKind.ROWS_DAMAGED, RESTAMPED, restamped, subject)
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
        self._sweep.go_on(self._tables(), self._newest())

    def _take_restamped(self) -> IdsByTable:
        """Of which rows the stamps were not those that were stored, and are now."""
        taken: IdsByTable = {}
        for table in self._tables():
            found, table.restamped = table.restamped, []
            for ids in found:
                taken = joined(taken, {table.spec.name: ids})
        return taken


def _may_be_damaged(table: StampedTable, first: int, last: int) -> bool:
    """Whether some rows may not be as they were stored, while others may write them."""
    found = [bool(len(table.untagged(first, last)))]

    def look(some: slice) -> None:
        # Compared first: NumPy refuses to look through what others write meanwhile.
        ids = first + some.start + np.flatnonzero(table.stamps[first + some.start : first + some.stop] != 0)
        found.append(bool(len(table.damaged(ids))))

    in_shares(look, last - first)
    return any(found)


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

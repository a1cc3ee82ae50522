"""The tables that the ranks of a run announce. An open takes nothing: tables are made, or made larger, just before
the first cut that has them is sealed.
"""

import asyncio
from collections.abc import Mapping, Sequence

from deltasync.core.limits import Limits
from deltasync.core.tables import TableSpec
from deltasync.feeds.model import Model
from deltasync.feeds.table_changes import changes
from deltasync.publish.cut import Cut
from deltasync.publish.runs import Run


class AnnouncedTables:
    """Those of the run that publishes a model: in memory, while a rank is there or a cut under way. Used in the
    event loop.
    """

    def __init__(self, model: Model, limits: Limits) -> None:
        self._model = model
        self._limits = limits
        self._run = ""
        self._tables: Mapping[str, TableSpec] = {}
        self._made: tuple[Mapping[str, TableSpec], int] | None = None  # Which, and after which change.

    async def look_for_room(self, tables: Sequence[TableSpec]) -> None:
        """See whether there would be room for tables now, so that nobody sends all rows in vain. Takes none.

        Raises:
            LimitReached: the limits do not allow their bytes.
            StorageFailed: the volume does not have them.
        """
        if added := self._added_bytes(tables):
            await asyncio.to_thread(self._model.check_room, added)

    def check(self, run: Run, tables: Sequence[TableSpec]) -> Mapping[str, TableSpec]:
        """Check what a rank announces against what the model has, and the other ranks of its run have announced.

        Returns:
            What the tables are to be, by name: to be added once the rank is let in.

        Raises:
            Contradiction: a table is something else there.
            LimitReached: there would be too many.
        """
        model, others = self._model, self._tables if run.id == self._run else {}
        published = {each.spec.name: each.spec for each in model.tables if model.published.get(each.spec.name)}
        again = [table for table in tables if table.name in others]
        first = {table.name: table for table in tables if table.name not in others}
        changed = [
            *changes(model.name, others, again, later_run=False),
            *changes(model.name, published, first.values(), later_run=self._is_later(run)),
        ]
        names = {each.spec.name for each in model.tables} | others.keys() | first.keys()
        self._limits.check("tables_per_model", len(names))
        return first | {table.name: table for table in changed}

    def add(self, run: Run, tables: Mapping[str, TableSpec]) -> None:
        """Note what a rank that was let in has announced, as `check` has returned it."""
        self._tables = {**(self._tables if run.id == self._run else {}), **tables}
        self._run = run.id

    def forget(self) -> None:
        """Forget what was announced: no rank is there any more."""
        self._run, self._tables = "", {}

    async def make(self, cut: Cut) -> None:
        """Have the tables of a complete cut, which is to be sealed.

        Raises:
            Contradiction: one has become something else since its ranks were let in.
            LimitReached: the limits do not allow their bytes.
            StorageFailed: there is no room; nothing was changed.
        """
        if self._made == (cut.tables, self._model.table_changes):
            return
        tables = list(cut.tables.values())
        added = self._added_bytes(tables)
        before, taken = self._model.table_bytes, self._limits.taken
        taken["bytes_in_all"] += added  # Now: others look for room, too.
        try:
            await self._model.add_tables(tables, later_run=self._is_later(cut.run))
        finally:
            taken["bytes_in_all"] += self._model.table_bytes - before - added
        self._made = cut.tables, self._model.table_changes

    def _added_bytes(self, tables: Sequence[TableSpec]) -> int:
        """How many bytes more there would be; the limits allow them."""
        if added := self._model.added_bytes(tables):
            self._limits.check("bytes_per_model", self._model.table_bytes + added)
            self._limits.check("bytes_in_all", self._limits.taken["bytes_in_all"] + added)
        return added

    def _is_later(self, run: Run) -> bool:
        """Whether it is another run than the one that has published last: tables may have more rows then."""
        newest = self._model.seals.newest
        return newest is None or newest.run != run.id

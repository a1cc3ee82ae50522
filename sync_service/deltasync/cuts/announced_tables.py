"""Checks the tables that ranks announce against the model's, and creates them with the first cut."""

import asyncio
from collections.abc import Mapping, Sequence

from deltasync.access.limits import Limits
from deltasync.core.tables import TableSpec
from deltasync.cuts.admission import Run
from deltasync.cuts.cut import Cut
from deltasync.model.applied_tables import changes
from deltasync.model.model import Model


class AnnouncedTables:
    """The tables that the ranks of a run announce, while a rank is connected or a cut is under way. Used in the
    event loop.
    """

    def __init__(self, model: Model, limits: Limits) -> None:
        self._model = model
        self._limits = limits
        self._run = ""
        self._tables: Mapping[str, TableSpec] = {}
        self._made: tuple[Mapping[str, TableSpec], int] | None = None  # The tables, and their last change.
        self._bytes_to_be = 0  # Bytes of the model's tables while some are being created.

    async def look_for_room(self, tables: Sequence[TableSpec]) -> None:
        """Check that there is room for tables before ranks send all rows. Reserves nothing.

        Raises:
            LimitReached: the limits do not allow their bytes.
            StorageFailed: the volume has no room for them.
        """
        if added := self._added_bytes(tables):
            await asyncio.to_thread(self._model.memory.check, added, f"tables of model {self._model.name!r}")

    def check(self, run: Run, tables: Sequence[TableSpec]) -> Mapping[str, TableSpec]:
        """Check a rank's tables against those of the model and of the other ranks of its run.

        Returns:
            The resulting tables by name; pass them to `add` once the rank is admitted.

        Raises:
            Contradiction: a table differs.
            LimitReached: there would be too many tables.
        """
        model, others = self._model, self._tables if run.id == self._run else {}
        again = [table for table in tables if table.name in others]
        first = {table.name: table for table in tables if table.name not in others}
        changed = [
            *changes(model.name, others, again, later_run=False),
            *changes(model.name, model.tables.published_specs, first.values(), later_run=self._is_later(run)),
        ]
        names = {each.spec.name for each in model.tables} | others.keys() | first.keys()
        self._limits.check("tables_per_model", len(names))
        return first | {table.name: table for table in changed}

    def add(self, run: Run, tables: Mapping[str, TableSpec]) -> None:
        """Add the tables of an admitted rank that `check` returned."""
        self._tables = {**(self._tables if run.id == self._run else {}), **tables}
        self._run = run.id

    def forget(self) -> None:
        """Forget all tables after the last rank has left."""
        self._run, self._tables = "", {}

    async def make(self, cut: Cut) -> None:
        """Create the tables of a complete cut before it is sealed.

        Raises:
            Contradiction: a table has changed since its ranks were admitted.
            LimitReached: the limits do not allow their bytes.
            StorageFailed: there is no room; nothing has changed.
        """
        if self._made == (cut.tables, self._model.tables.changes):
            return
        tables = list(cut.tables.values())
        self._bytes_to_be = self._model.tables.nbytes + self._added_bytes(tables)
        try:
            await self._model.tables.add(tables, later_run=self._is_later(cut.run))
        finally:
            self._bytes_to_be = 0
        self._made = cut.tables, self._model.tables.changes

    @property
    def table_bytes(self) -> int:
        """Bytes of the model's tables, including those that are being created."""
        return max(self._model.tables.nbytes, self._bytes_to_be)

    def _added_bytes(self, tables: Sequence[TableSpec]) -> int:
        """Check the limits; return the number of additional bytes."""
        if added := self._model.tables.added_bytes(tables):
            self._limits.check("bytes_per_model", self._model.tables.nbytes + added)
            self._limits.check_more("bytes_in_all", added)
        return added

    def _is_later(self, run: Run) -> bool:
        """Whether it is another run than the last that published, so that tables may have grown."""
        newest = self._model.seals.newest
        return newest is None or newest.run != run.id

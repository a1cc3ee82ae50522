"""Making the tables of a view, as a policy wants them, while cuts go on being applied to the model."""

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from deltasync.core.damage import DamagedRows
from deltasync.core.delivery import Delivery
from deltasync.core.policy import Policy
from deltasync.core.progress import Progress
from deltasync.core.seal import seal_of
from deltasync.core.words import counted
from deltasync.feeds.frozen_release import Head
from deltasync.feeds.model import Model
from deltasync.feeds.statistics import Amount, Backlog, total
from deltasync.storage.mapped_table import MappedTable
from deltasync.views.release_draft import new_release
from deltasync.views.store import NewestRelease, ViewState, ViewStore
from deltasync.views.table import ViewTable

# Rows copied at once on the model's thread; between two copies cuts may be applied.
_COPIED_ROWS = 1 << 16


class TableMaker:
    """Gives a view the tables that a policy follows. Used in the event loop, by one call at a time."""

    def __init__(self, model: Model, store: ViewStore) -> None:
        self._model = model
        self._store = store

    async def make(self, policy: Policy) -> None:
        """Have the tables that the policy follows. Those the view lacks are made, and go out whole as one release.

        Raises:
            InvalidInput: the policy cannot be kept with a table that has come since; the view is as it was.
            StorageFailed: there is no room; likewise.
        """
        try:
            await self._make(policy)
        finally:
            await asyncio.to_thread(self._store.remove_unused)

    async def _make(self, policy: Policy) -> None:
        sources = self._model.followed(policy)
        deliveries = [policy.delivery_of(source.spec) for source in sources]
        for each in deliveries:  # Of tables that came after the policy, too.
            each.check()
        state = self._store.state
        version = state.compared_version if state.head else self._model.position.number
        # What replicas held of the model before there was a policy need not be sent to them again.
        as_it_was = state.head is None and all(each == Delivery.unchanged(each.spec) for each in deliveries)
        number = version if as_it_was else state.head.number + 1 if state.head else version + 1
        # All of them are made first: where there is no room for one, nothing need be copied.
        tables = await asyncio.to_thread(self._found_or_made, sources, deliveries)
        grown = self._grown(tables)
        new = [table for table in tables if table not in state.tables and table not in grown]
        for table in new:
            await self._copy(table, None if as_it_was else number)
        await asyncio.to_thread(_flush, tables)
        after, release = await self._model.on_thread(self._installed, tables, grown, number, version)
        if new and any(seal.resync for seal in self._model.seals.after(after.compared_version)):
            # They may have rows of another run: beside older tables, or in part.
            after = replace(after, mixed=True)
        await asyncio.to_thread(self._store.install, after, replace(release, head=self._dated(release.head)))

    def _dated(self, head: Head) -> Head:
        """A head with its seal, and with the step and the times of its version, not of a later one that was
        applied meanwhile.
        """
        seal = seal_of(head.version, self._model.seals)
        dated = replace(Head.of(seal, head.number), version=head.version)
        return self._store.history.sealed(dated, seal)

    def _found_or_made(
        self, sources: Sequence[MappedTable], deliveries: Sequence[Delivery]
    ) -> tuple[ViewTable, ...]:
        tables = {table.delivery: table for table in self._store.state.tables if not table.source.removed}
        pairs = zip(deliveries, sources, strict=True)
        lacking = {delivery: source for delivery, source in pairs if delivery not in tables}
        tables |= {table.delivery: table for table in self._store.make_tables(lacking)}
        return tuple(tables[each] for each in deliveries)

    def _grown(self, tables: Iterable[ViewTable]) -> dict[ViewTable, ViewTable]:
        """Which of the tables take the place of which, that have room for fewer rows."""
        pairs = ((each, self._store.smaller(each.delivery)) for each in tables)
        return {each: smaller for each, smaller in pairs if smaller}

    async def _copy(self, table: ViewTable, number: int | None) -> None:
        ids = await self._model.on_thread(table.changed_since, 0)
        what = f"consumer {self._store.consumer!r}: copying table {table.source.spec.name!r}"
        progress = Progress(what, len(ids))
        for start in range(0, len(ids), _COPIED_ROWS):
            progress.at(start)
            try:
                await self._model.on_thread(table.copy, ids[start : start + _COPIED_ROWS], number)
            except DamagedRows as error:
                self._model.damage.note(error)  # So that they are mended.
                raise

    def _installed(
        self, tables: tuple[ViewTable, ...], grown: Mapping[ViewTable, ViewTable], number: int, version: int
    ) -> tuple[ViewState, NewestRelease]:
        """The state with these tables, of which new ones were copied at `version` or later, and its release.

        Some of them are `grown`: in the place of others, which had fewer rows.
        """
        seal, before = self._model.applied, self._store.state
        if seal is None:
            raise RuntimeError("a view is made of a model of which nothing is published")
        if before.head is None:
            self._store.history.first_version, number = version, max(number, seal.version)
        version = min([version, *(table.follow(earlier) for table, earlier in grown.items())])
        copied = [table for table in tables if table not in before.tables and table not in grown]
        for table in copied:
            at = table.source.removed_before
            table.sent.removed_before = number - 1 if at and before.head else at
        for table, earlier in grown.items():
            table.sent.removed_before = earlier.sent.removed_before
        taken, reason = _taken(copied)
        backlog = {table.source.spec.name: _backlog(table, before, grown) for table in tables}
        left = total(each.amount for each in backlog.values())
        mixed = bool(copied) and seal.version != version and any(not t.source.spec.kind.ranked for t in tables)
        after = replace(before, tables=tables, compared_version=version, backlog=backlog, mixed=mixed)
        made_of = max(version, before.head.version) if before.head else version
        head = replace(Head.of(seal, number), version=made_of)
        return after, new_release(head, taken, left, reason)


def _taken(tables: Sequence[ViewTable]) -> tuple[Amount, str]:
    """What a release takes that has these tables whole, and why."""
    taken = total(_whole(table) for table in tables)
    what = f"{counted(taken.rows, 'row')} of {counted(len(tables), 'table')}"
    reason = f"took all of {what} that the replicas did not have in this form"
    return taken, reason


def _whole(table: ViewTable) -> Amount:
    rows = table.sent.counts.changed
    return Amount(rows, rows * table.sent.spec.row_bytes, table.source.norm)


def _backlog(table: ViewTable, before: ViewState, grown: Mapping[ViewTable, ViewTable]) -> Backlog:
    """What is left of a table; nothing of one that is new."""
    source = table.source
    known = before.backlog.get(source.spec.name) if grown.get(table, table) in before.tables else None
    # After a restart it is only known which rows are dirty.
    dirty = len(table.dirty)
    return known or Backlog(Amount(dirty, dirty * table.sent.spec.row_bytes), source.norm)


def _flush(tables: Sequence[ViewTable]) -> None:
    for table in tables:
        table.flush()

"""Making one release, in steps, so that nothing waits for a disk where cuts are applied:

    look     on the model's thread, in blocks, where much has changed: compare it with what replicas hold
    draw     on the model's thread: find the dirty rows, pick some, copy them, encoded, for the log
    settle   elsewhere: wait until the log has them, and write down that there is a release of them
    apply    on the model's thread: write them into the view, which makes the release visible

Cuts may be applied in between. What they change is dirty for the next release, since it is stamped with a later
version than the one at which the rows were drawn.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from deltasync.core.damage import DamagedRows
from deltasync.core.id_sets import members
from deltasync.core.policy import Policy
from deltasync.core.progress import Progress
from deltasync.core.tables import TableKind
from deltasync.feeds.damage import IdsByTable, without
from deltasync.feeds.frozen_release import FrozenRelease, Head
from deltasync.feeds.model import Model
from deltasync.feeds.releases import Releases
from deltasync.views.ranking import DirtyRows
from deltasync.views.release_draft import ReleaseDraft, draw
from deltasync.views.release_log import ReleaseLog
from deltasync.views.sound_rows import pick_sound
from deltasync.views.store import ViewState, ViewStore
from deltasync.views.table import Look, ViewTable

# Rows compared at once on the model's thread; between two such blocks cuts may be applied.
_LOOKED_ROWS = 1 << 19


class ReleaseMaker:
    """Makes the releases of one view. Used in the event loop, by one call at a time."""

    def __init__(self, model: Model, store: ViewStore, releases: Releases, scratch: Path) -> None:
        self._model = model
        self._store = store
        self._releases = releases
        self._scratch = scratch
        self._logged: tuple[ReleaseDraft, ViewState] | None = None  # Its rows are in the log.

    async def make(self, policy: Policy, overdue_version: int, wanted: Callable[[], bool] = lambda: True) -> bool:
        """Make the next release, if it is `wanted` still as its rows are drawn, which is asked on the model's
        thread. Rows that are dirty since `overdue_version` or before are overdue.

        Returns:
            Whether rows were drawn, though there may have been none that were dirty.

        Raises:
            StorageFailed: not all of it could be written. Rows that were not written are still dirty; if only the
                release itself could not be written down, `finish` does that before anything else.
            DamagedRows: some of the model's rows that are to go do not fit their digests; nothing was released.
                Others that do not are still dirty.
        """
        await self.finish()
        await self._look_ahead()
        draft = await self._drawn(policy, overdue_version, wanted)
        if draft is None:
            return False
        state, failure = await asyncio.to_thread(draft.settle, self._store.state)
        self._logged = draft, state
        await self.finish()
        if failure:
            raise failure
        return True

    async def finish(self) -> None:
        """Write down the release whose rows are in the log, if there is one, and make it visible.

        Raises:
            StorageFailed: it could not be written down; nothing of it is visible.
        """
        if self._logged is None:
            return
        draft, state = self._logged
        new = state.head != self._store.state.head
        if state.newest and new and not draft.log.complete:
            await asyncio.to_thread(self._store.write_release, state.newest)
        release = await self._model.on_thread(self._apply, draft, state, self._releases.followed)
        if new:
            self._releases.have(release, draft.head.number, once=True)
        self._logged = None

    async def _look_ahead(self) -> None:
        """Look beforehand where much has changed, in blocks between which cuts may be applied. Drawing then looks
        at what these have changed, and so finds all that is dirty at one version.
        """
        state = self._store.state
        for table in state.tables if state.head else ():
            if table.to_compare(state.compared_version) > _LOOKED_ROWS:
                look = await self._model.on_thread(self._begin, table, state.compared_version)
                name = table.source.spec.name
                progress = Progress(f"consumer {self._store.consumer!r}: comparing table {name!r}", look.rows)
                while look.done < look.rows:
                    await self._model.on_thread(look.advance, _LOOKED_ROWS)
                    progress.at(look.done)
                await self._model.on_thread(table.finish, look)

    async def _drawn(
        self, policy: Policy, overdue_version: int, wanted: Callable[[], bool]
    ) -> ReleaseDraft | None:
        """A release without rows that are damaged, also if that is only found as they are read."""
        while True:
            resync, known = self._resyncs, self._model.damage.rows
            try:
                return await self._model.on_thread(self._draw, policy, overdue_version, known, resync, wanted)
            except DamagedRows as error:
                self._model.damage.note(error)  # So that they are mended.
                if resync or not without({error.table: error.ids}, known):
                    raise

    @property
    def _resyncs(self) -> bool:
        """Whether another run has begun, whose rows do not fit those of the run before: all go together."""
        return any(seal.resync for seal in self._model.seals.after(self._store.state.compared_version))

    def _begin(self, table: ViewTable, compared_version: int) -> Look:
        _ = self._model.applied  # Raises while a version is there in part: the table is then at none.
        return table.begin(compared_version)

    def _draw(
        self,
        policy: Policy,
        overdue_version: int,
        damage: IdsByTable,
        resync: bool,
        wanted: Callable[[], bool],
    ) -> ReleaseDraft | None:
        seal, state = self._model.applied, self._store.state
        if seal is None or state.head is None or not wanted():
            return None
        # The newest cut may be applied before the event loop knows of its seal.
        if resync or (seal.resync and seal.version > state.compared_version):
            policy, damage = replace(policy, top_k=None, top_k_per_table=False, max_bytes=None), {}
        dirty = find_dirty(state.tables, state.compared_version, overdue_version)
        dirty, picked = pick_sound(state.tables, dirty, damage, policy)
        head = self._store.history.sealed(Head.of(seal, state.head.number + 1), seal)
        log = ReleaseLog(self._store, head.number)
        try:
            return draw(state.tables, dirty, picked, head, log, self._scratch)
        except DamagedRows:
            for table in state.tables:
                table.look_again()
            raise

    def _apply(self, draft: ReleaseDraft, state: ViewState, followed: bool) -> FrozenRelease | None:
        """Write a release into the tables; where replicas follow, what they are to be sent of it."""
        prepared = self._releases.prepared(draft.sent_rows()) if followed and draft.written else None
        for piece in draft.written:
            draft.tables[piece.slot].table.write(piece.rows, draft.head.number)
        for each in draft.tables:
            each.table.settle(each.taken_ids)
        self._store.advance(state)
        return prepared and self._releases.completed(prepared)


def find_dirty(tables: Sequence[ViewTable], compared_version: int, overdue_version: int) -> list[DirtyRows]:
    """The dirty rows of every table, on the model's thread.

    Args:
        tables: the tables of a view.
        compared_version: the version at which they were last compared with the model's.
        overdue_version: rows that are dirty since this version or before are overdue.
    """
    found = []
    for table in tables:
        dirty, ranked = table.find_dirty(compared_version), table.source.spec.kind.ranked
        forced = dirty.deleted | members(dirty.ids, table.damaged) if ranked else np.ones(len(dirty), np.bool_)
        overdue, row_bytes = dirty.since <= overdue_version, table.sent.spec.row_bytes
        found.append(DirtyRows(dirty.ids, dirty.norms, dirty.never_sent, overdue, forced, row_bytes))
    _force_handed_over(tables, found, compared_version)
    return found


def _force_handed_over(tables: Sequence[ViewTable], dirty: Sequence[DirtyRows], compared_version: int) -> None:
    """Force the rows whose raw id has changed: else a replica would look the new id up in the old one's row.

    Also where the view has the new id already, since the map was made after the rows were last compared.
    """
    by_name = {table.source.spec.name: each for table, each in zip(tables, dirty, strict=True)}
    for table, handed_over in zip(tables, dirty, strict=True):
        rows = by_name.get(table.source.spec.of)
        if table.source.spec.kind is TableKind.ID_MAP and rows:
            for changed in (handed_over.ids, table.changed_since(compared_version)):
                np.logical_or(rows.forced, members(rows.ids, changed), out=rows.forced)

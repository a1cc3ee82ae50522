"""A consumer's view: what its replicas hold of a model, and what they can be given of it."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from deltasync.core.delivery import Delivery
from deltasync.core.errors import InvalidInput, StorageFailed
from deltasync.core.policy import Policy
from deltasync.core.position import NOWHERE, Decision, Position, is_discarded, line_of, resume
from deltasync.core.rows import Ids
from deltasync.core.signals import Signal
from deltasync.core.stamps import StampedTable
from deltasync.core.steady_clock import Moment, steady_ns
from deltasync.core.threads import EVENT_LOOP, confined, not_shared_yet
from deltasync.feeds.damage import Damage, IdsByTable, joined
from deltasync.feeds.frozen_release import FrozenRelease, Head
from deltasync.feeds.model import Model
from deltasync.feeds.releases import Releases
from deltasync.feeds.repair import NO_REPAIR, Repair
from deltasync.feeds.standing import Standing, TableStanding
from deltasync.storage.mapped_table import MappedTable
from deltasync.storage.pin import Pin
from deltasync.views.pacing import LONGEST_SECONDS
from deltasync.views.release_maker import ReleaseMaker
from deltasync.views.store import ViewState, ViewStore
from deltasync.views.table import ViewTable
from deltasync.views.table_maker import TableMaker

# Compared with the model's at once on its thread; between two of them cuts may be applied.
_COMPARED_ROWS = 1 << 16


@confined(trouble=EVENT_LOOP, failure=EVENT_LOOP, lost=EVENT_LOOP)
class View:
    """What the replicas of one consumer are fed from. The text of the package says which thread may touch what.

    Attributes:
        model: the model it is a view of.
        trouble: why it does not have the tables that the policy wants; empty if it does.
        failure: what keeps releases from being made, which is tried again; empty if nothing does.
        damage: rows of which what is held does not fit the digests.
        lost: how many dirty rows were found since the last release that were not known to be dirty.
    """

    def __init__(self, consumer: str, model: Model, directory: Path) -> None:
        self.model = model
        self.trouble = ""
        self.failure = ""
        self.lost = 0
        self.damage = Damage(self._mapped, model.on_thread, self._mend, lambda: self.position.number)
        self._store = ViewStore(consumer, model, directory)
        self._tables = TableMaker(model, self._store)
        self._releases = Releases(model.on_thread, self._freezable, directory)
        self._maker = ReleaseMaker(model, self._store, self._releases, directory)
        self._signal = Signal()
        # Held where other tables are made: of these, the log has not all rows. Also while files are to stay.
        self.making_tables = asyncio.Lock()

    @property
    def state(self) -> ViewState:
        """Where it is now. The state that is returned does not change; the view goes on to another."""
        return self._store.state

    # What a replica's stream asks for, of a model as well.

    @property
    def history(self) -> str:
        """The id of the view's history."""
        return self._store.history.id

    @property
    def model_history(self) -> str:
        """The id of the history of the view's model."""
        return self.model.history

    @property
    def tables(self) -> list[StampedTable]:
        """What replicas are sent; a table's index is its slot. Empty until something is published."""
        return [table.sent for table in self.state.tables]

    @property
    def deliveries(self) -> list[Delivery]:
        """What replicas are sent of each table, by slot."""
        return [table.delivery for table in self.state.tables]

    @property
    def position(self) -> Position:
        """What a replica that has every release holds."""
        head = self.state.head
        return Position(self.history, head.number, head.seal) if head else Position(self.history)

    def release(self, after: int, repair: Repair = NO_REPAIR) -> "asyncio.Future[FrozenRelease]":
        """What a replica at number `after` lacks, and what is to be repaired."""
        task = self._releases.get(after, repair, self.position.number)
        task.add_done_callback(self.damage.note_failure)
        return task

    def changed(self) -> Coroutine[None, None, Literal[True]]:
        """To be awaited: a new head, other tables or trouble, from this call on."""
        return self._signal.changed()

    def resume(self, held: Position, acknowledged: Position = NOWHERE) -> tuple[Decision, Position]:
        """Whether a replica that holds `held` can go on from there, and what that position is in this history.

        `acknowledged` is its offset.
        """
        history, model = self._store.history, self.model
        sealed = model.seal_of(held.number)
        of_model = resume(held, model.history, history.first_version, sealed, acknowledged=acknowledged)
        return history.resume(held, self.position.number, of_model, acknowledged)

    def discards(self, held: Position, version: Position) -> bool:
        """Whether what a replica holds is of a discarded past, or the model's version that it was made of."""
        ours = line_of(held.history) == line_of(self.history)
        if ours and is_discarded(held, self.history, self.position.number, self.seal_of(held.number)):
            return True
        return self.model.discards(held, version)

    def model_position(self, version: int) -> Position:
        """A version as a position of the model's history, with its seal where that is known."""
        return self.model.model_position(version)

    def seal_of(self, number: int) -> int:
        """The checksum of a release's seal; 0 where it is not known."""
        return self._store.history.seal_of(number)

    def version_of(self, number: int) -> int:
        """The version of the rows that a replica at `number` holds, as far as it is known."""
        return self._version_at(self.state, number)

    def behind_ns(self, number: int, policy: Policy) -> int:
        """For how long a replica at `number` has not held the newest that the policy lets out, nanoseconds.

        Either there is a later release, or one is due, of a later version or of rows that are left, though it may
        not be made yet: none is while no replica is connected. `FOREVER_NS` or more where that is not known.
        """
        now_ns, succession = steady_ns(), self._store.history.succession
        later_release_ns, age_ns = succession.behind_ns(number, now_ns), succession.age_ns(number, now_ns)
        later_version_ns = self.model.behind_ns(self.version_of(number), policy)
        due_ns = min(later_version_ns, _beyond(policy.min_interval_seconds, age_ns))
        if number == self.position.number and self.state.backlog_rows:
            due_ns = max(due_ns, _beyond(max(policy.min_interval_seconds, LONGEST_SECONDS), age_ns))
        return max(later_release_ns, due_ns)

    def outdated(self, number: int) -> Moment | None:
        """When the version was sealed that comes after the one of which release `number` was made, or None."""
        return self.model.outdated(self.version_of(number))

    @property
    def released(self) -> Moment | None:
        """When the newest release was made; None before the first one."""
        newest = self.state.newest
        if newest is None:
            return None
        return Moment(newest.statistics.made_unix_ns, self._store.history.succession.since_ns(newest.head.number))

    def event_time_of(self, version: int) -> int | None:
        """The time of the newest event that the model had been trained on at a version, or None."""
        return self.model.event_time_of(version)

    def _version_at(self, state: ViewState, number: int) -> int:
        if state.head and number == state.head.number:
            # After a restart, rows are compared from an earlier version on than that of the newest release.
            return max(state.compared_version, state.head.version)
        return self._store.history.version_of(number)

    def may_serve(self, policy: Policy) -> bool:
        """Whether replicas may be given the tables there are: those of the policy or, where these cannot be made,
        older ones of its mode.
        """
        if not self.tables or self.state.mixed:
            return False
        return self.fits(policy) or (
            bool(self.trouble) and all(each.mode is policy.mode for each in self.deliveries)
        )

    @property
    def has_removed(self) -> bool:
        """Whether it has a table that its model has no more."""
        return any(table.source.removed for table in self.state.tables)

    def fits(self, policy: Policy) -> bool:
        """Whether it has the tables that the policy follows, in the form that the policy wants."""
        if self.has_removed:
            return False
        return self.deliveries == [policy.delivery_of(table.spec) for table in self.model.followed(policy)]

    def standing(self, policy: Policy) -> Standing:
        """Where the view stands. Until its first release, which waits for a replica, it is where the model is."""
        state, of_model = self.state, self.model.standing(policy)
        standing = replace(
            of_model,
            history=self.history,
            newest_release=state.head.number if state.head else 0,
            trouble=self.trouble,
            crowded=self._releases.crowded,
            failure=self.failure or of_model.failure or self.damage.in_words("the next release replaces them"),
        )
        if state.newest is None:
            return standing
        return replace(
            standing,
            tables=partial(_tables, state, self.model, policy),
            version_of=partial(self._version_at, state),
            seal_of=self._store.history.seal_of,
            release=state.newest.statistics,
            released=self.released,
            compared=state.compared_version == self.model.position.number,
        )

    # Moving on: one call at a time.

    async def prepare(self, policy: Policy) -> None:
        """Have the tables that the policy follows, in the form that it wants. Those it lacks are made, whole.

        Raises:
            InvalidInput: the policy cannot be kept with a table that has come since; the view is as it was.
            StorageFailed: there is no room; likewise.
        """
        async with self.making_tables:
            await self._prepare(policy)

    async def _prepare(self, policy: Policy) -> None:
        try:
            if self.model.head and not self.fits(policy):
                await self._maker.finish()  # So that its number is not used twice.
                await self._tables.make(policy)
                self._signal.wake()
            if self.state.mixed:  # Cuts were applied while tables were made.
                await self._maker.make(policy, 0)
                self._signal.wake()
        except (InvalidInput, StorageFailed) as error:
            self.trouble = str(error)
            self._signal.wake()
            raise
        self.trouble = ""

    async def make_release(
        self, policy: Policy, overdue_version: int, wanted: Callable[[], bool] = lambda: True
    ) -> None:
        """Make the next release, by the policy, if it is `wanted` still when its rows are drawn, on the model's
        thread; rows dirty since `overdue_version` or before are overdue.

        Raises:
            StorageFailed: not all of it could be written; rows that were not are still dirty.
        """
        lost = self.lost
        try:
            if await self._maker.make(policy, overdue_version, wanted):
                self.lost -= lost  # Not those that were found meanwhile.
            await self.damage.mend()
        finally:
            self._signal.wake()

    async def find_lost(self) -> IdsByTable:
        """Compare all rows that are not dirty with the model's. Those that differ are dirty from here on.

        The disk has lost that they were. They are told as those with another stamp, and go with the next release.
        """
        found: IdsByTable = {}
        for table in self.state.tables:
            for first in range(0, table.delivery.spec.rows, _COMPARED_ROWS):
                ids = await self.model.on_thread(self._find_lost, table, first)
                found = joined(found, {table.held.spec.name: ids}) if len(ids) else found
        self.damage.restamped = joined(self.damage.restamped, found)
        if found:
            self.lost += sum(map(len, found.values()))
            self.model.signal.wake()
        return found

    @property
    def spilled_bytes(self) -> int:
        """Bytes of releases in files."""
        return self._releases.spilled_bytes

    def drop_newest(self) -> None:
        """Keep no release in memory that no replica uses: none is connected."""
        self._releases.drop_newest()

    # On disk; these block, on any thread.

    def recover(self, record: Mapping[str, Any]) -> None:
        """Come back as of the last flush, which left `record`, and the log after it. Before any other use.

        Raises:
            StorageFailed: a file is damaged or missing.
        """
        with not_shared_yet():
            self._store.recover(record)

    def should_flush(self, flush_bytes: int) -> bool:
        """Whether the log holds so many bytes of its releases."""
        return self._store.should_flush(flush_bytes)

    def flush(self) -> bool:
        """Put it on disk and drop its rows from the log; whether there was anything to flush.

        Raises:
            StorageFailed: the log could not be written; nothing was lost.
        """
        return self._store.flush()

    def record(self) -> dict[str, Any]:
        """What is written down of it as it is now. On the model's thread."""
        return self._store.record(self.state, self.state.head.number if self.state.head else 0)

    @property
    def pin(self) -> Pin:
        """See `ViewStore`."""
        return self._store.pin

    def cut_log(self, number: int) -> None:
        """See `ViewStore`."""
        self._store.cut_log(number)

    def discard(self) -> None:
        """Remove everything there is of it."""
        self._store.discard()

    async def _mend(self, rows: IdsByTable) -> IdsByTable:
        """Mend rows, as far as it is known what they were. The rest goes with the next release, due at once."""
        if not rows:
            return rows
        left: IdsByTable = await self.model.on_thread(self._mend_tables, rows)
        self.model.signal.wake()
        return left

    # On the model's thread.

    def _mapped(self) -> list[MappedTable]:
        return [mapped for table in self.state.tables for mapped in table.mapped]

    def _find_lost(self, table: ViewTable, first: int) -> Ids:
        if table not in self.state.tables:  # Others were made meanwhile.
            return np.empty(0, np.int64)
        return table.find_lost(first, first + _COMPARED_ROWS, self.state.compared_version)

    def _mend_tables(self, rows: IdsByTable) -> IdsByTable:
        version = self.state.compared_version
        by_name = {table.held.spec.name: table for table in self.state.tables if table.held.spec.name in rows}
        left = {name: table.mend(rows[name], version) for name, table in by_name.items()}
        return {name: ids for name, ids in left.items() if len(ids)}

    def _freezable(self) -> tuple[list[StampedTable], Head | None]:
        """What replicas can be given, as it is at one moment."""
        state = self.state
        return [table.sent for table in state.tables], state.head


def _beyond(seconds: float, age_ns: int) -> int:
    """By how much an age is more than so many seconds, nanoseconds."""
    return max(0, age_ns - int(seconds * 1e9))


def _tables(state: ViewState, model: Model, policy: Policy) -> list[TableStanding]:
    held = {table.delivery.spec.name for table in state.tables}
    missing = [table for table in model.followed(policy) if table.spec.name not in held]
    return [*(_held(table, state) for table in state.tables), *(_missing(table, policy) for table in missing)]


def _held(table: ViewTable, state: ViewState) -> TableStanding:
    return TableStanding(
        table.delivery.spec,
        table.sent.spec.row_bytes,
        partial(table.lacking, compared_version=state.compared_version),
        state.backlog.get(table.delivery.spec.name),
    )


def _missing(table: StampedTable, policy: Policy) -> TableStanding:
    """A table that the view is still to get: its replicas lack all there is of it."""
    return TableStanding(table.spec, policy.row_bytes(table.spec), lambda _: table.counts.changed)

"""One model: its tables, its part of the log, and how both come back after a restart.

Threads. A model has a thread of its own (`on_thread`), on which cuts are applied and releases frozen, so that
neither sees the other half done; nothing there waits for a disk. All else happens in the event loop.

    the model's thread    `applied`; rows, stamps and digests of the tables
    the event loop        `seals`, `succession`, `published`, `signal`, `failure`
    set by the loop, and replaced whole, so that every thread may read it: `head`
    any thread            `name`, `log`; `tables`, which `store` replaces whole; `store`, whose methods block
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from deltasync.core.cut_times import RecentCuts
from deltasync.core.delivery import Delivery
from deltasync.core.errors import ServiceUnavailable
from deltasync.core.futures import after
from deltasync.core.policy import Policy
from deltasync.core.position import NOWHERE, Decision, Position, is_discarded, line_of, resume
from deltasync.core.progress import Progress
from deltasync.core.rows import RowBatch
from deltasync.core.seal import Seal, SealHistory, checksum_of, event_time_of, seal_of
from deltasync.core.signals import Signal
from deltasync.core.steady_clock import Moment, Succession, steady_ns
from deltasync.core.tables import Shard, TableSpec
from deltasync.core.threads import EVENT_LOOP, MODEL_PREFIX, MODEL_THREAD, SET_BY_EVENT_LOOP, confined
from deltasync.feeds.cut_rows import cut_rows
from deltasync.feeds.damage import FROM_TRAINERS, Damage, IdsByTable
from deltasync.feeds.followed_tables import FollowedTables
from deltasync.feeds.frozen_release import FrozenRelease, Head
from deltasync.feeds.log_mender import LogMender
from deltasync.feeds.published import published_rows
from deltasync.feeds.releases import Releases
from deltasync.feeds.repair import NO_REPAIR, Repair
from deltasync.feeds.standing import Standing, table_standing
from deltasync.feeds.table_changes import changes
from deltasync.storage.log_store import LogStore
from deltasync.storage.mapped_table import MappedTable
from deltasync.storage.model_store import KEPT_SEALS, ModelStore

T = TypeVar("T")


@confined(
    seals=EVENT_LOOP,
    published=EVENT_LOOP,
    failure=EVENT_LOOP,
    succession=EVENT_LOOP,
    head=SET_BY_EVENT_LOOP,
    _deliveries=EVENT_LOOP,
    _applied=MODEL_THREAD,
    _partly_applied=MODEL_THREAD,
)
class Model:
    """A training job's set of tables. The module's text says which thread may touch what.

    Attributes:
        name: the model's name.
        log: what it, and its consumers, are written down in.
        store: the model's files and records.
        head: the newest version that replicas can be sent, or None.
        seals: those of the last durable cuts, which may not be applied yet.
        succession: when each version became the newest, since the service started.
        published: how many rows of each table were published, by the table's name: all that it had at the time.
        signal: wakes who waits for the head to move, or for a table.
        failure: what keeps cuts from being sealed or applied, which is tried again; empty if nothing does.
        recent: how long each part of the way of the last cuts took.
        damage: rows of the tables that do not fit their digests.
        releases: what replicas are sent of the tables.
    """

    def __init__(self, name: str, log: LogStore, directory: Path) -> None:
        self.name, self.log = name, log
        self.store = ModelStore(log, name, directory)
        self.seals = SealHistory(maxlen=KEPT_SEALS)
        self.succession = Succession()
        self.head: Head | None = None
        self.published: dict[str, int] = {}
        self.signal, self.failure = Signal(), ""
        self.recent = RecentCuts()
        self._deliveries: list[Delivery] = []
        self._followed = FollowedTables()
        self._adding, self._closed = asyncio.Lock(), False
        self._applied: Seal | None = None
        self._partly_applied = False
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{MODEL_PREFIX}{name}")
        self.damage = Damage(
            lambda: self.tables, self.on_thread, self._mend, lambda: self._applied.version if self._applied else 0
        )
        self._mender = LogMender(self.store, self.on_thread)
        self.releases = Releases(self.on_thread, lambda: (list(self.tables), _head(self.applied)), directory)

    @property
    def history(self) -> str:
        """The id made when the model's log was created."""
        return self.store.history

    @property
    def model_history(self) -> str:
        """The same: as a feed, a model has no other history."""
        return self.history

    @property
    def tables(self) -> list[MappedTable]:
        """The tables, in the order they were added; a table's index is its slot."""
        return self.store.tables

    @property
    def deliveries(self) -> list[Delivery]:
        """What the tables are to replicas of a consumer without a policy."""
        specs = [table.spec for table in self.tables]
        # Every replica looks at them with every release: of those that are there, two lists are soon compared.
        if specs != [each.spec for each in self._deliveries]:
            self._deliveries = [Delivery.unchanged(spec) for spec in specs]
        return self._deliveries

    @property
    def applied(self) -> Seal | None:
        """The cut the tables are at; None before the first one. On the model's thread.

        Raises:
            ServiceUnavailable: they are at none, since one could be applied only in part: nobody may see that.
        """
        if self._partly_applied:
            raise ServiceUnavailable(f"a part of a version of model {self.name!r} is to be applied again")
        return self._applied

    @property
    def position(self) -> Position:
        """What a replica that has everything holds."""
        return Position(self.history, self.head.number, self.head.seal) if self.head else Position(self.history)

    async def recover(self, record: Mapping[str, Any]) -> None:
        """Come back as of the last sealed cut: the flushed tables, and the log after them.

        Raises:
            StorageFailed: a file is damaged or missing.
        """
        seals, published = await self.on_thread(self._recover, record)
        self.seals.extend(seals)
        self.succession.find(self.seals.newest_version, steady_ns())
        self.head, self.published = _head(self.seals.newest), published

    async def stop(self) -> None:
        """Stop the thread: nothing is applied any more."""
        async with self._adding:
            self._closed = True
            await self._mender.close()
            await asyncio.to_thread(self._thread.shutdown)

    async def close(self) -> None:
        """Flush the tables and stop the thread."""
        await self.stop()
        await asyncio.to_thread(self.flush)
        await asyncio.to_thread(self.store.remove_unused)

    async def on_thread(self, function: Callable[..., T], *args: object) -> T:
        """Run `function`, which must not wait for anything, on the model's thread, after what was asked of it
        before.

        Raises:
            ServiceUnavailable: the model is stopped, because another process takes it or the service ends.
        """
        try:
            running = self._thread.submit(function, *args)
        except RuntimeError as error:  # Its executor is shut down.
            raise ServiceUnavailable(f"model {self.name!r} is stopped in this process; try again") from error
        return await asyncio.wrap_future(running)

    async def add_tables(self, tables: list[TableSpec], *, later_run: bool = False) -> None:
        """Make sure that the model has these tables. Those it lacks are made, all zero.

        In a later run than the last those may have more rows, zeros at first.

        Raises:
            Contradiction: a table exists and has more rows, or is something else; nothing was changed.
            StorageFailed: there is no room for them; nothing was changed.
            ServiceUnavailable: the service is shutting down.
        """
        if self._changes(tables, later_run):
            # In a task of its own: a rank that disconnects now must not stop it half way.
            await asyncio.shield(asyncio.create_task(self._add(tables, later_run)))

    async def remove_table(self, name: str) -> None:
        """Have one of the tables no more, between cuts and while no rank publishes it.

        Raises:
            StorageFailed: that could not be written down; nothing was changed.
        """
        async with self._adding:
            if self._closed:
                raise ServiceUnavailable("the service is shutting down; reconnect")
            await asyncio.to_thread(self.flush)  # From here on the log has no rows of it.
            gone = await asyncio.to_thread(self.store.remove, name, self.position.number)
            gone.removed, self.store.tables = True, [each for each in self.tables if each is not gone]  # At once.
            self.published.pop(name, None)
            self.damage.forget(name)
            self.releases.forget()
            self.signal.wake()
            await self.on_thread(lambda: None)  # What was begun with the table is done.
            await asyncio.to_thread(self.store.remove_unused)

    def apply_after(
        self, sealed: "Future[None]", seal: Seal, rows: Sequence[RowBatch] | None
    ) -> "Future[FrozenRelease | None]":
        """Begin to apply a cut as soon as `sealed` is done, unless it has failed, without a way round by the event
        loop; returns what `apply_cut` then waits for.

        The loop has to wait for `sealed` before: so it knows of the seal before it hears from whatever has seen it
        applied. What it has asked of the thread by then may see it applied.
        """
        prepared = self._thread.submit(self._prepared, seal, rows)  # While the log waits for its disk.
        return after(sealed, self._thread, lambda: self._apply_and_release(seal, rows, prepared.result()))

    async def apply_cut(
        self, seal: Seal, rows: Sequence[RowBatch] | None, begun: "Future[FrozenRelease | None] | None" = None
    ) -> None:
        """Apply a cut that was just sealed, from `rows` or else from the log, and make it the head.

        `begun` is what `apply_after` has returned.
        """
        self.succession.add(seal.version, steady_ns())  # Also if it cannot be applied for a while.
        if begun:
            release = begun.result() if begun.done() else await asyncio.wrap_future(begun)
        else:
            release = await self.on_thread(self._apply_and_release, seal, rows)
        if damaged := self.damage.rows:
            self.damage.note_mended(await self.on_thread(self._mender.mended_by, seal.version, damaged))
        self.head = _head(seal)
        self.releases.have(release, seal.version)
        self.signal.wake()

    def may_serve(self, _policy: Policy) -> bool:
        """Whether it has tables: replicas read them as they are."""
        return bool(self.tables)

    def release(self, after: int, repair: Repair = NO_REPAIR) -> asyncio.Future[FrozenRelease]:
        """What a replica at version `after` lacks, and what is to be repaired."""
        task = self.releases.get(after, repair, self.position.number)
        task.add_done_callback(self.damage.note_failure)
        return task

    def version_of(self, version: int) -> int:
        """The version that a position of this history stands for."""
        return version

    def behind_ns(self, version: int, _policy: Policy) -> int:
        """For how long a version has not been the newest, nanoseconds; `FOREVER_NS` where that is not known."""
        return self.succession.behind_ns(version, steady_ns())

    def sealed_at(self, version: int) -> Moment:
        """When a version was sealed; of one whose seal is no longer kept, the oldest that is."""
        return Moment(seal_of(version, self.seals).sealed_unix_ns, self.succession.since_ns(version))

    def outdated(self, version: int) -> Moment | None:
        """When the version after this one was sealed; None if there is none."""
        return self.sealed_at(version + 1) if version < self.seals.newest_version else None

    def event_time_of(self, version: int) -> int | None:
        """The time of the newest event that it had been trained on at a version; None where it is not known."""
        return event_time_of(version, self.seals)

    def resume(self, held: Position, acknowledged: Position = NOWHERE) -> tuple[Decision, Position]:
        """Whether a replica that holds `held` can go on from there, and what that is in this history.

        `acknowledged` is its offset.
        """
        head, seal = self.position.number, self.seal_of(held.number)
        decision = resume(held, self.history, head, seal, acknowledged=acknowledged)
        return decision, Position(self.history, held.number, held.seal) if decision.yes else Position(self.history)

    def discards(self, held: Position, version: Position) -> bool:
        """Whether what a replica holds is of a discarded past."""
        if not version.number and line_of(held.history) != line_of(self.history):
            return False  # It may be of a view that is no more.
        at = version if version.number else held
        return is_discarded(at, self.history, self.position.number, self.seal_of(at.number))

    def model_position(self, version: int) -> Position:
        """A version as a position of the history, with its seal where that is known."""
        return Position(self.history, version, self.seal_of(version))

    def seal_of(self, version: int) -> int:
        """The checksum of a version's seal; 0 where it is not known."""
        return self.seals.checksum_of(version)

    def changed(self) -> Coroutine[None, None, Literal[True]]:
        """To be awaited: the head moving, or a table being added, from this call on."""
        return self.signal.changed()

    def followed(self, policy: Policy) -> Sequence[MappedTable]:
        """The tables that a policy follows."""
        return self._followed.of(policy, self.tables)

    def standing(self, policy: Policy) -> Standing:
        """Where the model stands, to a consumer with this policy that reads its tables as they are."""
        tables, newest = self.followed(policy), self.seals.newest_version
        names = {each.spec.name for each in tables}
        return Standing(
            history=self.history,
            seals=self.seals.frozen(),
            tables=lambda: [table_standing(each, newest, policy) for each in tables],
            version_of=lambda version: version,
            seconds_since=partial(self.succession.seconds_since, now_ns=steady_ns()),
            seal_of=partial(checksum_of, self.seals.frozen()),
            failure=self.failure or self.damage.in_words(FROM_TRAINERS, names),
            crowded=self.releases.crowded,
            unpublished="" if self.head else f"nothing of model {self.name!r} is published",
        )

    def flush(self) -> bool:
        """Put the tables as of the head on disk and drop the log up to there; whether there was anything to flush.
        Blocks; any thread.

        Raises:
            StorageFailed: the log could not be written; nothing was lost.
        """
        return self.store.flush(self.position.number)

    def should_flush(self, flush_bytes: int) -> bool:
        """Whether the log holds `flush_bytes`, or half of the seals that are kept, more than the tables' files."""
        unflushed = self.seals.after(self.store.flushed)
        return sum(seal.log_bytes for seal in unflushed) >= flush_bytes or len(unflushed) >= KEPT_SEALS // 2

    def _recover(self, record: Mapping[str, Any]) -> tuple[list[Seal], dict[str, int]]:
        """What there was, on the model's thread: the seals, and how many rows of tables were published."""
        self.store.recover(record)
        seals = SealHistory(self.store.seals())
        self.store.drop_unsealed(seals.newest_version)
        unflushed = seals.after(self.store.flushed)
        progress = Progress(f"model {self.name!r}: reading the log", sum(seal.rows for seal in unflushed))
        columns = [table.columns for table in self.tables]
        for seal in unflushed:
            self._apply(seal, None)
            progress.add(seal.rows)
        for table, before in zip(self.tables, columns, strict=True):
            if table.columns != before:
                # Rows in the files may be newer than the digests that were split, in columns that no cut has
                # brought again: what is missing to the digest of a row was not damage.
                table.trust(table.changed_since(self.store.flushed))
                table.count()
        for table in self.tables:
            table.retag_all(seals.newest_version)
            table.forget_after(seals.newest_version)
        self._applied, removed, grown = seals.newest, self.store.removed, self.store.grown_from
        whole = {name for seal in seals for name in seal.whole if seal.version > removed.get(name, 0)}
        sizes = (
            (each.spec.name, published_rows(each, grown.get(each.spec.name, 0), whole)) for each in self.tables
        )
        return list(seals), dict(sizes)

    async def _mend(self, rows: IdsByTable) -> IdsByTable:
        return await self._mender.mend(rows, self.seals.after(self.store.flushed))

    def _changes(self, announced: list[TableSpec], later_run: bool) -> list[TableSpec]:
        # Of which nothing was published is not fixed yet.
        known = {each.spec.name: each.spec for each in self.tables if self.published.get(each.spec.name)}
        return changes(self.name, known, announced, later_run=later_run)

    def _prepared(self, seal: Seal, rows: Sequence[RowBatch] | None) -> FrozenRelease | None:
        """What replicas that follow are to be sent of a cut, where it can be sent on as it is; to be completed."""
        if rows is None or seal.whole or not self.releases.followed:
            return None
        changed = cut_rows(rows, {table.spec.name: slot for slot, table in enumerate(self.tables)})
        return None if changed is None else self.releases.prepared(changed)

    def _apply_and_release(
        self, seal: Seal, rows: Sequence[RowBatch] | None, prepared: FrozenRelease | None = None
    ) -> FrozenRelease | None:
        """Apply a cut, and complete what replicas are to be sent of it."""
        prepared = prepared or self._prepared(seal, rows)
        self._apply(seal, rows)
        return prepared and self.releases.completed(prepared)

    def _apply(self, seal: Seal, rows: Iterable[RowBatch] | None) -> None:
        by_name = {table.spec.name: table for table in self.tables}
        for batch in self.store.rows(seal) if rows is None else rows:
            self._partly_applied = True
            by_name[batch.table.name].apply(batch, seal.version)
        for name in seal.whole:  # What a full cut does not name is no more.
            self._partly_applied, table = True, by_name[name]
            unnamed = table.not_stamped(seal.version)
            table.apply(RowBatch.deletes(Shard.whole(table.spec), unnamed), seal.version)
        self._mender.mended_by(seal.version, self.damage.rows)  # So that checksums are right before any is sent.
        self._applied, self._partly_applied = seal, False

    async def _add(self, tables: list[TableSpec], later_run: bool) -> None:
        async with self._adding:
            if self._closed:  # So is the log, soon: who waits for it to write would wait for ever.
                raise ServiceUnavailable("the service is shutting down; reconnect")
            changed, before = self._changes(tables, later_run), self.tables
            published, version = dict(self.published), self.position.number
            steps = await asyncio.to_thread(self.store.change, changed, published, version)
            await self.on_thread(lambda: [step() for step in steps])
            if any(table.removed for table in before):
                self.releases.forget()
                await asyncio.to_thread(self.store.remove_unused)
            self.signal.wake()


def _head(seal: Seal | None) -> Head | None:
    return Head.of(seal) if seal else None

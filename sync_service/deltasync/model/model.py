"""One model: its tables, its part of the log, its checkpoints and its releases.

Threads. A model has a thread of its own (`on_thread`), on which cuts are applied, releases frozen and rows copied
for checkpoints, so that none sees another half done; nothing there waits for a disk. All else happens in the event
loop.

    the model's thread    `applied`; rows, stamps and digests of the tables
    the event loop        `seals`, `succession`, `published`, `signal`, `failure`
    set by the loop, and replaced whole, so that every thread may read it: `head`, `failed`
    any thread            `name`, `log`, `store`, `checkpoints`; `tables`, which is replaced whole
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from typing import Any, Literal, TypeVar

from deltasync.base.clock import Moment, Succession, steady_ns
from deltasync.base.decision import Decision
from deltasync.base.errors import ServiceUnavailable, StorageFailed
from deltasync.base.threads import EVENT_LOOP, MODEL_PREFIX, SET_BY_EVENT_LOOP, after, confined
from deltasync.base.waiting import Signal
from deltasync.checkpoints.chunks import LogRecord
from deltasync.checkpoints.manifest import Manifest, TableKey
from deltasync.checkpoints.store import CheckpointStore
from deltasync.checkpoints.writing import Source, SourceTable
from deltasync.core.cut_times import RecentCuts
from deltasync.core.delivery import Delivery, spec_record
from deltasync.core.policy import Policy
from deltasync.core.position import NOWHERE, Position, is_discarded, line_of, resume
from deltasync.core.rows import DamagedRows, RowBatch
from deltasync.core.seal import Seal, SealHistory, checksum_of, event_time_of, seal_of
from deltasync.core.stamped_table import StampedTable, table_bytes
from deltasync.core.table_memory import RAM, TableMemory
from deltasync.core.tables import TableSpec
from deltasync.log.log_store import LogStore, LogUnavailable
from deltasync.log.volume import VolumeFailed
from deltasync.model.applied import AppliedTables
from deltasync.model.feed import Derived, Standing, table_standing
from deltasync.model.model_store import KEPT_SEALS, ModelStore
from deltasync.model.recovery import MODEL_OWNER, Recovery, ViewRecovery
from deltasync.model.releases import NO_TABLES, FrozenRelease, Head, Release, Releases
from deltasync.model.tables import FollowedTables, changes, cut_rows

T = TypeVar("T")
_RELEASE_MEMORY_BYTES = 64 << 20
# Rows that a checkpoint copies in its last turn, which delays a cut by a few milliseconds.
_LAST_TURN_BYTES = 8 << 20


@confined(
    seals=EVENT_LOOP,
    published=EVENT_LOOP,
    failure=EVENT_LOOP,
    succession=EVENT_LOOP,
    head=SET_BY_EVENT_LOOP,
    failed=SET_BY_EVENT_LOOP,
    _deliveries=EVENT_LOOP,
)
class Model:
    """A training job's set of tables. The module's text says which thread may touch what.

    Attributes:
        name: the model's name.
        log: what it, and its consumers, are written down in.
        store: the model's records in the log.
        checkpoints: where its checkpoints are.
        checkpointed: the newest checkpoint; None if there is none.
        table_changes: how often tables were made, changed or removed.
        head: the newest version that replicas can be sent, or None.
        seals: those of the last durable cuts, which may not be applied yet.
        succession: when each version became the newest, since the service started.
        published: the number of rows that each table had when it was last published, by the table's name.
        signal: wakes who waits for the head to move, or for a table.
        failure: what keeps cuts from being sealed or applied, which is tried again; empty if nothing does.
        failed: which rows do not fit their digests; empty if none was found. The model is to be reloaded.
        recent: how long each part of the way of the last cuts took.
        releases: what replicas are sent of the tables.
        problems: which checkpoints could not be used when it came back, and why.
    """

    def __init__(
        self,
        name: str,
        log: LogStore,
        checkpoints: CheckpointStore,
        memory: TableMemory = RAM,
        release_memory_bytes: int = _RELEASE_MEMORY_BYTES,
    ) -> None:
        self.name = name
        self.log = log
        self.checkpoints = checkpoints
        self.memory = memory
        self.release_memory_bytes = release_memory_bytes
        self.store = ModelStore(log, name)
        self._applied = AppliedTables(name, self.store, memory)
        self.table_changes = 0
        self.checkpointed: Manifest | None = None
        self.problems: list[str] = []
        self.seals = SealHistory(maxlen=KEPT_SEALS)
        self.succession = Succession()
        self.head: Head | None = None
        self.published: dict[str, int] = {}
        self.signal = Signal()
        self.failure = ""
        self.failed = ""
        self.recent = RecentCuts()
        self._deliveries: list[Delivery] = []
        self._followed = FollowedTables()
        self._adding = asyncio.Lock()
        self._closed = False
        self._checkpointing = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{MODEL_PREFIX}{name}")
        self.releases = Releases(self.on_thread, self._shown, release_memory_bytes)

    @property
    def history(self) -> str:
        """The id made when the model's log was created."""
        return self.store.history

    @property
    def model_history(self) -> str:
        """The same: as a feed, a model has no other history."""
        return self.history

    @property
    def tables(self) -> list[StampedTable]:
        """The tables, in the order they were added; a table's index is its slot. Replaced when one is added."""
        return self._applied.tables

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
            ServiceUnavailable: they are at none, since one could be applied only in part, or rows of them do not
                fit their digests: nobody may see that.
        """
        self.check_sound()
        return self._applied.seal

    def _shown(self) -> tuple[list[StampedTable], Head | None]:
        """The tables and the head, as replicas can be given them. On the model's thread."""
        return self.tables, _head(self.applied)

    @property
    def position(self) -> Position:
        """What a replica that has everything holds."""
        return Position(self.history, self.head.number, self.head.seal) if self.head else Position(self.history)

    async def stop(self) -> None:
        """Stop the thread: nothing is applied any more."""
        async with self._adding:
            self._closed = True
            await asyncio.to_thread(self._thread.shutdown)

    def drop_tables(self) -> None:
        """Free the memory of the tables, once the model is stopped."""
        self._applied.tables = []

    async def on_thread(self, function: Callable[..., T], *args: object) -> T:
        """Run `function`, which must not wait for anything, on the model's thread, after what was asked of it
        before.

        Raises:
            ServiceUnavailable: the model is stopped, because another process takes it or the service ends.
            DamagedRows: the function has read rows that do not fit their digests; the model has `failed`.
        """
        try:
            return await asyncio.wrap_future(self.submit(function, *args))
        except DamagedRows as error:
            self.note_damage(error)
            raise

    def submit(self, function: Callable[..., T], *args: object) -> "Future[T]":
        """Run `function` on the model's thread, as `on_thread` does, for callers outside of the event loop."""
        try:
            return self._thread.submit(function, *args)
        except RuntimeError as error:  # Its executor is shut down.
            raise ServiceUnavailable(f"model {self.name!r} is stopped in this process; try again") from error

    # Rows that do not fit their digests.

    def note_damage(self, error: DamagedRows | StorageFailed) -> None:
        """Note that rows, or what the log has of them, are damaged: nothing is sent before it is loaded again."""
        self.failed = self.failed or str(error)
        self.signal.wake()

    def check_sound(self) -> None:
        """Check that no row is known that does not fit its digest.

        Raises:
            ServiceUnavailable: one is.
        """
        if self.failed:
            text = f"model {self.name!r} is loaded again from its checkpoint and its log"
            raise ServiceUnavailable(text, detail=f": {self.failed}")

    # Tables.

    @property
    def table_bytes(self) -> int:
        """Bytes of all tables."""
        return sum(table.nbytes for table in self.tables)

    def added_bytes(self, specs: Sequence[TableSpec]) -> int:
        """How many bytes it takes that some tables are these, new or larger."""
        stale = self._stale(specs)
        there = {table.spec.name: table for table in self.tables if table.spec.name not in stale}
        return sum(
            table_bytes(each) - (there[each.name].nbytes if each.name in there else 0)
            for each in specs
            if each.name not in there or there[each.name].spec.rows < each.rows
        )

    def check_room(self, added: int) -> None:
        """Check that there is room for so many bytes of tables now; StorageFailed if not. Takes none. Blocks."""
        self.memory.check(added, f"tables of model {self.name!r}")

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

    async def _add(self, tables: list[TableSpec], later_run: bool) -> None:
        async with self._adding:
            if self._closed:  # So is the log, soon: who waits for it to write would wait for ever.
                raise ServiceUnavailable("the service is shutting down; reconnect")
            changed = self._changes(tables, later_run)
            stale, published = self._stale(changed), dict(self.published)
            kept = [table for table in self.tables if table.spec.name not in stale]
            by_name = {table.spec.name: table for table in kept}
            new = [each for each in changed if each.name not in by_name]
            again = {each.name: self.position.number for each in new if each.name in self.store.removed}
            removed_before = {**self.store.removed, **again}
            grown = {each.name: published.get(each.name, 0) for each in changed if each.name in by_name}
            specs = {table.spec.name: table.spec for table in kept} | {each.name: each for each in changed}

            def make() -> tuple[list[StampedTable], list[Callable[[], None]]]:
                made = [StampedTable(each, self.memory, removed_before.get(each.name, 0)) for each in new]
                larger = [by_name[name].grown(specs[name]) for name in grown]
                self.store.describe(specs, grown, again)  # Last: until then, a crash leaves them as they were.
                return made, larger

            def grow(steps: list[Callable[[], None]]) -> None:
                for step in steps:
                    step()

            made, larger = await asyncio.to_thread(make)
            for table in self.tables:
                table.removed = table.removed or table.spec.name in stale
            self._applied.tables = [*kept, *made]
            self.table_changes += 1
            await self.on_thread(grow, larger)
            if stale:
                self.releases.forget()
            self.signal.wake()

    def _stale(self, specs: Sequence[TableSpec]) -> set[str]:
        """Names of tables that are there, are to be something else, and were never published: of a cut that was
        given up as its tables were made.
        """
        wanted = {each.name: each for each in specs}
        there = (table.spec for table in self.tables if not self.published.get(table.spec.name))
        return {each.name for each in there if wanted.get(each.name, each) != each}

    def _changes(self, announced: list[TableSpec], later_run: bool) -> list[TableSpec]:
        # Of which nothing was published is not fixed yet.
        known = {each.spec.name: each.spec for each in self.tables if self.published.get(each.spec.name)}
        wanted = changes(self.name, known, announced, later_run=later_run)
        there = {each.spec.name: each.spec for each in self.tables}
        return [each for each in wanted if there.get(each.name) != each]

    async def remove_table(self, name: str) -> None:
        """Have one of the tables no more, between cuts and while no rank publishes it.

        Raises:
            StorageFailed: that could not be written down; nothing was changed.
        """
        async with self._adding:
            if self._closed:
                raise ServiceUnavailable("the service is shutting down; reconnect")
            specs = {table.spec.name: table.spec for table in self.tables if table.spec.name != name}
            removed = {name: self.position.number}
            await asyncio.to_thread(self.store.describe, specs, {}, removed)
            (gone,) = (table for table in self.tables if table.spec.name == name)
            gone.removed = True
            self._applied.tables = [table for table in self.tables if table is not gone]
            self.table_changes += 1
            self.published.pop(name, None)
            self.releases.forget()
            self.signal.wake()
            await self.on_thread(lambda: None)  # What was begun with the table is done.

    # Cuts.

    def apply_after(
        self, sealed: "Future[None]", seal: Seal, rows: Sequence[RowBatch] | None
    ) -> "Future[FrozenRelease | None]":
        """Apply a cut on the model's thread as soon as `sealed` is done, unless that fails.

        Call it after the event loop has begun to wait for `sealed`: then the loop learns of the seal first, and
        of what the cut has changed after that.

        Returns:
            What `apply_cut` waits for.
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
        try:
            if begun:
                release = begun.result() if begun.done() else await asyncio.wrap_future(begun)
            else:
                release = await self.on_thread(self._apply_and_release, seal, rows)
        except (LogUnavailable, VolumeFailed):
            raise
        except StorageFailed as error:  # What the log has of the cut is damaged, and stays so.
            self.note_damage(error)
            raise
        self.head = _head(seal)
        self.releases.have(release, seal.version)
        self.signal.wake()

    def _prepared(self, seal: Seal, rows: Sequence[RowBatch] | None) -> FrozenRelease | None:
        """Write the messages of a cut for replicas that are up to date, where its rows can be sent as they came.

        `Releases.completed` adds what is known only once the cut is applied.
        """
        if rows is None or seal.whole or not self.releases.followed:
            return None
        changed = cut_rows(rows, {table.spec.name: slot for slot, table in enumerate(self.tables)})
        return None if changed is None else self.releases.prepared(changed)

    def _apply_and_release(
        self, seal: Seal, rows: Sequence[RowBatch] | None, prepared: FrozenRelease | None = None
    ) -> FrozenRelease | None:
        """Apply a cut, and complete what replicas are to be sent of it."""
        prepared = prepared or self._prepared(seal, rows)
        self._applied.apply(seal, rows)
        return prepared and self.releases.completed(prepared, self.tables, Head.of(seal))

    # As a feed.

    def may_serve(self, _policy: Policy) -> bool:
        """Whether it has tables: replicas read them as they are."""
        return bool(self.tables)

    def release(self, after: int, whole: frozenset[int] = NO_TABLES) -> "asyncio.Future[Release]":
        """What a replica at version `after` lacks, with every row of the tables `whole`."""
        return self.releases.get(after, whole, self.position.number)

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

    def followed(self, policy: Policy) -> Sequence[StampedTable]:
        """The tables that a policy follows."""
        return self._followed.of(policy, self.tables)

    def standing(self, policy: Policy) -> Standing:
        """Where the model stands, to a consumer with this policy that reads its tables as they are."""
        tables, newest = self.followed(policy), self.seals.newest_version
        return Standing(
            history=self.history,
            seals=self.seals.frozen(),
            tables=lambda: [table_standing(each, newest, policy) for each in tables],
            version_of=lambda version: version,
            seconds_since=partial(self.succession.seconds_since, now_ns=steady_ns()),
            seal_of=partial(checksum_of, self.seals.frozen()),
            failure=self.failure or self.failed,
            unpublished="" if self.head else f"nothing of model {self.name!r} is published",
        )

    # Checkpoints.

    @property
    def bytes_since_checkpoint(self) -> int:
        """Bytes that the log has of versions after the newest checkpoint."""
        return sum(seal.log_bytes for seal in self.seals.after(self._checkpointed_version))

    @property
    def versions_since_checkpoint(self) -> int:
        """How many versions there are after the newest checkpoint."""
        return self.seals.newest_version - self._checkpointed_version

    @property
    def _checkpointed_version(self) -> int:
        return self.checkpointed.version if self.checkpointed else 0

    def checkpoint_tables(self) -> list[SourceTable]:
        """What a checkpoint has of it. On the model's thread."""
        return [
            SourceTable(
                TableKey(MODEL_OWNER, table.spec.name, table.removed_before), table, spec_record(table.spec)
            )
            for table in self.tables
        ]

    def checkpoint_state(self) -> dict[str, Any]:
        """The head, which a replica that begins with a checkpoint needs."""
        return {"head": asdict(head) if (head := _head(self.applied)) else None}

    @property
    def owner(self) -> str:
        """The owner of the model's tables in checkpoints."""
        return MODEL_OWNER

    async def checkpoint(
        self,
        derived: Callable[[], Sequence[Derived]],
        small: Callable[[], Mapping[str, bytes]],
        check: Callable[[], None] = lambda: None,
    ) -> Manifest:
        """Write a checkpoint of the model and of what is derived from it. Cuts go on meanwhile.

        Args:
            derived: the views of its consumers; called on the model's thread.
            small: reads the small records that a start elsewhere needs.
            check: raises where the checkpoint is to be broken off.

        Raises:
            DamagedRows: rows do not fit their digests; the model is to be loaded again.
            StorageFailed: it could not be written; what was written is removed later.
        """
        async with self._checkpointing:
            subject, previous = _ModelAndViews(self, derived, small, check), self.checkpointed
            try:
                self.checkpointed = await asyncio.to_thread(
                    self.checkpoints.write, subject, previous, _LAST_TURN_BYTES
                )
            except DamagedRows as error:
                self.note_damage(error)
                raise
            return self.checkpointed

    def cut_log(self, upto: Manifest, derived: Sequence[Derived]) -> None:
        """Drop what the log has up to a checkpoint. Blocks; any thread.

        Raises:
            StorageFailed: the log could not be written; nothing was lost.
        """
        self.store.cut(upto.version)
        for each in derived:
            if (state := upto.states.get(each.owner)) is not None:
                each.cut_log(state)

    # Coming back.

    async def recover(self, record: Mapping[str, Any], derived: Sequence[ViewRecovery] = ()) -> None:
        """Come back as of the last sealed cut, with what is derived from the model: from the newest sound
        checkpoint, and the log after it.

        Raises:
            RowsLost: there is no such checkpoint, and the log does not go back far enough.
            StorageFailed: a record is damaged, or there is no room.
        """
        recovery = Recovery(
            self.name, self.log, self.store, self.checkpoints, self._applied, derived, self.problems
        )
        recovered = await self.on_thread(recovery.recover, record)
        self.seals.extend(recovered.seals)
        self.succession.find(self.seals.newest_version, steady_ns())
        self.checkpointed = recovered.checkpoint
        self.published = recovered.published
        self.head = _head(self.seals.newest)


class _ModelAndViews:
    """The subject of a checkpoint; see `checkpoints.writing.Subject`."""

    def __init__(
        self,
        model: Model,
        derived: Callable[[], Sequence[Derived]],
        small: Callable[[], Mapping[str, bytes]],
        check: Callable[[], None],
    ) -> None:
        self.small_records = small
        self.check = check
        self._model = model
        self._derived = derived

    def run(self, function: Callable[[], T]) -> T:
        return self._model.submit(function).result()

    def position(self) -> Position:
        if (seal := self._model.applied) is None:
            raise ServiceUnavailable(f"nothing of model {self._model.name!r} is published")
        return Position(self._model.history, seal.version, seal.checksum)

    def sources(self) -> list[Source]:
        return [self._model, *self._derived()]

    def in_haste(self) -> bool:
        log = self._model.log
        return log.refusing or 2 * log.used_bytes() > log.capacity

    def log_records(self, before: Manifest | None) -> Iterator[LogRecord]:
        """The log's seals, and the heads of releases, that a checkpoint does not have, or all."""
        numbers = dict[str, int]()
        if before:
            numbers = {
                owner: state["head"]["number"] for owner, state in before.states.items() if state.get("head")
            }
            numbers[MODEL_OWNER] = before.version
        streams = {MODEL_OWNER: f"seals/{self._model.name}"}
        streams |= {each.owner: f"heads/{each.owner}" for each in self._derived()}
        for owner, stream in streams.items():
            for record in self._model.log.read(stream, numbers.get(owner, -1) + 1):
                yield stream, record.number, record.part, record.index, bytes(record.payload)


def _head(seal: Seal | None) -> Head | None:
    return Head.of(seal) if seal else None

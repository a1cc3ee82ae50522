"""One model: its tables, its part of the log, its checkpoints and its releases.

Threads. A model has a thread of its own (`on_thread`) that applies cuts, freezes releases and copies rows for
checkpoints, so that none of these sees another one half done. It never waits for a disk. Everything else runs in
the event loop.

    the model's thread    rows, stamps and digests of `tables`
    the event loop        `seals`, `signal`, `failure`
    set by the loop; any thread may read it, because it is replaced and never changed: `head`
    any thread            `name`, `log`, `store`, `checkpoints`
"""

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from deltasync.base.clock import steady_ns
from deltasync.base.decision import Decision
from deltasync.base.errors import InvalidInput, ServiceUnavailable, StorageFailed
from deltasync.base.threads import EVENT_LOOP, MODEL_PREFIX, SET_BY_EVENT_LOOP, after, confined, in_own_thread
from deltasync.base.waiting import Signal, backoff, first_of
from deltasync.checkpoints.chunks import LogRecord
from deltasync.checkpoints.manifest import Manifest, TableKey
from deltasync.checkpoints.store import CheckpointStore
from deltasync.checkpoints.writing import Source
from deltasync.core.cut_times import CutTimes, RecentCuts, StopWatch
from deltasync.core.policy import Policy
from deltasync.core.position import NOWHERE, Position, can_continue, is_discarded, line_of
from deltasync.core.rows import DamagedRows, RowBatch
from deltasync.core.seal import Seal, SealHistory, checksum_of, seal_of
from deltasync.core.stamped_table import StampedTable
from deltasync.core.table_form import TableForm, spec_of_record
from deltasync.core.table_memory import RAM, TableMemory
from deltasync.core.tables import TableSpec
from deltasync.log.log_store import LAST_NUMBER, LogStore, LogUnavailable
from deltasync.log.volume import VolumeFailed
from deltasync.model.applied_tables import MODEL_OWNER, AppliedTables, cut_rows, key_of
from deltasync.model.feed import FeedStatus, TableStatus, ViewStorage, table_status
from deltasync.model.model_store import KEPT_SEALS, ModelStore
from deltasync.model.recovery import ModelRecovery, ViewRecovery
from deltasync.model.releases import BLOCK_BYTES, NO_TABLES, FrozenRelease, Head, Release, Releases

T = TypeVar("T")
_RELEASE_MEMORY_BYTES = 64 << 20
# How long a cancelled commit waits for the log, to learn whether its cut counts.
_LAST_ANSWER_SECONDS = 10.0


def _go_on() -> None:
    """Do not stop the checkpoint."""


@dataclass(frozen=True)
class CompleteCut:
    """A cut of which every part has arrived.

    Attributes:
        tables: the tables of its run, of which all rows are published from now on.
        rows: its rows; None if only the log has them.
        unwritten: writes of its rows to the log that have not succeeded yet.
    """

    seal: Seal
    tables: Sequence[TableSpec]
    rows: Sequence[RowBatch] | None
    unwritten: Sequence["Future[None]"]
    watch: StopWatch


@confined(
    seals=EVENT_LOOP,
    failure=EVENT_LOOP,
    head=SET_BY_EVENT_LOOP,
    _forms=EVENT_LOOP,
)
class Model:
    """The tables of a training job. The module's docstring lists which thread may use what.

    Attributes:
        log: the log with the records of the model and its consumers.
        checkpoints: the store of its checkpoints.
        checkpointed: the newest checkpoint; None if there is none.
        head: the newest version that replicas can get, or None.
        seals: the seals of the last durable cuts, which may not be applied yet.
        signal: wakes tasks that wait for a new head or table.
        failure: the error that prevents sealing or applying cuts and is being retried; empty if there is none.
        problems: checkpoints that its recovery could not use, and why.
    """

    def __init__(
        self,
        name: str,
        log: LogStore,
        checkpoints: CheckpointStore,
        memory: TableMemory = RAM,
        release_memory_bytes: int = _RELEASE_MEMORY_BYTES,
        release_block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.name = name
        self.log = log
        self.checkpoints = checkpoints
        self.memory = memory
        self.release_memory_bytes = release_memory_bytes
        self.store = ModelStore(log, name)
        self.checkpointed: Manifest | None = None
        self.problems: list[str] = []
        self.seals = SealHistory(maxlen=KEPT_SEALS)
        self.head: Head | None = None
        self.signal = Signal()
        self.failure = ""
        self.recent = RecentCuts()
        self._forms: tuple[int, list[TableForm]] = (0, [])  # As of a number of changes of the tables.
        self._checkpointing = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=f"{MODEL_PREFIX}{name}")
        self.tables = AppliedTables(name, self.store, memory, self.seals, self.on_thread, self._forget_releases)
        self.releases = Releases(self.on_thread, self.tables.shown, release_memory_bytes, release_block_bytes)

    @property
    def history(self) -> str:
        """The id made when the model's log was created."""
        return self.store.history

    @property
    def model_history(self) -> str:
        """The id of the model's history. A view has a history of its own in addition."""
        return self.history

    @property
    def forms(self) -> list[TableForm]:
        """The form in which a consumer without a policy gets each table, by slot."""
        changes, forms = self._forms
        if changes != self.tables.changes:  # Every replica reads them several times for every release.
            changes, forms = self.tables.changes, [TableForm.unchanged(table.spec) for table in self.tables]
            self._forms = changes, forms
        return forms

    @property
    def position(self) -> Position:
        """The position of a replica that has everything."""
        return Position(self.history, self.head.number, self.head.seal) if self.head else Position(self.history)

    @property
    def sealed(self) -> Position:
        """The position of the newest durable cut, which may not be applied yet."""
        newest = self.seals.newest
        return Position(self.history, newest.version, newest.checksum) if newest else Position(self.history)

    @property
    def lacks(self) -> str:
        """What its trainer must send before replicas can get anything, in words; empty if nothing."""
        return self.tables.lacks or ("" if self.seals.newest else "every row")

    async def stop(self) -> None:
        """Stop the model's thread. No more cuts are applied."""
        await self.tables.close()
        await asyncio.to_thread(self._thread.shutdown)

    async def on_thread(self, function: Callable[..., T], *args: object) -> T:
        """Run `function`, which must not wait for anything, on the model's thread after its earlier calls."""
        try:
            return await asyncio.wrap_future(self.submit(function, *args))
        except DamagedRows as error:
            self.tables.note_damage(error)
            raise

    def submit(self, function: Callable[..., T], *args: object) -> "Future[T]":
        """Run `function` on the model's thread like `on_thread`, for callers outside the event loop."""
        try:
            return self._thread.submit(function, *args)
        except RuntimeError as error:  # Its executor is shut down.
            raise ServiceUnavailable(f"model {self.name!r} is stopped in this process; try again") from error

    def _forget_releases(self) -> None:
        """Discard releases, because tables changed or rows are damaged."""
        self.releases.forget()
        self.signal.wake()

    # Cuts.

    async def commit(
        self,
        cut: "CompleteCut",
        durable: Callable[[], object],
        failed: Callable[[str, Exception], None],
        ending: asyncio.Event,
    ) -> None:
        """Make a complete cut the next version: durable in the log, applied to the tables, visible to replicas.

        `durable` is called once the log has the seal; if the log refuses it, nothing has changed. Then `failed` is
        called with each error, and the cut is applied again, because all later cuts build on it. `ending` ends
        these retries: the next start applies the cut. Neither function may raise.
        """
        seal = cut.seal
        sealed, apply = self.store.seal(seal, cut.unwritten), partial(self._apply_and_release, seal, cut.rows)
        # Wait for the log first: then the loop is woken before the model's thread begins to apply.
        waiting = asyncio.wrap_future(sealed)
        applied: Future[FrozenRelease | None] | None = after(sealed, self._thread, apply)
        try:
            await asyncio.shield(waiting)
        finally:  # Even if this task is cancelled: only the log knows whether the cut counts.
            if not waiting.done():
                await asyncio.wait([waiting], timeout=_LAST_ANSWER_SECONDS)
            if waiting.done() and not waiting.exception():
                durable()
                self.seals.append(seal)
                self.tables.published |= {table.name: table.rows for table in cut.tables}
        cut.watch.lap("log")
        self.seals.succession.add(seal.version, steady_ns())
        self.recent.add(CutTimes(seal, cut.watch.lapped_ns, cut.watch.seconds))
        for pause in backoff():
            try:
                release = await asyncio.wrap_future(applied or self.submit(apply))
                self.failure = ""
                self.recent.note_applied(seal.version)
                self.head = Head.of(seal)
                self.releases.have(release, seal.version)
                self.signal.wake()  # Now replicas get it.
                return
            except Exception as error:  # noqa: BLE001  # an error of one model must not affect others
                # Unless the log cannot be read at present, rows or records of the cut are damaged.
                away = isinstance(error, LogUnavailable | VolumeFailed)
                if isinstance(error, StorageFailed | DamagedRows) and not away:
                    self.tables.note_damage(error)
                failed(f"version {seal.version} could not be applied; the service retries", error)
                applied = None
            await first_of(ending.wait(), seconds=pause)
            if ending.is_set():
                return

    def _apply_and_release(self, seal: Seal, rows: Sequence[RowBatch] | None) -> FrozenRelease | None:
        """Apply a cut, and make its release for up-to-date replicas if its rows can be sent as they arrived.

        Bits of rows may have changed in memory since they arrived. Replicas would always refuse such rows, so they
        get rows from the tables instead, which are checked while they are read.
        """
        slots = {table.spec.name: slot for slot, table in enumerate(self.tables)}
        combined = None if rows is None else cut_rows(rows, slots)
        wrong = self.tables.apply(seal, rows if combined is None else [batch for _, batch in combined])
        if combined is None or wrong or seal.whole or not self.releases.followed:
            return None
        return self.releases.of_cut(combined, list(self.tables), Head.of(seal))

    # The interface `Feed`.

    def may_serve(self, _policy: Policy) -> bool:
        """Whether it has tables, which replicas read directly."""
        return bool(self.tables)

    def release(self, after: int, whole: frozenset[int] = NO_TABLES) -> "asyncio.Future[Release]":
        """The rows that a replica at version `after` lacks, with every row of the tables `whole`."""
        return self.releases.get(after, whole, self.position.number)

    def version_of(self, version: int) -> int:
        """The version at a position in this history."""
        return version

    def head_of(self, version: int) -> Head | None:
        """A version as the newest one; None if its seal is unknown."""
        return Head.of(seal_of(version, self.seals)) if self.seals.checksum_of(version) else None

    def behind_ns(self, version: int, _policy: Policy) -> int:
        """Nanoseconds since a version was replaced by a newer one; `FOREVER_NS` if unknown."""
        return self.seals.succession.behind_ns(version, steady_ns())

    def continue_from(self, held: Position, acknowledged: Position = NOWHERE) -> tuple[Decision, Position]:
        """Decide whether a replica can continue from its position. Return that position in this history too.

        `acknowledged` is the replica's offset.
        """
        head, seal = self.position.number, self.seal_of(held.number)
        decision = can_continue(held, self.history, head, seal, acknowledged=acknowledged)
        return decision, Position(self.history, held.number, held.seal) if decision.yes else Position(self.history)

    def discards(self, held: Position, version: Position) -> bool:
        """Whether a replica holds rows of a discarded history."""
        if not version.number and line_of(held.history) != line_of(self.history):
            return False  # The position may belong to a view that was deleted.
        at = version if version.number else held
        return is_discarded(at, self.history, self.position.number, self.seal_of(at.number))

    def seal_of(self, version: int) -> int:
        """The checksum of a version's seal; 0 if unknown."""
        return self.seals.checksum_of(version)

    def changed(self) -> asyncio.Future[None]:
        """Wait for a new head or table after this call."""
        return self.signal.changed()

    def status(self, policy: Policy) -> FeedStatus:
        """The position for a consumer with this policy that reads the model's tables directly."""
        tables, newest = self.tables.followed(policy), self.seals.newest_version

        def table_statuses() -> list[TableStatus]:
            return [table_status(each, newest, policy) for each in tables]

        return FeedStatus(
            history=self.history,
            seals=self.seals.frozen(),
            tables=table_statuses,
            version_of=self.version_of,
            seconds_since=partial(self.seals.succession.seconds_since, now_ns=steady_ns()),
            seal_of=partial(checksum_of, self.seals.frozen()),
            failure=self.failure or self.tables.failed,
            unpublished="" if self.head else f"model {self.name!r} is not published yet",
        )

    # Checkpoints.

    @property
    def bytes_since_checkpoint(self) -> int:
        """Size of the log's records after the newest checkpoint, in bytes."""
        before = self.checkpointed.version if self.checkpointed else 0
        return sum(seal.log_bytes for seal in self.seals.after(before))

    async def checkpoint(
        self,
        views: Callable[[], Sequence[ViewStorage]],
        small: Callable[[], Mapping[str, bytes]],
        check: Callable[[], None] = _go_on,
    ) -> Manifest:
        """Write a checkpoint of the model and its views, while cuts continue.

        `views` returns the views of its consumers, on the model's thread; `small` reads the small records that a
        service on another machine needs; `check` raises an error to stop the checkpoint.
        """
        async with self._checkpointing:
            subject, previous = _ModelAndViews(self, views, small, check), self.checkpointed
            try:
                self.checkpointed = await in_own_thread(self.checkpoints.write, subject, previous)
            except DamagedRows as error:
                self.tables.note_damage(error)
                raise
            return self.checkpointed

    def truncate_log(self, upto: Manifest, views: Sequence[ViewStorage]) -> None:
        """Drop log records up to a checkpoint. Blocks; any thread may call it."""
        self.store.truncate(upto.version)
        for each in views:
            if (state := upto.states.get(each.owner)) is not None:
                each.truncate_log(state)

    def load_kept(
        self,
        id: str,  # noqa: A002
        policy: Policy,
        *,
        replaying: bool = False,
    ) -> dict[TableKey, StampedTable]:
        """Load the tables of a kept version that a policy selects, as large as the model's are now. Blocks; any
        thread may call it. A replay leaves out tables that the model no longer has.

        Raises:
            InvalidInput: the version has a table that the model no longer has, or that does not fit the policy.
            StorageFailed: the checkpoint is missing, damaged, or cannot be read at present; or there is no room.
        """
        manifest = self.checkpoints.manifest_of(id)
        present = {key_of(table): table for table in self.tables}
        loaded = dict[TableKey, StampedTable]()
        for entry in manifest.tables:
            if entry.key.owner != MODEL_OWNER or not policy.follows(spec_of_record(entry.record)):
                continue
            if table := present.get(entry.key):
                policy.form_of(table.spec).check()
                loaded[entry.key] = StampedTable(table.spec, self.memory, table.removed_before)
            elif not replaying:
                raise InvalidInput(
                    f"version {manifest.version} of model {self.name!r} has table {entry.key.name!r} from before "
                    "it was deleted, and nothing can go back beyond that: use a later version"
                )
        self.checkpoints.load(manifest, [loaded.get(entry.key) for entry in manifest.tables], note_use=False)
        return loaded

    # Recovery.

    async def recover(self, record: Mapping[str, Any], views: Sequence[ViewRecovery] = ()) -> None:
        """Restore the model and its views as of the last sealed cut, from the newest sound checkpoint and the log
        after it. Rows that are nowhere any more are `lacks`.
        """
        store, tables = self.store, self.tables
        recovery = ModelRecovery(self.name, self.log, store, self.checkpoints, tables, views, self.problems)
        result = await self.on_thread(recovery.run, record)
        self.seals.extend(result.seals)
        self.seals.succession.find(self.seals.newest_version, steady_ns())
        self.checkpointed = result.checkpoint
        tables.published = result.published
        self.head = Head.of(self.seals.newest) if self.seals.newest else None


class _ModelAndViews:
    """The subject of a checkpoint; see `checkpoints.writing.Subject`."""

    def __init__(
        self,
        model: Model,
        views: Callable[[], Sequence[ViewStorage]],
        small: Callable[[], Mapping[str, bytes]],
        check: Callable[[], None],
    ) -> None:
        self.small_records = small
        self.check = check
        self._model = model
        self._views = views

    def run(self, function: Callable[[], T]) -> T:
        return self._model.submit(function).result()

    def position(self) -> Position:
        if (seal := self._model.tables.seal) is None:
            raise ServiceUnavailable(f"model {self._model.name!r} is not published yet")
        return Position(self._model.history, seal.version, seal.checksum)

    def sources(self) -> list[Source]:
        return [self._model.tables, *self._views()]

    def in_haste(self) -> bool:
        log = self._model.log
        return log.refusing or 2 * log.used_bytes() > log.capacity

    def log_records(self, before: Manifest | None) -> Iterator[LogRecord]:
        """The seals and release heads in the log that checkpoint `before` lacks, or all of them."""
        numbers = dict[str, int]()
        if before:
            numbers = {
                owner: state["head"]["number"] for owner, state in before.states.items() if state.get("head")
            }
            numbers[MODEL_OWNER] = before.version
        streams = {MODEL_OWNER: (f"seals/{self._model.name}", self._model.store.last)}
        streams |= {each.owner: (f"heads/{each.owner}", LAST_NUMBER) for each in self._views()}
        for owner, (stream, last) in streams.items():
            for record in self._model.log.read(stream, numbers.get(owner, -1) + 1, last):
                yield stream, record.number, record.part, record.index, bytes(record.payload)

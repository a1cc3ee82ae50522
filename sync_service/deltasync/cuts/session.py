"""One rank's stream: its opening message, and its parts, chunk by chunk, until their cuts are sealed."""

import asyncio
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from deltasync.access.limits import Limits
from deltasync.base.arguments import check_name
from deltasync.base.clock import steady_ns
from deltasync.base.errors import Contradiction, InvalidInput, Superseded
from deltasync.base.events import EventKind
from deltasync.base.words import counted
from deltasync.core.position import Position
from deltasync.core.rows import DeleteRequest, Ids, RowBatch
from deltasync.core.seal import Seal, check_event_time, rolled_back_to
from deltasync.core.tables import Shard, TableSpec
from deltasync.cuts.admission import Continuation, Run, continues
from deltasync.cuts.coordinator import CutCoordinator, OpenCut
from deltasync.cuts.cut import ChangedRows, Cut, MissingRows, RankPart
from deltasync.log.log_store import LogFull, WriteQueue
from deltasync.log.records import pack_layout, pack_rows
from deltasync.v1 import publish_pb2
from deltasync.wire.messages import (
    event_time_from_message,
    position_from_message,
    shards_from_open,
    table_from_message,
)
from deltasync.wire.row_messages import MAX_CHUNK_BYTES, ReceivedRows, encoded

# Runs the long work of opening streams one by one, so that open streams keep the other threads.
OPENS = ThreadPoolExecutor(1, thread_name_prefix="opens")
MAX_WORLD_SIZE = 65_536
_LONGEST_PROCESS = 200


@dataclass(frozen=True)
class Opening:
    """The opening message of a rank's stream: valid by itself, not yet compared with the model."""

    message: publish_pb2.PublishOpen
    run: Run
    tables: list[TableSpec]
    shards: list[Shard]


def check_counts(message: publish_pb2.PublishOpen, limits: Limits) -> None:
    """Check the number of tables and shards in an opening message against the limits.

    Raises:
        LimitReached: there are too many.
    """
    limits.check("tables_per_model", len(message.tables))
    limits.check("shards_per_open", len(message.shards))


def check_open(message: publish_pb2.PublishOpen, by: str | None = None) -> Opening:
    """Check the opening message of a stream from a client with identity `by`. Any thread may call it.

    Raises:
        InvalidInput: a field of the message is invalid.
    """
    check_name("model", message.model)
    tables = _checked_tables(message)
    return Opening(message, _checked_run(message, by), tables, shards_from_open(message, tables))


def _checked_run(message: publish_pb2.PublishOpen, by: str | None) -> Run:
    if not 1 <= len(message.run) <= 128:
        raise InvalidInput(f"run id {message.run!r}: use 1 to 128 characters")
    if rolled_back_to(message.run) is not None:
        raise InvalidInput(f"run id {message.run!r}: such ids are reserved for rollbacks")
    if not 1 <= message.world_size <= MAX_WORLD_SIZE:
        raise InvalidInput(f"world size {message.world_size}: expected 1 to {MAX_WORLD_SIZE}")
    if message.rank >= message.world_size:
        raise InvalidInput(f"rank {message.rank}: expected 0 to {message.world_size - 1}, below world_size")
    if len(message.process) > _LONGEST_PROCESS or not message.process.isprintable():
        raise InvalidInput(f"process: use at most {_LONGEST_PROCESS} printable characters")
    return Run(message.run, message.run_started_unix_ns, message.world_size, message.process, by)


def _checked_tables(message: publish_pb2.PublishOpen) -> list[TableSpec]:
    tables = [table_from_message(table) for table in message.tables]
    if not tables:
        raise InvalidInput("the run announces no tables: describe at least one")
    by_name: dict[str, TableSpec] = {}
    for table in tables:
        if table.name in by_name:
            raise InvalidInput(f"table {table.name!r} is announced twice: tables need distinct names")
        by_name[table.name] = table
    aliases = set[str]()
    for table in tables:
        if table.of:
            _check_map(table, by_name.get(table.of))
        if twice := next((each for each in table.aliases if each in by_name or each in aliases), None):
            raise InvalidInput(f"table {table.name!r} has the alias {twice!r}, which another table uses")
        aliases.update(table.aliases)
    return tables


def _check_map(table: TableSpec, rows: TableSpec | None) -> None:
    """Check that a map belongs to an embedding table with as many rows."""
    if rows is None or not rows.kind.trained:
        raise InvalidInput(f"table {table.name!r} belongs to {table.of!r}, not an embedding table of the run")
    if rows.rows != table.rows:
        raise InvalidInput(
            f"table {table.name!r} has {counted(table.rows, 'row')}, but {table.of!r}, to which it "
            f"belongs, has {rows.rows}"
        )


_TABLES_AT_ONCE = 64
# Maximum number of deletes in a close. A rank never gets more at once.
_MOST_DELETES = 131_072


async def open_session(coordinator: CutCoordinator, opening: Opening) -> "PublishSession":
    """Admit a rank. It replaces an older stream of the same rank, or an older run.

    Raises:
        Contradiction: see `CutCoordinator.admit`.
        LimitReached: the limits do not allow its tables.
        StorageFailed: there is no room for a table.
        ServiceUnavailable: a version is only partly applied to the model's tables.
    """
    loop = asyncio.get_running_loop()
    layout = await loop.run_in_executor(OPENS, pack_layout, opening.tables, opening.shards)
    claim, start_over = position_from_message(opening.message.continues), opening.message.start_over
    await coordinator.admit(opening.run, opening.tables, claim, start_over=start_over)
    session = PublishSession(coordinator, opening, layout)
    coordinator.sessions[session.rank] = session
    try:
        await session.find_changes()
    except BaseException as error:  # Otherwise it would count as connected.
        session.leave(str(error))
        raise
    session.report(EventKind.RANK_JOINED, session.decision.reason)
    return session


class PublishSession:
    """The stream of an admitted rank. Used in the event loop.

    Attributes:
        coordinator: the coordinator of its model's ranks.
    """

    def __init__(self, coordinator: CutCoordinator, opening: Opening, layout: bytes) -> None:
        self.run = opening.run
        self.rank, self.process = opening.message.rank, opening.message.process
        self.tables = opening.tables
        self.slots = {table.name: slot for slot, table in enumerate(opening.tables)}
        self.takes_deletes = opening.message.takes_deletes
        self._takes_changes = opening.message.takes_changes
        self.ended, self.finished, self.since_ns, self.left = False, False, steady_ns(), ""
        self.coordinator = coordinator
        self._model = coordinator.model
        self._layout = layout
        self._claim = position_from_message(opening.message.continues)
        self._shards = opening.shards
        self._part: tuple[OpenCut, RankPart] | None = None
        self.changed: ChangedRows | None = None
        self._unwritten = UnwrittenChunks(self._model.store.queue)

    def report(self, kind: EventKind, text: str, error: Exception | None = None) -> None:
        """Report an event of this rank."""
        self.coordinator.events.emit(kind, text, error, model=self._model.name, rank=self.rank, run=self.run.id)

    def end(self, reason: str, refusal: Exception | None = None) -> None:
        """Record that the stream ended, and why; `refusal` is the error that the rank got, if any."""
        if isinstance(refusal, InvalidInput):
            self.coordinator.sealer.note_refusal(refusal)
        self.leave(reason)
        self.report(EventKind.RANK_LEFT, "" if refusal else self.left, refusal)

    def leave(self, reason: str) -> None:
        """Record that the rank has finished, or left for a reason, which may be empty."""
        text = "it has finished" if self.finished else reason or "its stream ended without a goodbye"
        self.ended, self.since_ns, self.left = True, steady_ns(), text
        self.coordinator.note_left()

    @property
    def decision(self) -> Continuation:
        """Whether the run continues the present history."""
        model, claim = self._model, self._model.seals.same_rows(self._claim)
        seal = model.seals.checksum_of(claim.number)
        return continues(
            self.run,
            claim,
            model.history,
            model.seals.newest,
            seal,
            takes_changes=self._takes_changes,
            lacks=model.tables.lacks,
        )

    async def find_changes(self) -> None:
        """Find the rows that were published after the version that the run continues, and those that damage cost.

        Raises:
            ServiceUnavailable: a version is only partly applied to the tables.
        """
        if self.decision.since is not None:
            await self.coordinator.settled()
        if (since := self.decision.since) is not None:
            self.changed = await self._model.on_thread(self._changed_since, since)
        # A rollback brings back its version, but not rows that operators have deleted since.
        rolled_back = self._model.seals.same_rows(self._claim) != self._claim
        if rolled_back or since is not None:
            await self._ask_again(self._claim.number)

    async def _ask_again(self, since: int) -> None:
        """Repeat the deletes that later versions carried, because the run still has these rows."""
        deletes = self.coordinator.deletes
        for done in deletes.done.after(since):
            rows = await self._model.on_thread(self._still_deleted, done)
            if done.number in deletes.done:  # Otherwise another rank was first.
                await deletes.ask_again(done, rows, since, f"run {self.run.id}")

    def _still_deleted(self, done: DeleteRequest) -> Ids:
        """The rows of a delete that were not published again since."""
        tables = [each for each in self._model.tables if each.spec.name == done.table]
        return done.ids[tables[0].deleted(done.ids)] if tables else done.ids[:0]

    def _changed_since(self, since: int) -> ChangedRows:
        tables, applied = self._model.tables, self._model.tables.seal
        upto = applied.version if applied else 0
        return ChangedRows.find(since, upto, list(tables), self._shards, tables.missing)

    @property
    def deletes(self) -> list[DeleteRequest]:
        """The deletes that this rank must carry out now."""
        return self.coordinator.deletes.handed(self.tables) if self.takes_deletes else []

    @property
    def quarantine(self) -> str:
        """The versions in quarantine and the reason; empty if there are none."""
        return self.coordinator.sealer.quarantine

    @property
    def sealed(self) -> Position:
        """The last sealed position."""
        newest = self._model.seals.newest_version
        return Position(self._model.history, newest, self._model.seals.checksum_of(newest))

    async def take(self, received: ReceivedRows[publish_pb2.PartClose]) -> Position | None:
        """Add rows to this rank's part of a cut, and close it if they came with its close.

        Returns:
            The result of `close`; None if the part stays open.

        Raises:
            InvalidInput: the rows do not match the rank's opening message.
            Damaged: rows do not match their digests.
            Contradiction: the cut does not fit even into an empty log.
            Superseded: a newer stream, run or cut has taken over.
        """
        size = 0
        for number, (slot, columns) in enumerate(received.rows, 1):
            size += columns.size
            if size > MAX_CHUNK_BYTES:
                what = f"a {'part' if received.end else 'chunk'} of at least {size} bytes of ids and values"
                raise InvalidInput(f"{what}: at most {MAX_CHUNK_BYTES} are allowed")
            self.add(received.step, slot, columns.rows_of(slot, self._shards))
            if number % _TABLES_AT_ONCE == 0:  # Many tables take long: let other streams run.
                await asyncio.sleep(0)
        await self.wait_for_room()
        return await self.close(received.end) if received.end else None

    def add(self, step: int, slot: int, batch: RowBatch) -> None:
        """Add rows to this rank's part of a cut, and raise as `take` does. Call `wait_for_room` afterwards."""
        batch.check()
        batch.check_digests()
        if batch.digests is None and not batch.deleted:
            batch = encoded(batch.digested())
        norms = self.coordinator.sealer.guard.look(batch)
        if norms and norms.excess and not self.coordinator.sealer.guard.quarantines:
            raise InvalidInput(f"{norms.excess}; the cut of step {step} is refused")
        self._check_current()
        if self._sealed_before(step) or self._closed_before(step):
            return
        open_cut, part = self._part_of(step)
        record = pack_rows(slot, batch, part.layout)
        size = sum(map(len, record))
        open_cut.cut.add(part, slot, batch, size)
        if norms:
            part.note_norms(batch.table.name, norms)
        self.coordinator.check_room(open_cut)
        appended = self._model.store.append(open_cut.cut.version, self.rank, part.records, record)
        part.records += 1
        self._unwritten.add(appended, size)

    async def wait_for_room(self) -> None:
        """Wait until this stream may send more rows. Meanwhile another stream may begin the part anew.

        Raises:
            Contradiction: the cut does not fit even into an empty log.
            StorageFailed: a write failed.
        """
        try:
            await self._unwritten.wait_for_room()
        except LogFull as error:
            if self._part and self.coordinator.sessions.get(self.rank) is self:
                self.coordinator.check_room(self._part[0], error)
            raise

    async def close(self, close: publish_pb2.PartClose) -> Position:
        """Close this rank's part, and wait until the cut is durable and applied; return its position.

        Raises:
            InvalidInput: the part does not match its close.
            ResyncRequired: the run must publish every row first, and this part does not contain them.
            Contradiction: the ranks' shards do not cover whole tables, or the step is older than a published one.
            Superseded: a newer stream, run or cut has taken over.
        """
        self._claim = await self._closed(close)
        self.changed = None  # The part contained all of it.
        return self._claim

    async def _closed(self, close: publish_pb2.PartClose) -> Position:
        self._check_current()
        if open_cut := self._closed_before(close.step):
            return await asyncio.shield(open_cut.sealed)
        if sealed := self._sealed_before(close.step):
            return Position(self._model.history, sealed.version, sealed.checksum)
        open_cut, part = self._part_of(close.step)
        event_time, differing = event_time_from_message(close), self._differing(close)
        check_event_time(event_time)
        open_cut.cut.close(
            part,
            rows=close.rows,
            full=close.full,
            step_end_unix_ns=close.step_end_unix_ns,
            deletes=frozenset(close.deletes),
            event_time_unix_ns=event_time,
            unwritten=self._unwritten.take(),
            gather_ns=close.gather_ns,
        )
        self.coordinator.differing |= differing
        self._part = None
        self.coordinator.seal_when_complete()
        return await asyncio.shield(open_cut.sealed)

    def finish(self) -> None:
        """Record the goodbye of the rank, after which it publishes nothing.

        Raises:
            InvalidInput: a part is open.
        """
        if self._part:
            raise InvalidInput(f"goodbye within the part of step {self._part[0].cut.step}: close it first")
        self.finished = True

    def _differing(self, close: publish_pb2.PartClose) -> set[str]:
        if len(close.differing) > len(self.tables) or len(close.deletes) > _MOST_DELETES:
            numbers = f"{len(close.differing)} tables that differ, and {len(close.deletes)} deletes"
            raise InvalidInput(f"{numbers}: expected at most {len(self.tables)} and {_MOST_DELETES}")
        if unknown := [index for index in close.differing if index >= len(self.tables)]:
            raise InvalidInput(
                f"table {unknown[0]} differs between ranks, but only {len(self.tables)} were announced"
            )
        return {self.tables[index].name for index in close.differing}

    def _sealed_before(self, step: int) -> Seal | None:
        """The seal of the cut after `step` if it is already sealed, because the answer may have been lost."""
        sealed = self._model.seals.newest
        if sealed is None or sealed.run != self.run.id or step > sealed.step:
            return None
        if step < sealed.step:
            raise Contradiction(f"part of step {step}, but step {sealed.step} of this run is already published")
        return sealed

    def _closed_before(self, step: int) -> OpenCut | None:
        """The cut after `step`, if this rank closed its part of it on an earlier stream."""
        current = self.coordinator.open_cut
        ours = current and current.cut.run == self.run and current.cut.step == step
        return current if current and ours and current.cut.closed_by(self.rank) else None

    def _part_of(self, step: int) -> tuple[OpenCut, RankPart]:
        open_cut = self.coordinator.cut_of(self.run, step)
        if self._part is None or self._part[0] is not open_cut:
            self._part = (open_cut, self._begin(open_cut.cut))
        return self._part

    def _begin(self, cut: Cut) -> RankPart:
        """Begin this rank's part: drop its records of an earlier stream, and write the layout of its rows."""
        decision = self.decision
        missing = self._missing(decision.since)
        cut.announce(self.tables)
        self._unwritten.add(self._model.store.drop_part(cut.version, self.rank), 0)
        layout = self._model.store.use_layout(self._layout, self._shards, cut.version)
        self._unwritten.add(layout.written, 0)
        return cut.begin(
            self.rank,
            self._shards,
            must_be_full=not decision.yes,
            missing=missing,
            layout=layout.number,
            log_bytes=layout.log_bytes,
        )

    def _missing(self, since: int | None) -> MissingRows | None:
        """The rows that were published after version `since`, which the part must contain."""
        newest = self._model.seals.newest_version
        if since is None:
            return None
        if self.changed is None or (self.changed.since, self.changed.upto) != (since, newest):
            raise Superseded(f"version {newest} was sealed after this stream was opened: open it again")
        return MissingRows(self.changed)

    def _check_current(self) -> None:
        if self.coordinator.sessions.get(self.rank) is not self:
            raise Superseded(f"a newer stream of rank {self.rank}, or a newer run, has taken over")


# Bounds the memory of an arriving part, without waiting for each of many small chunks.
_MOST_BYTES = 16 << 20
# Memory of a small chunk.
_CHUNK_BYTES = 4096


class UnwrittenChunks:
    """Pending writes of a rank's part, in order. Used in the event loop."""

    def __init__(self, queue: WriteQueue) -> None:
        """`queue` holds the writes of all streams. While it is full, this stream waits for its own writes."""
        self._queue = queue
        self._writes: deque[tuple[Future[None], int]] = deque()
        self._bytes = 0

    def add(self, write: Future[None], size: int) -> None:
        """Add a write of `size` bytes."""
        self._writes.append((write, max(size, _CHUNK_BYTES)))
        self._bytes += self._writes[-1][1]

    async def wait_for_room(self) -> None:
        """Wait for the oldest writes until the others fit into the memory of this stream and of all streams.

        Raises:
            StorageFailed: a write failed.
        """
        while self._bytes > _MOST_BYTES or (self._writes and self._queue.full):
            write, size = self._writes.popleft()
            self._bytes -= size
            if write.done():
                write.result()
            else:
                await asyncio.wrap_future(write)

    def take(self) -> tuple[Future[None], ...]:
        """Remove and return all writes. The caller must wait for them."""
        writes = tuple(write for write, _ in self._writes)
        self._writes.clear()
        self._bytes = 0
        return writes

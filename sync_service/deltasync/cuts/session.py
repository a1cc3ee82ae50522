"""One rank of a run: its rows, part by part, until their cuts are sealed.

The rows may come from a trainer's stream or from the service itself, as those of a rollback do.
"""

import asyncio
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from deltasync.base.errors import InvalidInput, Superseded
from deltasync.base.events import EventKind
from deltasync.core.position import Position
from deltasync.core.rows import DeleteRequest, Ids, RowBatch
from deltasync.cuts.admission import Continuation, Opening, continues
from deltasync.cuts.coordinator import CutCoordinator, OpenCut, RankStream
from deltasync.cuts.cut import ChangedRows, MissingRows, PartEnd, RankPart
from deltasync.log.log_store import LogFull, WriteQueue
from deltasync.log.records import pack_layout, pack_rows
from deltasync.wire.row_messages import encoded

# Runs the long work of opening streams one by one, so that open streams keep the other threads.
_OPENS = ThreadPoolExecutor(1, thread_name_prefix="opens")


async def open_session(coordinator: CutCoordinator, opening: Opening) -> "PublishSession":
    """Admit a rank. It replaces an older stream of the same rank, or an older run."""
    loop = asyncio.get_running_loop()
    layout = await loop.run_in_executor(_OPENS, pack_layout, opening.tables, opening.shards)
    session = PublishSession(coordinator, opening, await coordinator.admit(opening), layout)
    try:
        await session.find_changes()
    except BaseException as error:  # Otherwise it would count as connected.
        session.leave(str(error))
        raise
    session.report(EventKind.RANK_JOINED, session.decision.reason)
    return session


class PublishSession:
    """An admitted rank. Used in the event loop.

    Attributes:
        shards: the rows and columns that the rank holds, by slot.
        slots: the slot of each table, by name.
        changed: the rows that its next part must have, because the service named them; None if it named none.
    """

    def __init__(self, coordinator: CutCoordinator, opening: Opening, stream: RankStream, layout: bytes) -> None:
        self.coordinator = coordinator
        self.run, self.rank, self.stream = opening.run, opening.rank, stream
        self.tables, self.shards = opening.tables, opening.shards
        self.slots = {table.name: slot for slot, table in enumerate(opening.tables)}
        self.changed: ChangedRows | None = None
        self._takes_changes = opening.takes_changes
        self._model = coordinator.model
        self._layout = layout
        self._claim = opening.claim
        self._part: tuple[OpenCut, RankPart] | None = None
        self._unwritten = UnwrittenChunks(self._model.store.queue)

    def report(self, kind: EventKind, text: str, error: Exception | None = None) -> None:
        """Report an event of this rank."""
        self.coordinator.events.emit(kind, text, error, model=self._model.name, rank=self.rank, run=self.run.id)

    def end(self, reason: str, refusal: Exception | None = None) -> None:
        """Record that the stream ended, and why; `refusal` is the error that the rank got, if any."""
        if isinstance(refusal, InvalidInput):
            self.coordinator.refuse(refusal)
        self.leave(reason)
        self.report(EventKind.RANK_LEFT, "" if refusal else self.stream.left, refusal)

    def leave(self, reason: str) -> None:
        """Record that the rank has finished, or left for a reason, which may be empty."""
        text = "it has finished" if self.stream.finished else reason or "its stream ended without a goodbye"
        self.coordinator.leave(self.stream, text)

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
        """Find the rows that were published since the version that the run continues, and those lost to damage."""
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
        return ChangedRows.find(since, upto, list(tables), self.shards, tables.missing)

    @property
    def deletes(self) -> list[DeleteRequest]:
        """The deletes that this rank must carry out now."""
        return self.coordinator.deletes.handed(self.tables) if self.stream.takes_deletes else []

    @property
    def sealed(self) -> Position:
        """The last sealed position."""
        return self._model.sealed

    def add(self, step: int, slot: int, batch: RowBatch) -> None:
        """Add rows to this rank's part of a cut. Call `wait_for_room` afterwards."""
        batch.check()
        batch.check_digests()
        if batch.digests is None and not batch.deleted:
            batch = encoded(batch.digested())
        norms = self.coordinator.guard.look(batch)
        if norms and norms.excess and not self.coordinator.guard.quarantines:
            raise InvalidInput(f"{norms.excess}; the cut of step {step} is refused")
        if (part_of := self._part_of(step)) is None:
            return
        open_cut, part = part_of
        record = pack_rows(slot, batch, part.layout)
        size = sum(map(len, record))
        open_cut.cut.add(part, slot, batch, size, norms)
        self.coordinator.check_room(open_cut)
        appended = self._model.store.append(open_cut.cut.version, self.rank, part.records, record)
        part.records += 1
        self._unwritten.add(appended, size)

    async def wait_for_room(self) -> None:
        """Wait until this stream may send more rows. Meanwhile another stream may begin the part anew."""
        try:
            await self._unwritten.wait_for_room()
        except LogFull:
            if self._part and self.coordinator.sessions.get(self.rank) is self.stream:
                self.coordinator.check_room(self._part[0], refused=True)
            raise

    async def close(self, end: PartEnd) -> Position:
        """Close this rank's part, and wait until the cut is durable and applied; return its position."""
        if part_of := self._part_of(end.step):
            open_cut, part = part_of
            open_cut.cut.close(part, end, self._unwritten.take())
            self._part = None
        answer = self.coordinator.close(self.stream, end, repeated=part_of is None)
        self._claim = await asyncio.shield(answer)  # Because other ranks wait for it too.
        self.changed = None  # The part contained all of it.
        return self._claim

    def finish(self) -> None:
        """Record the goodbye of the rank, after which it publishes nothing."""
        if self._part:
            raise InvalidInput(f"goodbye within the part of step {self._part[0].cut.step}: close it first")
        self.stream.finished = True

    def _part_of(self, step: int) -> tuple[OpenCut, RankPart] | None:
        """This rank's part of the cut after a step, which may begin now; None if it is whole already."""
        open_cut = self.coordinator.receive(self.stream, step)
        if open_cut is None:
            return None
        if self._part and self._part[0] is open_cut:
            return self._part
        cut, decision, missing = open_cut.cut, self.decision, None
        if decision.since is not None:  # The part must contain the rows that were published since.
            newest, changed = self._model.seals.newest_version, self.changed
            if changed is None or (changed.since, changed.upto) != (decision.since, newest):
                raise Superseded(f"version {newest} was sealed after this stream was opened: open it again")
            missing = MissingRows(changed)
        cut.announce(self.tables)
        # It drops its records of an earlier stream, and writes the layout of its rows.
        self._unwritten.add(self._model.store.drop_part(cut.version, self.rank), 0)
        layout = self._model.store.use_layout(self._layout, self.shards, cut.version)
        self._unwritten.add(layout.written, 0)
        part = cut.begin(
            self.rank,
            self.shards,
            must_be_full=not decision.yes,
            missing=missing,
            layout=layout.number,
            log_bytes=layout.log_bytes,
        )
        self._part = open_cut, part
        return self._part


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
        """Wait for the oldest writes until the others fit into the memory of this stream and of all streams."""
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

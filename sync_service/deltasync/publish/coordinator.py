"""Taking cuts from the ranks of a run: who may, in which order, and when a cut is sealed."""

import asyncio
import logging
import time
from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from deltasync.core.errors import Contradiction, DeltasyncError, InvalidInput, Superseded
from deltasync.core.names import check_name
from deltasync.core.position import Decision, Position
from deltasync.core.seal import Seal
from deltasync.core.tables import Shard, TableSpec
from deltasync.feeds.model import Model
from deltasync.publish.cuts import Cut, RankPart
from deltasync.publish.runs import Run, continues, may_publish
from deltasync.storage.log import Buffer
from deltasync.storage.records import pack_rows
from deltasync.v1 import publish_pb2
from deltasync.wire.messages import position_from_message, shards_from_open, table_from_message
from deltasync.wire.rows import MAX_CHUNK_BYTES, check_rows, decode_rows

logger = logging.getLogger(__name__)

MAX_WORLD_SIZE = 65_536
# Chunks handed to the log and not yet on disk, per rank: what bounds the service's memory while a part arrives.
_UNWRITTEN_CHUNKS = 16


@dataclass(frozen=True)
class Opening:
    """What a rank says of itself: right in itself, if not yet compared with what the service holds."""

    message: publish_pb2.PublishOpen
    run: Run
    tables: list[TableSpec]
    shards: list[Shard]


def check_open(message: publish_pb2.PublishOpen) -> Opening:
    """Check the message that opens a stream.

    Raises:
        InvalidInput: a field of the message can never be right.
    """
    check_name("model", message.model)
    tables = _checked_tables(message)
    return Opening(message, _checked_run(message), tables, shards_from_open(message, tables))


@dataclass
class OpenCut:
    """The cut under way, and what its ranks wait for."""

    cut: Cut
    sealed: asyncio.Future[Position]


class CutCoordinator:
    """The ranks that publish one model."""

    def __init__(self, model: Model, tasks: asyncio.TaskGroup) -> None:
        self.model = model
        self._tasks = tasks
        self.run = _run_of(model.sealed)
        self.sessions: dict[int, PublishSession] = {}
        self.open_cut: OpenCut | None = None
        self.rows = self.bytes = 0  # Of the cuts sealed since the service started.
        self._applying: asyncio.Task[None] | None = None
        self._sealing: asyncio.Task[None] | None = None

    async def join(self, opening: Opening) -> "PublishSession":
        """Let a rank in. A newer stream of the same rank, or a newer run, takes over.

        Raises:
            Contradiction: the run, its size or a table differs from what the service holds.
        """
        self._check(opening.run)
        await self.model.add_tables(opening.tables)
        self._take_over(opening.run)
        session = PublishSession(self, opening)
        self.sessions[session.rank] = session
        logger.info("rank joined: model=%s rank=%d %s", self.model.name, session.rank, session.decision.reason)
        return session

    def cut_of(self, session: "PublishSession", step: int) -> OpenCut:
        """The cut after `step`; a cut of an earlier step that was never finished is abandoned.

        Raises:
            Contradiction: the cut under way is of a later step.
            Superseded: a cut is just being sealed.
        """
        current = self.open_cut
        if current and current.cut.complete:
            raise Superseded(f"part of step {step}, but step {current.cut.step} is just being sealed")
        if current and step == current.cut.step:
            return current
        if current and step < current.cut.step:
            raise Contradiction(f"part of step {step}, but the cut of step {current.cut.step} is under way")
        self.abandon(f"abandoned for the cut of step {step}")
        cut = Cut(self.model.sealed_version + 1, step, session.run)
        self.open_cut = OpenCut(cut, asyncio.get_running_loop().create_future())
        return self.open_cut

    def abandon(self, reason: str) -> None:
        """Give up the cut under way, if any; nothing is lost, since no rank's cursor has moved."""
        if self.open_cut and not self.open_cut.cut.complete:
            _fail(self.open_cut, Superseded(f"cut of step {self.open_cut.cut.step}: {reason}"))
            self.open_cut = None

    def seal_when_complete(self) -> None:
        """Begin to seal the cut under way once its last part is closed."""
        if self.open_cut and self.open_cut.cut.complete:
            # In a task of its own: a rank that disconnects now must not stop it half way.
            self._sealing = self._tasks.create_task(self._seal(self.open_cut))

    async def idle(self) -> None:
        """Wait until no cut is under way."""
        while self.open_cut:
            await asyncio.wait([self.open_cut.sealed])

    async def drain(self) -> None:
        """Wait until what is being sealed and applied is done."""
        if self._sealing:
            await self._sealing  # Which begins to apply.
        if self._applying:
            await self._applying

    def _check(self, run: Run) -> Decision:
        decision = may_publish(run, self.run, time.time_ns())
        if not decision.yes:
            raise Contradiction(decision.reason)
        return decision

    def _take_over(self, run: Run) -> None:
        decision = self._check(run)
        if self.run is None or run.id != self.run.id:
            self.abandon(decision.reason)
            self.sessions.clear()
        self.run = run

    async def _seal(self, current: OpenCut) -> None:
        try:
            position = await self._sealed(current.cut)
        except DeltasyncError as error:
            _fail(current, error)
        else:
            current.sealed.set_result(position)
        finally:
            self.open_cut = None

    async def _sealed(self, cut: Cut) -> Position:
        if cut.must_be_full:
            cut.check_coverage()
        if self._applying:
            await self._applying
        seal = _seal_of(cut)
        await asyncio.wrap_future(self.model.store.seal(seal))
        self.model.seals.append(seal)
        self.model.published |= cut.tables_with_rows
        self.rows += seal.rows
        self.bytes += seal.bytes
        self._applying = self._tasks.create_task(self.model.advance(seal, cut.rows_in_memory()))
        return Position(self.model.history, seal.version)


class PublishSession:
    """One rank's stream."""

    def __init__(self, coordinator: CutCoordinator, opening: Opening) -> None:
        self.run = opening.run
        self.rank = opening.message.rank
        self.tables = opening.tables
        self._coordinator = coordinator
        self._model = coordinator.model
        self._header = opening.message.SerializeToString()
        self._claim = position_from_message(opening.message.continues)
        self._shards = opening.shards
        self._part: tuple[OpenCut, RankPart] | None = None
        self._unwritten: deque[Future[None]] = deque()

    @property
    def decision(self) -> Decision:
        """Whether the run continues the published history as it is now."""
        model = self._model
        return continues(self.run, self._claim, model.history, model.sealed, model.unpublished(self.tables))

    @property
    def head(self) -> Position:
        """The last sealed position."""
        return Position(self._model.history, self._model.sealed_version)

    async def add(self, chunk: publish_pb2.PartChunk) -> None:
        """Take some rows of this rank's part.

        Raises:
            InvalidInput: the rows do not fit what the rank announced.
            Superseded: a newer stream, run or cut has taken over.
        """
        batch = decode_rows(chunk.rows, self._shards)
        if batch.nbytes > MAX_CHUNK_BYTES:
            raise InvalidInput(
                f"a chunk of {batch.nbytes} bytes of ids and values, at most {MAX_CHUNK_BYTES} are allowed"
            )
        check_rows(batch)
        if self._sealed_before(chunk.step) or self._closed_before(chunk.step):
            return
        open_cut, part = self._part_of(chunk.step)
        part.add(chunk.rows.slot, batch.ids)
        open_cut.cut.keep(part, batch)
        self._append(open_cut.cut, part, *pack_rows(chunk.rows.slot, batch.ids, batch.values))
        # Not before: while this waits, another stream may begin the part anew.
        await self._wait_written(_UNWRITTEN_CHUNKS)

    async def close(self, close: publish_pb2.PartClose) -> Position:
        """End this rank's part; the position the cut was sealed at, once it is durable.

        Raises:
            InvalidInput: the part is not what its close says.
            ResyncRequired: the run must publish every row first, and this part does not.
            Contradiction: the ranks' shards do not make up whole tables, or the step is an old one.
            Superseded: a newer stream, run or cut has taken over.
        """
        self._claim = await self._closed(close)
        return self._claim

    async def _closed(self, close: publish_pb2.PartClose) -> Position:
        if sealed := self._sealed_before(close.step):
            return Position(self._model.history, sealed.version)
        if open_cut := self._closed_before(close.step):
            return await asyncio.shield(open_cut.sealed)
        open_cut, part = self._part_of(close.step)
        await self._wait_written(0)
        self._check_current()
        open_cut.cut.close(part, rows=close.rows, full=close.full, step_end_unix_ns=close.step_end_unix_ns)
        self._part = None
        self._coordinator.seal_when_complete()
        return await asyncio.shield(open_cut.sealed)

    def _sealed_before(self, step: int) -> Seal | None:
        """The seal of the cut after `step`, if it came through before: its answer may have been lost."""
        self._check_current()
        sealed = self._model.sealed
        if sealed is None or sealed.run != self.run.id or step > sealed.step:
            return None
        if step < sealed.step:
            raise Contradiction(f"part of step {step}, but step {sealed.step} of this run is published already")
        return sealed

    def _closed_before(self, step: int) -> OpenCut | None:
        """The cut after `step`, if this rank closed its part of it on an earlier stream."""
        current = self._coordinator.open_cut
        ours = current and current.cut.run == self.run and current.cut.step == step
        return current if current and ours and current.cut.closed_by(self.rank) else None

    def _part_of(self, step: int) -> tuple[OpenCut, RankPart]:
        open_cut = self._coordinator.cut_of(self, step)
        if self._part is None or self._part[0] is not open_cut:
            open_cut.cut.announce(self.tables)
            part = open_cut.cut.begin(self.rank, self._shards, must_be_full=not self.decision.yes)
            self._part = (open_cut, part)
            dropped = self._model.store.drop_part(open_cut.cut.version, self.rank)
            self._unwritten.append(dropped)
            self._append(open_cut.cut, part, self._header)
        return self._part

    def _append(self, cut: Cut, part: RankPart, *payload: Buffer) -> None:
        number, part.records = part.records, part.records + 1
        part.log_bytes += sum(memoryview(piece).nbytes for piece in payload)
        appended = self._model.store.append(cut.version, self.rank, number, *payload)
        self._unwritten.append(appended)

    async def _wait_written(self, but: int) -> None:
        while len(self._unwritten) > but:
            await asyncio.wrap_future(self._unwritten.popleft())

    def _check_current(self) -> None:
        if self._coordinator.sessions.get(self.rank) is not self:
            raise Superseded(f"a newer stream of rank {self.rank}, or a newer run, has taken over")


def _fail(open_cut: OpenCut, error: Exception) -> None:
    if not open_cut.sealed.done():
        open_cut.sealed.set_exception(error)
        open_cut.sealed.exception()  # Marks it as seen: perhaps no rank is waiting any more.


def _seal_of(cut: Cut) -> Seal:
    return Seal(
        version=cut.version,
        step=cut.step,
        run=cut.run.id,
        run_started_unix_ns=cut.run.started_unix_ns,
        world_size=cut.run.world_size,
        rows=cut.rows,
        bytes=cut.bytes,
        log_bytes=cut.log_bytes,
        step_end_unix_ns=cut.step_end_unix_ns,
        sealed_unix_ns=time.time_ns(),
        resync=cut.must_be_full,
    )


def _run_of(seal: Seal | None) -> Run | None:
    return Run(seal.run, seal.run_started_unix_ns, seal.world_size) if seal else None


def _checked_run(message: publish_pb2.PublishOpen) -> Run:
    if not 1 <= len(message.run) <= 128:
        raise InvalidInput(f"run id {message.run!r}: use 1 to 128 characters")
    if not 1 <= message.world_size <= MAX_WORLD_SIZE:
        raise InvalidInput(f"world size {message.world_size}: expected 1 to {MAX_WORLD_SIZE}")
    if message.rank >= message.world_size:
        raise InvalidInput(f"rank {message.rank} of a world of {message.world_size}: ranks count from 0")
    return Run(message.run, message.run_started_unix_ns, message.world_size)


def _checked_tables(message: publish_pb2.PublishOpen) -> list[TableSpec]:
    tables = [table_from_message(table) for table in message.tables]
    if not tables:
        raise InvalidInput("the run announces no tables: describe at least one")
    known: set[str] = set()
    for table in tables:
        if table.name in known:
            raise InvalidInput(f"table {table.name!r} is announced twice: tables need distinct names")
        known.add(table.name)
    return tables

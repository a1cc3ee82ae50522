"""One rank's stream: its parts, chunk by chunk, until each is closed and its cut sealed."""

import asyncio
from collections import deque
from concurrent.futures import Future

from deltasync.core.delete_request import DeleteRequest
from deltasync.core.errors import Contradiction, InvalidInput, Superseded
from deltasync.core.event_time import check_event_time
from deltasync.core.events import EventKind
from deltasync.core.position import Decision, Position
from deltasync.core.rows import Ids, RowBatch
from deltasync.core.seal import Seal
from deltasync.feeds.damage import IdsByTable, without
from deltasync.publish.coordinator import CutCoordinator, OpenCut
from deltasync.publish.cut import Cut, RankPart
from deltasync.publish.opening import Opening
from deltasync.publish.runs import continues
from deltasync.storage.records import pack_layout, packed_bytes
from deltasync.v1 import publish_pb2, tables_pb2
from deltasync.wire.messages import event_time_from_message, position_from_message
from deltasync.wire.row_messages import MAX_CHUNK_BYTES, decode_rows

# Chunks per rank that are handed to the log and not on disk yet: bounds the memory that an arriving part takes.
_UNWRITTEN_CHUNKS = 16
# Rows that a rank is asked for at once.
_WANTED_IDS = 131_072


async def open_session(coordinator: CutCoordinator, opening: Opening) -> "PublishSession":
    """Let a rank in. A newer stream of the same rank, or a newer run, takes over.

    Raises:
        Contradiction: the run, its size or a table differs from what the service holds.
        StorageFailed: there is no room for a table.
    """
    layout = await asyncio.to_thread(pack_layout, opening.tables, opening.shards)
    await coordinator.admit(opening.run, opening.tables)
    session = PublishSession(coordinator, opening, layout)
    coordinator.sessions[session.rank] = session
    session.say(EventKind.RANK_JOINED, session.decision.reason)
    return session


class PublishSession:
    """One rank's stream, once the rank has joined. Used in the event loop."""

    def __init__(self, coordinator: CutCoordinator, opening: Opening, layout: bytes) -> None:
        self.run = opening.run
        self.rank = opening.message.rank
        self.tables = opening.tables
        self.slots = {table.name: slot for slot, table in enumerate(opening.tables)}
        self.takes_deletes = opening.message.takes_deletes
        self.ended = False
        self._coordinator = coordinator
        self._model = coordinator.model
        self._layout = layout
        self._claim = position_from_message(opening.message.continues)
        self._shards = opening.shards
        self._knows_deletes = opening.knows_deletes
        self._part: tuple[OpenCut, RankPart] | None = None
        self._asked: IdsByTable = {}
        self._unwritten: deque[Future[None]] = deque()

    def say(self, kind: EventKind, text: str) -> None:
        """Tell what happens to this rank."""
        self._coordinator.events.emit(kind, text, model=self._model.name, rank=self.rank, run=self.run.id)

    def end(self, text: str) -> None:
        """Note that the stream is over, and why."""
        self.ended = True
        self.say(EventKind.RANK_LEFT, text)

    @property
    def decision(self) -> Decision:
        """Whether the run continues the published history as it is now."""
        model = self._model
        return continues(self.run, self._claim, model.history, model.seals.newest)

    @property
    def deletes(self) -> list[DeleteRequest]:
        """What this rank is asked to delete by now."""
        return self._coordinator.deletes.handed(self.tables) if self.takes_deletes else []

    @property
    def wanted(self) -> list[tuple[int, Ids]]:
        """What this rank is asked to publish again: rows of which the service holds other bits, by slot."""
        return self._slotted(self._first(self._model.damage.rows))

    def ask(self) -> list[tuple[int, Ids]]:
        """The same with the answer to a part, but for what the answer before has asked for: this part has brought
        it, and it may not be applied yet.
        """
        self._asked = self._first(without(self._model.damage.rows, self._asked))
        return self._slotted(self._asked)

    def _first(self, damage: IdsByTable) -> IdsByTable:
        room, first = _WANTED_IDS, dict[str, Ids]()
        for name in damage.keys() & self.slots.keys():
            first[name] = damage[name][:room]
            room -= len(first[name])
        return first

    def _slotted(self, rows: IdsByTable) -> list[tuple[int, Ids]]:
        return [(self.slots[name], ids) for name, ids in rows.items() if len(ids)]

    @property
    def sealed(self) -> Position:
        """The last sealed position."""
        return Position(self._model.history, self._model.seals.newest_version)

    async def take(self, part: publish_pb2.WholePart) -> Position:
        """Take this rank's part, whole: see `add` and `close`."""
        _check_size("part", sum(len(rows.ids) + len(rows.values) for rows in part.rows))
        for rows in part.rows:
            await self.add(part.close.step, rows)
        return await self.close(part.close)

    async def add(self, step: int, rows: tables_pb2.Rows) -> None:
        """Take some rows of this rank's part of the cut after `step`.

        Raises:
            InvalidInput: the rows do not fit what the rank announced.
            Superseded: a newer stream, run or cut has taken over.
        """
        batch = decode_rows(rows, self._shards)
        _check_size("chunk", batch.nbytes)
        batch.check()
        batch.check_digests()
        batch = batch.digested()
        if self._sealed_before(step) or self._closed_before(step):
            return
        open_cut, part = self._part_of(step)
        part.add(rows.slot, batch)
        open_cut.cut.keep(part, batch)
        self._append(open_cut.cut, part, rows.slot, batch)
        # Last: while this waits, another stream may begin the part anew.
        while len(self._unwritten) > _UNWRITTEN_CHUNKS:
            await asyncio.wrap_future(self._unwritten.popleft())

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
        event_time, differing = event_time_from_message(close), self._differing(close)
        check_event_time(event_time)
        open_cut.cut.close(
            part,
            rows=close.rows,
            full=close.full,
            step_end_unix_ns=close.step_end_unix_ns,
            deletes=frozenset(close.deletes),
            event_time_unix_ns=event_time,
            unwritten=tuple(self._unwritten),
        )
        self._unwritten.clear()
        self._coordinator.differing |= differing
        self._part = None
        self._coordinator.seal_when_complete()
        return await asyncio.shield(open_cut.sealed)

    def _differing(self, close: publish_pb2.PartClose) -> set[str]:
        if unknown := [index for index in close.differing if index >= len(self.tables)]:
            raise InvalidInput(
                f"table {unknown[0]} differs between ranks, but only {len(self.tables)} were announced"
            )
        return {self.tables[index].name for index in close.differing}

    def _sealed_before(self, step: int) -> Seal | None:
        """The seal of the cut after `step`, if it was sealed before: the answer may have been lost."""
        self._check_current()
        sealed = self._model.seals.newest
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
        open_cut = self._coordinator.cut_of(self.run, step)
        if self._part is None or self._part[0] is not open_cut:
            open_cut.cut.announce(self.tables)
            part = open_cut.cut.begin(
                self.rank, self._shards, must_be_full=not self.decision.yes, knows_deletes=self._knows_deletes
            )
            self._part = (open_cut, part)
            dropped = self._model.store.drop_part(open_cut.cut.version, self.rank)
            layout = self._model.store.use_layout(self._layout, self._shards, open_cut.cut.version)
            self._unwritten.extend((dropped, layout.written))
            part.layout, part.log_bytes = layout.number, layout.log_bytes
        return self._part

    def _append(self, cut: Cut, part: RankPart, slot: int, rows: RowBatch) -> None:
        index, part.records = part.records, part.records + 1
        part.log_bytes += packed_bytes(rows)
        appended = self._model.store.append(cut.version, self.rank, index, slot, rows, part.layout)
        self._unwritten.append(appended)

    def _check_current(self) -> None:
        if self._coordinator.sessions.get(self.rank) is not self:
            raise Superseded(f"a newer stream of rank {self.rank}, or a newer run, has taken over")


def _check_size(what: str, size: int) -> None:
    if size > MAX_CHUNK_BYTES:
        raise InvalidInput(f"a {what} of {size} bytes of ids and values, at most {MAX_CHUNK_BYTES} are allowed")

"""The gRPC service for trainers."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import grpc.aio

from deltasync.access.limits import Limits
from deltasync.access.roles import caller, current_call
from deltasync.api.errors import abort
from deltasync.api.live_stream import LiveStream
from deltasync.base.errors import DeltasyncError, InvalidInput
from deltasync.base.events import EventKind, Events
from deltasync.core.position import Position
from deltasync.cuts.coordinator import CutCoordinator
from deltasync.cuts.messages import check_close, check_counts, check_open
from deltasync.cuts.session import PublishSession, open_session
from deltasync.service.models import Publishing
from deltasync.v1 import publish_pb2, publish_pb2_grpc, tables_pb2
from deltasync.wire.messages import changed_to_messages, position_to_message
from deltasync.wire.row_messages import MAX_CHUNK_BYTES, PublishRequest, ReceivedRows

_TABLES_AT_ONCE = 64
_ORDER = "expected one open message, then chunks, parts and a goodbye"


class PublishServicer(publish_pb2_grpc.PublishServiceServicer):
    """Receives cuts from the ranks of a run."""

    def __init__(self, publishing: Publishing, limits: Limits, events: Events, silence_seconds: float) -> None:
        """`silence_seconds`: see `ServiceOptions`."""
        self._publishing = publishing
        self._limits = limits
        self._events = events
        alive = tables_pb2.Alive(within_seconds=silence_seconds)
        self._alive = publish_pb2.PublishResponse(alive=alive)

    async def Publish(  # type: ignore[override]  # gRPC also accepts this kind of handler
        self,
        request_iterator: AsyncIterator[PublishRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> None:
        """Serve the stream of one rank."""
        stream, refusal = _RankStream(self._publishing, self._limits, self._events), None
        try:
            live = LiveStream(context, request_iterator, self._alive)
            await live.answer(stream.answers(live))
        except DeltasyncError as error:
            refusal = error
            await abort(context, error)
        finally:
            stream.end(refusal)


class _RankStream:
    """One rank's stream, from its open to its end."""

    def __init__(self, publishing: Publishing, limits: Limits, events: Events) -> None:
        self._publishing = publishing
        self._limits = limits
        self._events = events
        self._coordinator: CutCoordinator | None = None
        self._session: PublishSession | None = None
        self._model = ""

    async def answers(
        self, requests: AsyncIterator[PublishRequest]
    ) -> AsyncGenerator[publish_pb2.PublishResponse, None]:
        """Yield the answers to a rank's messages."""
        first = await anext(requests, None)
        if first is None:
            return
        if isinstance(first, ReceivedRows) or not first.HasField("open"):
            raise InvalidInput(_ORDER)
        session = await self._open(first.open)
        del first  # It may be large, and the stream lives long.
        yield _opened(session)
        for message in _changed(session):
            yield message
        async for request in requests:
            if isinstance(request, ReceivedRows):
                if position := await add(session, request):
                    yield _sealed(session, request.step, position)
            elif request.HasField("close"):
                position = await session.close(check_close(request.close, session.tables))
                yield _sealed(session, request.close.step, position)
            elif request.HasField("goodbye"):
                session.finish()
                return
            else:
                raise InvalidInput(_ORDER)
            del request  # Otherwise its memory would stay in use until the next one.

    def end(self, refusal: DeltasyncError | None) -> None:
        """Report why the rank's stream ended, or why the service refused it."""
        if self._coordinator:
            self._publishing.leave(self._coordinator)
        if self._session:
            self._session.end(str(refusal or current_call().error or ""), refusal)
        elif refusal:
            self._events.emit(EventKind.PUBLISHER_REFUSED, error=refusal, model=self._model)

    async def _open(self, message: publish_pb2.PublishOpen) -> PublishSession:
        self._model = message.model
        check_counts(message, self._limits)
        opening = await asyncio.to_thread(check_open, message, caller().name)
        self._limits.check("rows_per_table", max(table.rows for table in opening.tables))
        self._coordinator = await self._publishing.open(message.model)
        self._session = await open_session(self._coordinator, opening)
        return self._session


async def add(session: PublishSession, received: ReceivedRows[publish_pb2.PartClose]) -> Position | None:
    """Add rows to a rank's part of a cut. Returns the position of the cut if its part came whole."""
    size = 0
    for number, (slot, columns) in enumerate(received.rows, 1):
        size += columns.size
        if size > MAX_CHUNK_BYTES:
            what = f"a {'part' if received.end else 'chunk'} of at least {size} bytes of ids and values"
            raise InvalidInput(f"{what}: at most {MAX_CHUNK_BYTES} are allowed")
        session.add(received.step, slot, columns.rows_of(slot, session.shards))
        if number % _TABLES_AT_ONCE == 0:  # Many tables take long: let other streams run.
            await asyncio.sleep(0)
    await session.wait_for_room()
    return await session.close(check_close(received.end, session.tables)) if received.end else None


def _opened(session: PublishSession) -> publish_pb2.PublishResponse:
    decision = session.decision
    opened = publish_pb2.PublishOpened(
        head=position_to_message(session.sealed),
        continues=decision.yes,
        reason=decision.reason,
        tables=len(session.tables),
        deletes=_deletes(session),
        since=session.changed.since if session.changed else 0,
    )
    return publish_pb2.PublishResponse(opened=opened)


def _changed(session: PublishSession) -> Iterator[publish_pb2.PublishResponse]:
    if session.changed:
        tables = [(session.slots[name], ids) for name, ids in session.changed.tables.items()]
        for message in changed_to_messages(tables):
            yield publish_pb2.PublishResponse(changed=message)


def _sealed(session: PublishSession, step: int, position: Position) -> publish_pb2.PublishResponse:
    sealed = publish_pb2.CutSealed(
        step=step,
        position=position_to_message(position),
        deletes=_deletes(session),
        quarantine=session.coordinator.quarantine,
    )
    return publish_pb2.PublishResponse(sealed=sealed)


def _deletes(session: PublishSession) -> list[publish_pb2.DeleteRequest]:
    return [
        publish_pb2.DeleteRequest(number=each.number, table=session.slots[each.table], ids=each.ids.tolist())
        for each in session.deletes
    ]

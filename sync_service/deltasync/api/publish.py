"""The gRPC side of publishing."""

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from deltasync.api.call_errors import abort
from deltasync.core.errors import DeltasyncError, InvalidInput
from deltasync.publish.opening import check_open
from deltasync.publish.session import PublishSession, open_session
from deltasync.service.service import Service
from deltasync.v1 import publish_pb2, publish_pb2_grpc
from deltasync.wire.messages import position_to_message


class PublishServicer(publish_pb2_grpc.PublishServiceServicer):
    """Takes cuts from the ranks of a run."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def Publish(
        self,
        request_iterator: AsyncIterator[publish_pb2.PublishRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[publish_pb2.PublishResponse]:
        """Answer one rank's stream."""
        try:
            async for response in self._answers(request_iterator):
                yield response
        except DeltasyncError as error:
            await abort(context, error)

    async def _answers(
        self, requests: AsyncIterator[publish_pb2.PublishRequest]
    ) -> AsyncIterator[publish_pb2.PublishResponse]:
        session: PublishSession | None = None
        async for request in requests:
            kind = request.WhichOneof("message")
            if (kind == "open") != (session is None) or kind is None:
                raise InvalidInput("a stream begins with one open message, then chunks and closes follow")
            if session is None:
                opening = check_open(request.open)
                session = await open_session(self._service.coordinator(request.open.model), opening)
                yield _opened(session)
            elif kind == "chunk":
                await session.add(request.chunk)
            else:
                position = await session.close(request.close)
                sealed = publish_pb2.CutSealed(step=request.close.step, position=position_to_message(position))
                yield publish_pb2.PublishResponse(sealed=sealed)


def _opened(session: PublishSession) -> publish_pb2.PublishResponse:
    decision = session.decision
    opened = publish_pb2.PublishOpened(
        head=position_to_message(session.sealed),
        continues=decision.yes,
        reason=decision.reason,
        tables=len(session.tables),
    )
    return publish_pb2.PublishResponse(opened=opened)

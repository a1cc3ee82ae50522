"""Messages that are written once and sent to many."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from deltasync.wire.row_messages import serialized


class WrittenMessages(grpc.aio.ServerInterceptor):
    """Lets handlers answer with messages that are bytes already."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of a call, whose bytes are sent as they are."""
        handler = await continuation(handler_call_details)
        return handler and handler._replace(response_serializer=serialized)

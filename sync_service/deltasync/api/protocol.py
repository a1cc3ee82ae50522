"""Refusing calls of clients that speak another protocol than this service."""

from collections.abc import Awaitable, Callable
from typing import Any

import grpc.aio

from deltasync.api.call_errors import abort, as_stream
from deltasync.core.errors import DeltasyncError
from deltasync.wire.protocol import check_protocol

# Health checks and reflection have a protocol of their own.
_METHODS = "/deltasync."


class ProtocolInterceptor(grpc.aio.ServerInterceptor):
    """Lets a call begin only if its client speaks the protocol of this service."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of a call, or one that refuses it."""
        handler = await continuation(handler_call_details)
        if handler is None or not handler_call_details.method.startswith(_METHODS):
            return handler
        try:
            check_protocol(dict(handler_call_details.invocation_metadata or ()))
        except DeltasyncError as error:
            return _refusing(handler, error)
        return handler


def _refusing(handler: Any, error: DeltasyncError) -> Any:
    async def refuse(_requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error)

    # It asks for no message: one that this service cannot read must not be answered in other words.
    return as_stream(handler, refuse)

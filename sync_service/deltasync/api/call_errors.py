"""Ending gRPC calls with our errors: what was raised on purpose, and bytes that are no protobuf."""

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc.aio
from google.protobuf.message import DecodeError

from deltasync.core.errors import DeltasyncError, InvalidInput
from deltasync.wire.error_codes import ERROR_KEY, grpc_code


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: DeltasyncError) -> NoReturn:
    """End a call with an error."""
    await context.abort(grpc_code(error), str(error), ((ERROR_KEY, type(error).__name__),))
    raise error  # abort() itself raises; this tells the type checker so.


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Ends a call of one message with the error that its handler raised.

    Makes bytes that cannot be decoded the sender's fault; gRPC by itself answers UNKNOWN, with a traceback.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of a call, with another decoder, and an end of its own where it answers once."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        decode = _decoder(handler.request_deserializer, handler_call_details.method)
        if handler.unary_unary is None:
            # Raised where the handler takes the next message, and answered as any error there.
            return handler._replace(request_deserializer=decode)

        async def unary_unary(request: bytes, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
            try:
                return await handler.unary_unary(decode(request), context)
            except DeltasyncError as error:
                await abort(context, error)

        return handler._replace(request_deserializer=None, unary_unary=unary_unary)


def _decoder(decode: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
    def decoded(request: bytes) -> Any:
        try:
            return decode(request)
        except DecodeError as error:
            raise InvalidInput(f"{method}: {len(request)} bytes that are no protobuf of its type") from error

    return decoded

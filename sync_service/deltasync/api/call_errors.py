"""Ending gRPC calls and HTTP requests with our errors: what was raised on purpose, and bytes that are no protobuf.

Here alone errors leave the service: what peers are told is bounded, on one line, and without what they may not
read.
"""

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc.aio
from google.protobuf.message import DecodeError
from starlette.responses import JSONResponse

from deltasync.api.caller import current_call, may_read
from deltasync.core.errors import DeltasyncError, InvalidInput, NotOwner, StorageFailed
from deltasync.core.words import printable
from deltasync.wire.error_codes import error_metadata, error_name, grpc_code, http_status

# gRPC sends all metadata of an answer in at most 8 kB, and what is not ASCII in three bytes for each of its own.
_LONGEST_BYTES = 1_900


def told(error: DeltasyncError) -> str:
    """What whoever calls is told of an error: less than 2 kB, as gRPC and JSON write it."""
    current_call().error = error
    text = printable(str(error) if may_read() else _for_all(error), _LONGEST_BYTES)
    return text if _sent_bytes(text) <= _LONGEST_BYTES else _cut(text)


def _for_all(error: DeltasyncError) -> str:
    """What may be told to those who may not read: of a disk no folder, and no size."""
    return "the service cannot keep this now; its log says why" if isinstance(error, StorageFailed) else error.text


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: DeltasyncError) -> NoReturn:
    """End a call with an error."""
    await context.abort(grpc_code(error), told(error), error_metadata(error))
    raise error  # abort() itself raises; this tells the type checker so.


def error_response(error: DeltasyncError, path: str = "") -> JSONResponse:
    """Answer a request with an error. If another process owns what it is about, send the client there.

    Args:
        error: what to answer.
        path: path and query of the request, as they came; empty if the client is not to be sent anywhere.
    """
    owner = error.owner if isinstance(error, NotOwner) else None
    location = {"Location": owner.http + path} if owner and path else {}
    status = http_status(error) if location or not isinstance(error, NotOwner) else 503
    return JSONResponse({"error": error_name(error), "message": told(error)}, status, location)


def as_stream(handler: Any, answer: Callable[..., Awaitable[None]]) -> Any:
    """A handler that answers a call of any kind as one of streams: it receives a message once it asks for one."""
    kinds = dict.fromkeys(("unary_unary", "unary_stream", "stream_unary"))
    return handler._replace(request_streaming=True, response_streaming=True, stream_stream=answer, **kinds)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Makes bytes that cannot be decoded the sender's fault, wherever the handler takes the next message; gRPC by
    itself answers UNKNOWN, with a traceback.
    """

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """The handler of a call, with another decoder."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        return handler._replace(request_deserializer=_decoder(handler.request_deserializer, handler_call_details))


def _decoder(decode: Callable[[bytes], Any], details: grpc.HandlerCallDetails) -> Callable[[bytes], Any]:
    def decoded(request: bytes) -> Any:
        try:
            return decode(request)
        except DecodeError as error:
            text = f"{details.method}: {len(request)} bytes that are no protobuf of its type"
            raise InvalidInput(text) from error

    return decoded


def _cut(text: str) -> str:
    room, kept = _LONGEST_BYTES - 3, 0
    for each in text:
        room -= _sent_bytes(each)
        if room < 0:
            break
        kept += 1
    return f"{text[:kept]}..."


def _sent_bytes(text: str) -> int:
    """How many bytes a text takes at most, where gRPC writes some as %XX, and JSON others with a backslash."""
    return sum(1 if 32 <= byte < 127 and byte not in b'%"\\' else 3 for byte in text.encode(errors="replace"))

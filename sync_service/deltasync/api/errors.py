"""Ending gRPC calls and HTTP requests with our errors, in one shape."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, NoReturn

import grpc.aio
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from google.protobuf.message import DecodeError
from starlette.exceptions import HTTPException

from deltasync.access.roles import current_call, may_read
from deltasync.base.errors import DeltasyncError, InvalidInput, NotOwner, StorageFailed
from deltasync.base.words import printable
from deltasync.wire.errors import error_metadata, error_name, grpc_code, http_status

# gRPC sends the metadata of an answer in at most 8 kB, and three bytes for each that is not ASCII.
_LONGEST_BYTES = 1_900


def message_of(error: DeltasyncError) -> str:
    """The message of an error for the current caller: less than 2 kB, as gRPC and JSON write it."""
    current_call().error = error
    text = printable(str(error) if may_read() else _for_all(error), _LONGEST_BYTES)
    return text if _sent_bytes(text) <= _LONGEST_BYTES else _cut(text)


def _for_all(error: DeltasyncError) -> str:
    """The text for callers that may not read: without the folder and the size of a disk."""
    return "the service cannot keep this now; its log says why" if isinstance(error, StorageFailed) else error.text


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: DeltasyncError) -> NoReturn:
    """End a call with an error."""
    await context.abort(grpc_code(error), message_of(error), error_metadata(error))
    raise error  # abort() itself raises; this tells the type checker so.


def error_response(error: DeltasyncError, path: str = "") -> JSONResponse:
    """Answer a request with an error, or send the client to the process that owns the model.

    Args:
        error: what to answer.
        path: path and query of the request, as they came; empty = do not send the client anywhere.
    """
    owner = error.owner if isinstance(error, NotOwner) else None
    location = {"Location": owner.http + path} if owner and path else {}
    status = http_status(error) if location or not isinstance(error, NotOwner) else 503
    return JSONResponse({"error": error_name(error), "message": message_of(error)}, status, location)


def as_stream(handler: Any, answer: Callable[..., Awaitable[None]]) -> Any:
    """A handler that answers a call of any kind as a call of streams: it receives a message when it asks for
    one.
    """
    kinds = dict.fromkeys(("unary_unary", "unary_stream", "stream_unary"))
    return handler._replace(request_streaming=True, response_streaming=True, stream_stream=answer, **kinds)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Answers InvalidInput for bytes that cannot be decoded. gRPC by itself answers UNKNOWN, with a traceback."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Give the handler of a call another decoder."""
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
    """Upper bound for the bytes of a text: gRPC writes some as %XX, JSON others with a backslash."""
    return sum(1 if 32 <= byte < 127 and byte not in b'%"\\' else 3 for byte in text.encode(errors="replace"))


# The errors for a route, or a method of a route, that does not exist.
OF_ROUTES = {404: "NotFound", 405: "InvalidInput"}


def answer_errors(app: FastAPI) -> None:
    """Make an application answer our errors."""

    @app.exception_handler(DeltasyncError)
    async def on_error(request: Request, error: DeltasyncError) -> JSONResponse:
        query = request.url.query
        path = request.scope["raw_path"].decode("latin-1")  # As it came: a name in it may have any character.
        return error_response(error, f"{path}?{query}" if query else path)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        return error_response(InvalidInput(wrong))

    @app.exception_handler(HTTPException)
    async def on_no_route(_request: Request, error: HTTPException) -> JSONResponse:
        name = OF_ROUTES.get(error.status_code, "InvalidInput")
        current_call().error = error
        text = f"{error.detail}: /openapi.json names all routes, and the methods of each"
        return JSONResponse({"error": name, "message": text}, error.status_code, error.headers)


async def answer(context: grpc.aio.ServicerContext[Any, Any], responses: AsyncGenerator[Any, None]) -> None:
    """Send the responses of a stream. If the peer leaves or cancels, this closes `responses`.

    gRPC itself, given the generator, would log an error with a traceback for a peer that left.
    """
    async with aclosing(responses):
        async for response in responses:
            try:
                await context.write(response)
            except grpc.aio.InternalError as error:  # Nothing can be sent any more.
                raise asyncio.CancelledError from error

"""Ending gRPC calls and HTTP requests with our errors, in one shape."""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc.aio
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from google.protobuf.message import DecodeError
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException

from deltasync.access.caller import current_call, may_read
from deltasync.base.errors import DeltasyncError, InvalidInput, NotOwner, StorageFailed
from deltasync.base.words import printable
from deltasync.wire.errors import error_metadata, error_name, grpc_code, http_errors, http_status

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


# Of a route, or a method of one, that there is not.
_OF_ROUTES = {404: "NotFound", 405: "InvalidInput"}


@dataclass(frozen=True)
class ErrorBody:
    """An error: its name, and what is wrong and what to do, in words."""

    error: str
    message: str


def document_errors(document: dict[str, Any]) -> dict[str, Any]:
    """An OpenAPI document with the errors that are answered: JSON also where the answer is not, and none of those
    that FastAPI has of its own.

    Told FastAPI, the errors of each route would be models, which take most of the time in which a service starts.
    """
    schemas, errors = document["components"]["schemas"], _errors()
    schemas["ErrorBody"] = TypeAdapter(ErrorBody).json_schema()
    for path in document["paths"].values():
        for operation in path.values():
            told = operation["responses"]
            told.pop("422", None)
            own = {status: _as_json(each) if status >= "400" else each for status, each in told.items()}
            operation["responses"] = dict(sorted((errors | own).items()))
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    return document


def _errors() -> dict[str, Any]:
    """What any route may answer instead, by status."""
    named = {405: [_OF_ROUTES[405]]} | http_errors()
    body = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    return {str(status): {"description": " or ".join(names), "content": body} for status, names in named.items()}


def _as_json(response: dict[str, Any]) -> dict[str, Any]:
    content = response.get("content")
    return response | {"content": {"application/json": next(iter(content.values()))}} if content else response


def answer_errors(app: FastAPI) -> None:
    """Have an application answer all errors that are raised on purpose."""

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
        name = _OF_ROUTES.get(error.status_code, "InvalidInput")
        current_call().error = error
        text = f"{error.detail}: /openapi.json names all routes, and the methods of each"
        return JSONResponse({"error": name, "message": text}, error.status_code, error.headers)


async def answer(context: grpc.aio.ServicerContext[Any, Any], responses: AsyncGenerator[Any, None]) -> None:
    """Send what a stream is to be sent. A peer that goes meanwhile closes `responses`, as one that cancels does.

    gRPC itself, given the generator, would write its own error with a traceback for who just went.
    """
    async with aclosing(responses):
        async for response in responses:
            try:
                await context.write(response)
            except grpc.aio.InternalError as error:  # Nothing can be sent any more.
                raise asyncio.CancelledError from error

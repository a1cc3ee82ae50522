"""Errors of gRPC calls and HTTP requests, in one format."""

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc.aio
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from deltasync.access.roles import current_call, may_read
from deltasync.base.errors import DeltasyncError, InvalidInput, NotOwner, StorageFailed
from deltasync.base.words import printable
from deltasync.wire.errors import error_metadata, error_name, grpc_code, http_status

# gRPC limits the metadata of an answer to 8 kB, and sends a non-ASCII byte as three.
_LONGEST_BYTES = 1_900


def message_of(error: DeltasyncError) -> str:
    """The message of an error for the current caller; at most 2 kB, as encoded by gRPC and JSON."""
    current_call().error = error
    text = printable(str(error) if may_read() else _for_all(error), _LONGEST_BYTES)
    return text if _sent_bytes(text) <= _LONGEST_BYTES else _cut(text)


def _for_all(error: DeltasyncError) -> str:
    """The text for callers without role read: without paths and disk sizes."""
    return "the service cannot store this; see its log" if isinstance(error, StorageFailed) else error.text


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: DeltasyncError) -> NoReturn:
    """End a call with an error."""
    await context.abort(grpc_code(error), message_of(error), error_metadata(error))
    raise error  # For the type checker; abort() itself raises.


def error_response(error: DeltasyncError, path: str = "") -> JSONResponse:
    """Answer a request with an error, or redirect a client that asked for `path` to the model's owner."""
    owner = error.owner if isinstance(error, NotOwner) else None
    location = {"Location": owner.http + path} if owner and path else {}
    status = http_status(error) if location or not isinstance(error, NotOwner) else 503
    return JSONResponse({"error": error_name(error), "message": message_of(error)}, status, location)


def as_stream(handler: Any, answer: Callable[..., Awaitable[None]]) -> Any:
    """Turn the handler of any kind of call into a streaming one, which receives messages on demand."""
    kinds = dict.fromkeys(("unary_unary", "unary_stream", "stream_unary"))
    return handler._replace(request_streaming=True, response_streaming=True, stream_stream=answer, **kinds)


def _cut(text: str) -> str:
    room, length = _LONGEST_BYTES - 3, 0
    for each in text:
        room -= _sent_bytes(each)
        if room < 0:
            break
        length += 1
    return f"{text[:length]}..."


def _sent_bytes(text: str) -> int:
    """Upper bound for the encoded size: gRPC writes some bytes as %XX, JSON others with a backslash."""
    return sum(1 if 32 <= byte < 127 and byte not in b'%"\\' else 3 for byte in text.encode(errors="replace"))


# The errors for a route, or a method of a route, that does not exist.
OF_ROUTES = {404: "NotFound", 405: "InvalidInput"}


def answer_errors(app: FastAPI) -> None:
    """Install the error handlers of an application."""

    @app.exception_handler(DeltasyncError)
    async def on_error(request: Request, error: DeltasyncError) -> JSONResponse:
        query = request.url.query
        path = request.scope["raw_path"].decode("latin-1")  # Raw, as a name in it may have any character.
        return error_response(error, f"{path}?{query}" if query else path)

    @app.exception_handler(RequestValidationError)
    async def on_invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {_why(each)}" for each in error.errors())
        return error_response(InvalidInput(wrong))

    @app.exception_handler(HTTPException)
    async def on_http(_request: Request, error: HTTPException) -> JSONResponse:
        name, text = OF_ROUTES.get(error.status_code), str(error.detail)
        if name is None:  # The body could not be read.
            return error_response(InvalidInput(text))
        current_call().error = error
        text = f"{text}: /openapi.json lists all routes and their methods"
        return JSONResponse({"error": name, "message": text}, error.status_code, error.headers)


def _why(error: Any) -> str:
    """The text of one of pydantic's errors; of our own, without pydantic's words for it."""
    own = error.get("ctx", {}).get("error")
    return str(own) if own else str(error["msg"])

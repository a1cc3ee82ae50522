"""How errors are answered over HTTP: all in one shape, and all in the OpenAPI document."""

from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import TypeAdapter
from starlette.exceptions import HTTPException

from deltasync.api.call_errors import error_response
from deltasync.api.caller import current_call
from deltasync.core.errors import DeltasyncError, InvalidInput
from deltasync.wire.error_codes import http_errors

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

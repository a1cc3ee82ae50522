"""The body of a request: one JSON object."""

import json
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from deltasync.core.errors import InvalidInput


async def json_object(request: Request, keys: tuple[str, ...], most_bytes: int) -> dict[str, Any]:
    """The object that a request's body is, whatever content type it names.

    Raises:
        InvalidInput: it is none, has other keys, or is larger than `most_bytes`; the message says what is wrong.
    """
    described = _parsed(await _body(request, most_bytes))
    if not isinstance(described, dict):
        raise InvalidInput("body: expected an object")
    if unknown := sorted(described.keys() - set(keys)):
        raise InvalidInput(f"body: unknown key {unknown[0]!r}; keys: {', '.join(keys)}")
    return described


async def _body(request: Request, most_bytes: int) -> bytes:
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            if len(body) > most_bytes:
                raise InvalidInput(f"body: more than {most_bytes} bytes")
    except ClientDisconnect as error:
        raise InvalidInput("body: it ends in the middle") from error
    return bytes(body)


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"body: no JSON: {error}") from error

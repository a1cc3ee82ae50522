"""The body of a request: one JSON object."""

import json
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from deltasync.core.errors import InvalidInput

MOST_BYTES = 64 << 10
# Characters on each side of one that is not right.
_SHOWN = 40


async def json_object(
    request: Request, keys: tuple[str, ...], most_bytes: int = MOST_BYTES, *, optional: bool = False
) -> dict[str, Any]:
    """The object that a request's body is, whatever content type it names.

    Args:
        request: the request.
        keys: the keys that the object may have.
        most_bytes: the largest body to take.
        optional: take an empty body for an empty object.

    Raises:
        InvalidInput: it is none, has other keys, or is larger than `most_bytes`; the message says what is wrong.
    """
    body = await _body(request, most_bytes)
    if optional and not body:
        return {}
    described = _parsed(body)
    if not isinstance(described, dict):
        raise InvalidInput("body: expected an object")
    if unknown := sorted(described.keys() - set(keys)):
        raise InvalidInput(f"body: unknown key {unknown[0]!r}; keys: {', '.join(keys)}")
    return described


def text_of(described: dict[str, Any], key: str, default: str | None = None) -> str:
    """The text that a body has under a key, or the default.

    Raises:
        InvalidInput: it has none and there is no default, or it has something else.
    """
    text = described.get(key, default)
    if not isinstance(text, str):
        raise InvalidInput(f"body: expected {key}, as a text")
    return text


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
        found = json.loads(body.decode("utf-8-sig"))
        if b"\\ud" in body.lower():
            json.dumps(found, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # JSON can name half of a character, which nothing could store or send.
        around = error.object[max(0, error.start - _SHOWN) : error.end + _SHOWN]
        raise InvalidInput(f"body: {around!r} has half of a character, a lone surrogate") from error
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"body: no JSON in UTF-8: {error}") from error
    return found

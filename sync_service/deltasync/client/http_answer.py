"""An answer over HTTP that comes in time and is not too much, whoever answers."""

import http.client
import io
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from deltasync.core.errors import DeltasyncError, NotFound, ServiceUnavailable

# The lag of a hundred thousand replicas takes less.
_MOST_BYTES = 256 << 20
_MOST_ERROR_BYTES = 16 << 20


def get_json(url: str, headers: Mapping[str, str], timeout_seconds: float) -> Any:
    """The JSON that a GET of `url` is answered with: `timeout_seconds` after it is connected, whole.

    Raises:
        NotFound: the service knows no such thing.
        ServiceUnavailable: it does not answer in time, or not with JSON.
    """
    request = urllib.request.Request(url, headers=dict(headers))  # noqa: S310  # the endpoint has seen it
    try:
        with _OPENER.open(request, timeout=timeout_seconds) as answer:
            return json.loads(_body(answer, _MOST_BYTES))
    except urllib.error.HTTPError as error:
        raise _refused(error, url) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ServiceUnavailable(
            f"{url}: {_printable(error)}: is the service running, and is this its HTTP address?"
        ) from error


class _Pieces(io.RawIOBase):
    """What a socket receives until a time: its own timeout is for each piece alone, however small that is."""

    def __init__(self, connection: socket.socket, pieces: io.RawIOBase) -> None:
        self._connection = connection
        self._pieces = pieces
        self._ends = time.monotonic() + (connection.gettimeout() or 0.0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if (left := self._ends - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(left)
        return self._pieces.readinto(buffer)

    def close(self) -> None:
        self._pieces.close()
        super().close()


class _Answer(http.client.HTTPResponse):
    """An answer of which all has to be there in the time that its connection gives to a piece."""

    def __init__(self, sock: socket.socket, *arguments: Any, **named: Any) -> None:
        super().__init__(sock, *arguments, **named)
        self.fp = io.BufferedReader(_Pieces(sock, self.fp.detach()))


class _Http(http.client.HTTPConnection):
    response_class = _Answer


class _Https(http.client.HTTPSConnection):
    response_class = _Answer


class _Connections(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_Http, req)

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_Https, req)


# Inside the trusted network there is no proxy; one meant for the package index must not be asked.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}), _Connections())


def _body(answer: Any, most: int) -> bytes:
    body: bytes = answer.read(most + 1)
    if len(body) > most:
        raise ValueError(f"an answer of more than {most} bytes")
    return body


def _refused(error: urllib.error.HTTPError, url: str) -> DeltasyncError:
    try:
        body = error.read(_MOST_ERROR_BYTES).decode(errors="replace")
        if error.code == 404 and body.startswith("{"):
            return NotFound(json.loads(body).get("message", body))
    except (OSError, http.client.HTTPException, ValueError) as broken:
        body = f"{error.reason}, and then {_printable(broken)}"
    return ServiceUnavailable(f"{url}: HTTP {error.code}: {body}")


def _printable(error: Exception) -> str:
    """An error's text, unless that holds the raw bytes of an answer that is no HTTP."""
    text = str(error).strip()
    return text if text.isprintable() else f"{type(error).__name__}: no HTTP answer"

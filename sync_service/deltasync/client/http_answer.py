"""An answer over HTTP that comes in time and is not too much, whoever answers."""

import http.client
import io
import json
import socket
import ssl
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from deltasync.client.troubles import meaning
from deltasync.core.errors import DeltasyncError, NotFound, NotOwner, NotPermitted, ServiceUnavailable
from deltasync.core.owner import Owner
from deltasync.wire.protocol import MISSING_HEADER

# The lag of a hundred thousand replicas takes less.
_MOST_BYTES = 256 << 20
_MOST_ERROR_BYTES = 16 << 20
# What is no trouble of the connection.
_KINDS: Mapping[int, type[DeltasyncError]] = {401: NotPermitted, 403: NotPermitted, 404: NotFound}


@dataclass(frozen=True)
class Tls:
    """What TLS is spoken with.

    Attributes:
        context: None = there is to be none.
        server_name: the name that the service's certificate is for; empty = the host that is asked.
        certificate: whether the context has one to show.
    """

    context: ssl.SSLContext | None = None
    server_name: str = ""
    certificate: bool = False


@dataclass(frozen=True)
class JsonAnswer:
    """What was answered.

    Attributes:
        value: the JSON.
        missing: names of processes of the service that had no part in it, as they did not answer.
    """

    value: Any
    missing: str = ""


def get_answer(url: str, headers: Mapping[str, str], timeout_seconds: float, tls: Tls | None = None) -> JsonAnswer:
    """The JSON that a GET of `url` is answered with: `timeout_seconds` after it is connected, whole.

    Raises:
        NotFound: the service knows no such thing.
        NotPermitted: it does not let who asks see it.
        NotOwner: another process of the service is to be asked.
        ServiceUnavailable: it does not answer in time, or not with JSON.
    """
    tls = tls or Tls()
    request = urllib.request.Request(url, headers=dict(headers))  # noqa: S310  # the endpoint has seen it
    try:
        with _opener(tls).open(request, timeout=timeout_seconds) as answer:
            return JsonAnswer(json.loads(_body(answer, _MOST_BYTES)), answer.headers.get(MISSING_HEADER, ""))
    except urllib.error.HTTPError as error:
        raise _refused(error, url) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        means = meaning(_printable(error), tls=tls.context is not None, certificate=tls.certificate)
        asked = "is the service running, and is this its HTTP address?"
        raise ServiceUnavailable(f"{url}: {_printable(error)}: {means or asked}") from error


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


class _Https(_Http):
    """A connection over TLS, whose peer shows a certificate for a name that need not be that of its host."""

    default_port = http.client.HTTPS_PORT

    def __init__(self, host: str, *, tls: Tls, **named: Any) -> None:
        super().__init__(host, **named)
        self._tls = tls

    def connect(self) -> None:
        super().connect()
        context = self._tls.context or ssl.create_default_context()
        self.sock = context.wrap_socket(self.sock, server_hostname=self._tls.server_name or self.host)


class _Connections(urllib.request.HTTPHandler, urllib.request.HTTPSHandler):
    def __init__(self, tls: Tls) -> None:
        super().__init__()
        self._tls = tls

    def http_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_Http, req)

    def https_open(self, req: urllib.request.Request) -> Any:
        return self.do_open(_Https, req, tls=self._tls)  # type: ignore[arg-type]


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Leads nowhere else: rights are for the service alone."""

    def redirect_request(self, *_arguments: Any, **_named: Any) -> None:
        return None


def _opener(tls: Tls) -> urllib.request.OpenerDirector:
    # Inside the trusted network there is no proxy; one meant for the package index must not be asked.
    return urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect(), _Connections(tls))


def _body(answer: Any, most: int) -> bytes:
    body: bytes = answer.read(most + 1)
    if len(body) > most:
        raise ValueError(f"an answer of more than {most} bytes")
    return body


def _refused(error: urllib.error.HTTPError, url: str) -> DeltasyncError:
    if error.code == HTTPStatus.TEMPORARY_REDIRECT and (owner := _owner(error.headers.get("Location", ""))):
        return NotOwner(f"{url}: {owner.http} has it", owner=owner)
    try:
        body = error.read(_MOST_ERROR_BYTES).decode(errors="replace")
        kind = _KINDS.get(error.code)
        if kind and body.startswith("{"):
            return kind(json.loads(body).get("message", body))
    except (OSError, http.client.HTTPException, ValueError) as broken:
        body = f"{error.reason}, and then {_printable(broken)}"
    return ServiceUnavailable(f"{url}: HTTP {error.code}: {body}")


def _owner(location: str) -> Owner | None:
    parts = urllib.parse.urlsplit(location)
    return Owner("", "", f"{parts.scheme}://{parts.netloc}") if parts.netloc else None


def _printable(error: Exception) -> str:
    """An error's text, unless that holds the raw bytes of an answer that is no HTTP."""
    text = str(error.reason if isinstance(error, urllib.error.URLError) else error).strip()
    return text if text.isprintable() else f"{type(error).__name__}: no HTTP answer"

"""HTTP requests with limits on the time and size of the answer, and likely causes of failures."""

import http.client
import io
import json
import socket
import ssl
import time
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass
from email.message import Message
from http import HTTPStatus
from typing import Any

from deltasync.base.errors import DeltasyncError, NotOwner, Owner, ServiceFailed, ServiceUnavailable
from deltasync.base.words import printable
from deltasync.wire.errors import error_named

# Enough for the lag of 100,000 replicas.
_MOST_BYTES = 256 << 20
_MOST_ERROR_BYTES = 16 << 20
_LONGEST_ERROR, _LONGEST_ADDRESS = 4_000, 300
# Detect a vanished peer during an answer that takes hours: seconds of silence before the first probe, seconds
# between probes, and failed probes. Not every system has all of these options.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}


@dataclass(frozen=True)
class HttpRequest:
    """A request to a service.

    Attributes:
        url: http:// or https://, with the path and the query.
        headers: the credentials, and the caller's name.
        timeout_seconds: timeout of the connection, and then of the whole answer.
        method: GET, PUT, POST or DELETE.
        body: sent as JSON; None = no body.
        patience_seconds: longer timeout of the answer, for requests that take minutes or hours; None = the same.
        tls: the TLS context for https://; None = the defaults of this machine.
        server_name: the name in the service's certificate; empty = the host of the URL.
        certificate: whether the context has a client certificate.
    """

    url: str
    headers: Mapping[str, str]
    timeout_seconds: float
    method: str = "GET"
    body: Any = None
    patience_seconds: float | None = None
    tls: ssl.SSLContext | None = None
    server_name: str = ""
    certificate: bool = False


def json_answer(request: HttpRequest) -> Any:
    """Send a request without redirects or a proxy; return the JSON answer, or None if it is empty.

    Raises:
        NotOwner: another process of the service owns the model.
        DeltasyncError: the service's own error.
        ServiceUnavailable: there is no JSON answer in time.
    """
    url = request.url
    try:
        status, headers, body = _answer(request)
        if status < HTTPStatus.MULTIPLE_CHOICES:
            return json.loads(body) if body else None
    except (OSError, http.client.HTTPException, ValueError) as error:
        said = _words(error)
        means = meaning(said, tls=request.tls is not None, certificate=request.certificate)
        asked = "is the service running, and is this its HTTP address?"
        raise ServiceUnavailable(f"{url}: {said}: {means or asked}") from error
    raise _refused(status, headers, body, url)


def _answer(request: HttpRequest) -> tuple[int, Message, bytes]:
    parts = urllib.parse.urlsplit(request.url)
    kind = _Https if parts.scheme == "https" else _Http
    connection = kind(parts.hostname or "", parts.port, request=request)
    try:
        path = parts.path + (f"?{parts.query}" if parts.query else "")
        body = None if request.body is None else json.dumps(request.body).encode()
        kinds = {} if body is None else {"Content-Type": "application/json"}
        connection.request(request.method, path or "/", body, {**request.headers, **kinds})
        answer = connection.getresponse()
        refused = answer.status >= HTTPStatus.MULTIPLE_CHOICES
        return answer.status, answer.headers, _body(answer, _MOST_ERROR_BYTES if refused else _MOST_BYTES)
    finally:
        connection.close()


class _TimedStream(io.RawIOBase):
    """The bytes of a socket until a deadline. The socket's own timeout only limits each single read."""

    def __init__(self, connection: socket.socket, stream: io.RawIOBase) -> None:
        self._connection = connection
        self._stream = stream
        self._ends = time.monotonic() + (connection.gettimeout() or 0.0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        if (left := self._ends - time.monotonic()) <= 0:
            raise TimeoutError("timed out")
        self._connection.settimeout(left)
        return self._stream.readinto(buffer)

    def close(self) -> None:
        self._stream.close()
        super().close()


class _Response(http.client.HTTPResponse):
    """A response that must be complete within the timeout of its connection."""

    def __init__(self, sock: socket.socket, *arguments: Any, **named: Any) -> None:
        super().__init__(sock, *arguments, **named)
        self.fp = io.BufferedReader(_TimedStream(sock, self.fp.detach()))


class _Http(http.client.HTTPConnection):
    response_class = _Response

    def __init__(self, host: str, port: int | None, *, request: HttpRequest) -> None:
        super().__init__(host, port, timeout=request.timeout_seconds)
        self._request = request

    def connect(self) -> None:
        super().connect()
        self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE.items():
            if hasattr(socket, name):
                self.sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        self._secure()
        patience = self._request.patience_seconds
        self.sock.settimeout(self._request.timeout_seconds if patience is None else patience)

    def _secure(self) -> None:
        pass


class _Https(_Http):
    """A TLS connection. The name in the peer's certificate may differ from its host."""

    default_port = http.client.HTTPS_PORT

    def _secure(self) -> None:
        context = self._request.tls or ssl.create_default_context()
        self.sock = context.wrap_socket(self.sock, server_hostname=self._request.server_name or self.host)


def _body(answer: Any, most: int) -> bytes:
    try:
        body: bytes = answer.read(most + 1)
    except (OSError, http.client.HTTPException) as error:
        if answer.status < HTTPStatus.MULTIPLE_CHOICES:
            raise
        body = f"{answer.reason}; reading the error failed: {_words(error)}".encode()
    if len(body) > most:
        raise ValueError(f"the answer is larger than the limit of {most} bytes")
    return body


def _refused(status: int, headers: Message, body: bytes, url: str) -> DeltasyncError:
    if status == HTTPStatus.TEMPORARY_REDIRECT and (owner := _owner(headers.get("Location", ""))):
        return NotOwner(f"{url}: the owner is {owner.http}", owner=owner)
    text = printable(body.decode(errors="replace"), _LONGEST_ERROR)
    try:
        said = json.loads(body)
        kind, words = error_named(said["error"]), printable(str(said["message"]), _LONGEST_ERROR)
    except (ValueError, LookupError, TypeError):  # The answer is not from a deltasync service.
        kind, words = None, ""
    if kind is None:
        failed = status == HTTPStatus.INTERNAL_SERVER_ERROR
        return (ServiceFailed if failed else ServiceUnavailable)(f"{url}: HTTP {status}: {text}")
    return kind(f"{url}: {words}" if issubclass(kind, ServiceFailed | ServiceUnavailable) else words)


def _owner(location: str) -> Owner | None:
    location = printable(location, _LONGEST_ADDRESS)
    parts = urllib.parse.urlsplit(location)
    return Owner("", "", f"{parts.scheme}://{parts.netloc}") if parts.netloc else None


def _words(error: Exception) -> str:
    """An error's text, unless it contains raw bytes of an answer that is not HTTP."""
    text = str(error).strip()
    return text if text.isprintable() else f"{type(error).__name__}: no HTTP answer"


_OTHER_NAME = "its certificate is for another name: set server_name to the name in it"
_OTHER_HOST = "is its host name right, and can this machine resolve it?"
# Errors of gRPC and OpenSSL, and their causes. The first match counts.
_MEANINGS = {
    "Hostname Verification Check failed": _OTHER_NAME,
    "Hostname mismatch": _OTHER_NAME,
    "IP address mismatch": _OTHER_NAME,
    "certificate has expired": "its certificate, or its CA's, has expired, or this machine's clock is wrong",
    "certificate is not yet valid": "its certificate, or its CA's, is not yet valid, or this machine's clock is "
    "wrong",
    "CERTIFICATE_VERIFY_FAILED": "its certificate is not from a CA that this client trusts: set ca to the file of "
    "the service's CA",
    "Connection refused": "nothing listens there: is the service running, and is this its address?",
    "lookup failed": _OTHER_HOST,
    "service not known": _OTHER_HOST,
    "No address associated": _OTHER_HOST,
    "name resolution": _OTHER_HOST,
    "no HTTP answer": "perhaps this is a gRPC port: use the service's HTTP address, by default port 8080",
    "http1.x server": "this is an HTTP port: use the service's gRPC address, by default port 50051",
    "WRONG_VERSION_NUMBER": "this port does not use TLS: use http:// and no CA, or the port with TLS",
}
# A TLS alert from the peer.
_ALERT = "_ALERT_"
# The peer aborted the handshake. gRPC does not report why.
_BROKEN_OFF = ("Socket closed", "Connection reset", "Broken pipe")
_BEFORE_A_CONNECTION = "failed to connect"
# The same over the service's HTTP.
_NO_ANSWER = "Remote end closed connection without response"


def meaning(details: str, *, tls: bool, certificate: bool) -> str:
    """The likely cause of a failed connection, in words; empty if there is no single likely one.

    Args:
        details: the error of gRPC or OpenSSL.
        tls: whether the client used TLS.
        certificate: whether the client sent a certificate.
    """
    if sign := next((sign for sign in _MEANINGS if sign in details), None):
        return _MEANINGS[sign]
    if tls and _ALERT in details:
        return _certificate_hint(certificate)
    broken_off = _BEFORE_A_CONNECTION in details and any(sign in details for sign in _BROKEN_OFF)
    if _NO_ANSWER in details:  # A service that is killed leaves like a port of the other kind.
        return f"the service ended before it answered, or {_refusal(tls=tls, certificate=certificate)}"
    return _refusal(tls=tls, certificate=certificate) if broken_off else ""


def _refusal(*, tls: bool, certificate: bool) -> str:
    if not tls:
        return "this port may need TLS: set ca, and use https:// for HTTP"
    return _certificate_hint(certificate)


def _certificate_hint(certificate: bool) -> str:
    if certificate:
        return "it may refuse this client's certificate: is it still valid, and from a CA that the service trusts?"
    return "it may need a client certificate: set cert and key"

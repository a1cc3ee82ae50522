"""HTTP requests with limits on the time and size of the answer. Needs httpx, of the extra `service`."""

import json
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import httpx

from deltasync.base.errors import DeltasyncError, NotOwner, Owner, ServiceFailed, ServiceUnavailable
from deltasync.base.words import printable
from deltasync.wire.errors import error_named

# Enough for the lag of 100,000 replicas.
MOST_BYTES = 256 << 20
_LONGEST_ERROR, _LONGEST_ADDRESS = 4_000, 300
# Detect a vanished peer during an answer that takes hours: seconds of silence before the first probe, seconds
# between probes, and failed probes. Not every system has all of these options.
_KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
_SOCKET_OPTIONS = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *((socket.IPPROTO_TCP, getattr(socket, name), n) for name, n in _KEEPALIVE.items() if hasattr(socket, name)),
]


class NoAnswer(Exception):
    """No JSON answer came in time. The message says why."""


def json_answer(
    method: str,
    url: str,
    body: Any,
    headers: Mapping[str, str],
    timeouts: tuple[float, float],
    tls: ssl.SSLContext | None,
    server_name: str,
    most_bytes: int = MOST_BYTES,
) -> Any:
    """Send a request without redirects or a proxy; return the JSON answer, or None if it is empty.

    `timeouts` are those of the connection and of the whole answer, in seconds. Raises NoAnswer, or the service's
    own error.
    """
    content = None if body is None else json.dumps(body).encode()
    kind = {} if body is None else {"Content-Type": "application/json"}
    transport = httpx.HTTPTransport(verify=tls or False, trust_env=False, socket_options=_SOCKET_OPTIONS)
    connect_seconds, answer_seconds = timeouts
    timeout = httpx.Timeout(answer_seconds, connect=connect_seconds)
    client = httpx.Client(transport=transport, timeout=timeout, headers={**headers, **kind}, trust_env=False)
    deadline, read = _Deadline(), bytearray()
    extensions = {"trace": deadline.trace} | ({"sni_hostname": server_name} if server_name else {})
    try:
        with (
            deadline.within(answer_seconds),
            client,
            client.stream(method, url, content=content, extensions=extensions) as answer,
        ):
            for each in answer.iter_raw():
                read += each
                if len(read) > most_bytes:
                    raise ValueError(f"the answer is larger than the limit of {most_bytes} bytes")
        if deadline.passed:  # A body of unknown length ends with its connection.
            raise TimeoutError
        if answer.is_success:
            return json.loads(read) if read else None
    except (OSError, httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        text = str(error).strip()
        # httpx quotes bytes of an answer that is not HTTP.
        not_http = isinstance(error, httpx.RemoteProtocolError) and "disconnected" not in text
        said = f"{type(error).__name__}: no HTTP answer" if not_http or not text.isprintable() else text
        raise NoAnswer("timed out" if deadline.passed else said) from error
    raise _refused(answer, bytes(read), url)


class _Deadline:
    """Shuts a connection down after some seconds. httpx's own timeouts only limit each single read."""

    def __init__(self) -> None:
        self.passed = False
        self._socket: socket.socket | None = None

    def trace(self, event: str, info: Mapping[str, Any]) -> None:
        """Note the socket of the connection. Called by httpx."""
        if event.endswith(("connect_tcp.complete", "start_tls.complete")):
            self._socket = info["return_value"].get_extra_info("socket")

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Set the deadline for the block."""
        timer = threading.Timer(seconds, self._end)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def _end(self) -> None:
        self.passed = True
        try:
            if self._socket:
                self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:  # The peer has closed it.
            pass


def _refused(answer: httpx.Response, body: bytes, url: str) -> DeltasyncError:
    location = urllib.parse.urlsplit(printable(answer.headers.get("Location", ""), _LONGEST_ADDRESS))
    if answer.status_code == httpx.codes.TEMPORARY_REDIRECT and location.netloc:
        http = f"{location.scheme}://{location.netloc}"
        return NotOwner(f"{url}: the owner is {http}", owner=Owner("", "", http))
    text = printable(body[: 4 * _LONGEST_ERROR].decode(errors="replace"), _LONGEST_ERROR)
    try:
        said = json.loads(body)
        kind, words = error_named(said["error"]), printable(str(said["message"]), _LONGEST_ERROR)
    except (ValueError, LookupError, TypeError):  # The answer is not from a deltasync service.
        kind, words = None, ""
    if kind is None:
        failed = answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR
        return (ServiceFailed if failed else ServiceUnavailable)(f"{url}: HTTP {answer.status_code}: {text}")
    return kind(f"{url}: {words}" if issubclass(kind, ServiceFailed | ServiceUnavailable) else words)

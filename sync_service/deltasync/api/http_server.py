"""HTTP connections: accepting, limiting and closing idle ones."""

import asyncio
import contextlib
import errno
import os
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from deltasync.access.limits import Limits, network_of
from deltasync.access.tls import names_of_certificate
from deltasync.base.errors import LimitReached

# Key in the `state` of a request's scope: a tuple of the names in the peer's certificate, empty without one.
CERTIFICATE_NAMES = "certificate_names"


class HttpProtocol(H11Protocol):
    """Passes the names in the client's certificate to the application, and measures the client's silence."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._turn: tuple[object, bool] | None = None
        self._turn_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin a connection, after any TLS handshake."""
        super().connection_made(transport)
        self.app_state: dict[str, Any] = {**self.app_state, CERTIFICATE_NAMES: _names(transport)}

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP, and end their request."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # The answer has begun.
            self.transport.close()
        if self.cycle and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def silent_seconds(self, now: float) -> float:
        """Seconds since the service began to wait for a request, or for the peer to read an answer.

        `now` is by `time.monotonic`.
        """
        cycle = self.cycle
        to_send = cycle is None or cycle.response_complete or cycle.more_body
        turn = (cycle, to_send) if to_send or self.flow.write_paused else None
        if turn != self._turn:
            self._turn, self._turn_since = turn, now
        return now - self._turn_since if turn else 0.0


def _names(transport: asyncio.BaseTransport) -> tuple[str, ...]:
    tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
    return names_of_certificate(tls.getpeercert()) if tls else ()


# Refusals in a row before other tasks get their turn.
_REFUSALS_AT_ONCE = 64
_WATCH_SECONDS = 1.0
# Seconds of silence before the kernel probes a peer, seconds between probes, and failures to tolerate.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 20, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})


class HttpListener(socket.socket):
    """A listening socket that enforces the limits, in total and per peer.

    It closes and counts connections beyond a limit, or beyond the process's file descriptors.
    """

    def __init__(self, listener: socket.socket, limits: Limits) -> None:
        """Take over a listening socket."""
        super().__init__(fileno=listener.detach())
        # Connections inherit this. A request can take hours, and its client may vanish silently.
        self.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            self.setsockopt(socket.IPPROTO_TCP, option, value)
        self._limits = limits
        self._of_peer = Counter[str]()
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)

    def close(self) -> None:
        """Stop listening."""
        super().close()
        self._give_spare()

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept the next connection within the limits; return it with its peer's address.

        Raises:
            BlockingIOError: no connection within the limits is waiting.
        """
        for _ in range(_REFUSALS_AT_ONCE):
            connection, address = self._take()
            try:
                return self._counted(connection, network_of(str(address[0]))), address
            except LimitReached:
                connection.close()
        raise BlockingIOError

    def _take(self) -> tuple[socket.socket, Any]:
        try:
            return super().accept()
        except OSError as error:
            if error.errno not in _NO_DESCRIPTOR:
                raise
        self._refuse_one()
        raise BlockingIOError

    def _refuse_one(self) -> None:
        """Accept and close a connection with the spare descriptor, or it would wake the loop for ever."""
        self._limits.refused["http_connections"] += 1
        self._give_spare()
        with contextlib.suppress(OSError):
            super().accept()[0].close()
        with contextlib.suppress(OSError):
            self._spare = os.open(os.devnull, os.O_RDONLY)

    def _give_spare(self) -> None:
        if self._spare is not None:
            os.close(self._spare)
        self._spare = None

    def _counted(self, connection: socket.socket, peer: str) -> socket.socket:
        self._limits.check_more("http_connections")
        self._limits.check("http_connections_per_peer", self._of_peer[peer] + 1)
        self._limits.add("http_connections")
        self._of_peer[peer] += 1
        return _Connection(connection, partial(self._forget, peer))

    def _forget(self, peer: str) -> None:
        self._limits.add("http_connections", -1)
        self._of_peer[peer] -= 1
        if not self._of_peer[peer]:
            del self._of_peer[peer]


class _Connection(socket.socket):
    """A connection that calls a function when it is closed."""

    def __init__(self, accepted: socket.socket, when_closed: Callable[[], None]) -> None:
        super().__init__(fileno=accepted.detach())
        self._when_closed: Callable[[], None] | None = when_closed

    def close(self) -> None:
        super().close()
        when_closed, self._when_closed = self._when_closed, None
        if when_closed:
            when_closed()


async def end_silent(connections: Iterable[Any], limits: Limits) -> None:
    """Close idle connections, until cancelled.

    A connection is idle if its peer completes no request, or reads no answer, for the limit of idle seconds.
    """
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        now = time.monotonic()
        for each in list(connections):
            if isinstance(each, HttpProtocol) and each.silent_seconds(now) > limits.options.http_idle_seconds:
                limits.refused["http_idle_seconds"] += 1
                each.transport.abort()

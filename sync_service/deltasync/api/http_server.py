"""HTTP connections: accepting, limiting and closing idle ones."""

import asyncio
import socket
import ssl
import time
from collections import Counter
from collections.abc import Iterable
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


_WATCH_SECONDS = 1.0
# Seconds of silence before the kernel probes a peer, seconds between probes, and failures to tolerate.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 20, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}


class HttpListener(socket.socket):
    """A listening socket that closes and counts connections beyond the limits, in total and per peer.

    uvicorn has no limit per peer, and its `limit_concurrency` counts no connection before its TLS handshake.
    """

    def __init__(self, listener: socket.socket, limits: Limits) -> None:
        """Take over a listening socket."""
        super().__init__(fileno=listener.detach())
        # Connections inherit this. A request can take hours, and its client may vanish silently.
        self.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            self.setsockopt(socket.IPPROTO_TCP, option, value)
        self._limits, self._of_peer = limits, Counter[str]()

    def accept(self) -> tuple[socket.socket, Any]:
        """Accept a connection; return it with its peer's address."""
        connection, address = super().accept()
        peer = network_of(str(address[0]))
        try:
            self._limits.check_more("http_connections")
            self._limits.check("http_connections_per_peer", self._of_peer[peer] + 1)
        except LimitReached as error:
            connection.close()
            raise ConnectionAbortedError from error
        return _Connection(connection, peer, self._limits, self._of_peer), address


class _Connection(socket.socket):
    """A connection that counts until it is closed."""

    def __init__(self, accepted: socket.socket, peer: str, limits: Limits, of_peer: Counter[str]) -> None:
        super().__init__(fileno=accepted.detach())
        self._peer, self._limits, self._of_peer = peer, limits, of_peer
        self._count(1)

    def close(self) -> None:
        if self.fileno() != -1:
            self._count(-1)
        super().close()

    def _count(self, number: int) -> None:
        self._limits.add("http_connections", number)
        self._of_peer[self._peer] += number
        if not self._of_peer[self._peer]:
            del self._of_peer[self._peer]


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

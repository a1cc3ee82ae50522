"""How many connections of HTTP there may be, and for how long one may say nothing.

They are counted where they are accepted: one whose TLS handshake never ends takes a descriptor, too.
"""

import asyncio
import contextlib
import errno
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from deltasync.api.http_protocol import HttpProtocol
from deltasync.api.stream_limits import network_of
from deltasync.core.errors import LimitReached
from deltasync.core.limits import Limits

# After so many refusals in a row others have their turn.
_REFUSALS_AT_ONCE = 64
_WATCH_SECONDS = 1.0
# Seconds of silence before the kernel probes a peer, seconds between probes, and how many may fail.
_KEEPALIVE = {socket.TCP_KEEPIDLE: 20, socket.TCP_KEEPINTVL: 5, socket.TCP_KEEPCNT: 3}
_NO_DESCRIPTOR = frozenset({errno.EMFILE, errno.ENFILE})


class HttpListener(socket.socket):
    """A socket that accepts as many connections as the limits say, in all and of one peer. Further ones are closed
    at once, and counted; so are those for which there is no descriptor.
    """

    def __init__(self, listener: socket.socket, limits: Limits) -> None:
        """Take over a socket that listens."""
        super().__init__(fileno=listener.detach())
        # Connections inherit this: a request may take hours, and its client may vanish without a word.
        self.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            self.setsockopt(socket.IPPROTO_TCP, option, value)
        self._limits = limits
        self._of_peer = Counter[str]()
        self._spare: int | None = os.open(os.devnull, os.O_RDONLY)

    def close(self) -> None:
        """Listen no more."""
        super().close()
        self._give_spare()

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection that may be, and its peer's address.

        Raises:
            BlockingIOError: nobody waits who may be let in.
        """
        for _ in range(_REFUSALS_AT_ONCE):
            accepted, address = self._take()
            try:
                return self._counted(accepted, network_of(str(address[0]))), address
            except LimitReached:
                accepted.close()
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
        """Without a descriptor the connection would wait, and wake the loop again and again."""
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

    def _counted(self, accepted: socket.socket, peer: str) -> socket.socket:
        taken = self._limits.taken
        self._limits.check("http_connections", taken["http_connections"] + 1)
        self._limits.check("http_connections_per_peer", self._of_peer[peer] + 1)
        taken["http_connections"] += 1
        self._of_peer[peer] += 1
        return _Connection(accepted, lambda: self._forget(peer))

    def _forget(self, peer: str) -> None:
        self._limits.taken["http_connections"] -= 1
        self._of_peer[peer] -= 1
        if not self._of_peer[peer]:
            del self._of_peer[peer]


class _Connection(socket.socket):
    """A connection that tells when it is closed."""

    def __init__(self, accepted: socket.socket, when_closed: Callable[[], None]) -> None:
        super().__init__(fileno=accepted.detach())
        self._when_closed: Callable[[], None] | None = when_closed

    def close(self) -> None:
        super().close()
        when_closed, self._when_closed = self._when_closed, None
        if when_closed:
            when_closed()


async def end_silent(connections: Iterable[Any], limits: Limits) -> None:
    """Close, until cancelled, connections whose peers neither send a whole request nor read the answer for longer
    than the limit of idle seconds; however many bytes of it they send.
    """
    while True:
        await asyncio.sleep(_WATCH_SECONDS)
        now = time.monotonic()
        for each in list(connections):
            if isinstance(each, HttpProtocol) and each.silent_seconds(now) > limits.options.http_idle_seconds:
                limits.refused["http_idle_seconds"] += 1
                each.transport.abort()

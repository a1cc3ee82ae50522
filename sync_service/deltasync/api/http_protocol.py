"""A connection over which HTTP is spoken, as uvicorn makes one for each peer."""

import asyncio
import ssl
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from deltasync.api.peer_certificates import names_of_certificate

# Key, in the `state` of each request's scope, of the names in the peer's certificate: a tuple of texts, empty
# without a certificate.
CERTIFICATE_NAMES = "certificate_names"


class HttpProtocol(H11Protocol):
    """Tells the application which names are in the certificate of whoever asks; and others, for how long that peer
    has been silent.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._turn: tuple[object, bool] | None = None
        self._turn_since = 0.0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take over a connection whose handshake, if it has one, is done."""
        super().connection_made(transport)
        self.app_state: dict[str, Any] = {**self.app_state, CERTIFICATE_NAMES: _names(transport)}

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP. The application can no longer answer a request that they are part of."""
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            super().send_400_response(msg)
        else:  # An answer was begun.
            self.transport.close()
        if self.cycle and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def silent_seconds(self, now: float) -> float:
        """For how long, by `time.monotonic`, it has been seen to be the peer's turn, to send the rest of the same
        request or to read the same answer; 0 while the service is at work.
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

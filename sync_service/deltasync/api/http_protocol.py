"""A connection over which HTTP is spoken, as uvicorn makes one for each peer."""

import asyncio
import ssl
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from deltasync.api.peer_certificates import names_of_certificate

# Key, in the `state` of each request's scope, of the names in the peer's certificate: a tuple of texts, empty
# without a certificate.
CERTIFICATE_NAMES = "certificate_names"


class HttpProtocol(H11Protocol):
    """Tells the application which names are in the certificate of whoever asks."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take over a connection whose handshake, if it has one, is done."""
        super().connection_made(transport)
        self.app_state: dict[str, Any] = {**self.app_state, CERTIFICATE_NAMES: _names(transport)}


def _names(transport: asyncio.BaseTransport) -> tuple[str, ...]:
    tls: ssl.SSLObject | None = transport.get_extra_info("ssl_object")
    return names_of_certificate(tls.getpeercert()) if tls else ()

"""Where a service is reached, and with which rights. Whatever connects to one does it here."""

import urllib.parse
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc

from deltasync.client.http_answer import get_json
from deltasync.core.errors import InvalidInput
from deltasync.wire.protocol import OURS, protocols_to_metadata

_Metadata: TypeAlias = tuple[tuple[str, str], ...]

_HTTP = ("http://", "https://")

_CHANNEL_OPTIONS = [
    ("grpc.max_receive_message_length", 16 << 20),
    # Inside the trusted network there is no proxy; one meant for the package index must not be asked.
    ("grpc.enable_http_proxy", 0),
    # A peer that hangs is found within 15 s; without the third one only after 65 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.keepalive_permit_without_calls", 1),
    # Retries are ours (see `backoff`); gRPC's own pause of up to two minutes would only add to them.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # In spite of its name, for how long an attempt may take: in less, none gets through a network with delays.
    ("grpc.min_reconnect_backoff_ms", 5_000),
]


@dataclass(frozen=True)
class Endpoint:
    """Where a service is reached, and with which rights.

    Where an endpoint is asked for, a string will do too: it is one without a token.

    Attributes:
        address: HOST:PORT where the service answers gRPC, or http://HOST:PORT where it answers HTTP.
        token: its admin token, for calls that change something; without one they are refused.
        timeout_seconds: how long a call may take. Streams live as long as they are needed.
        by: who asks, told in the service's log beside what it changes.

    Raises:
        InvalidInput: a token or a name that cannot be sent, or no time.
    """

    address: str
    token: str = field(default="", repr=False)
    timeout_seconds: float = 10.0
    by: str = ""

    def __post_init__(self) -> None:
        for name, text in (("token", self.token), ("by", self.by)):
            if not (text.isascii() and text.isprintable()):  # Say, a file's last line break.
                raise InvalidInput(f"{name}: expected only printable ASCII characters")
        if not self.timeout_seconds > 0:
            raise InvalidInput(f"timeout_seconds: {self.timeout_seconds}, expected more than 0")

    def __str__(self) -> str:
        return self.address

    @classmethod
    def of_grpc(cls, service: "Endpoint | str") -> "Endpoint":
        """Where a service answers gRPC.

        Raises:
            InvalidInput: the address is not HOST:PORT.
        """
        endpoint = service if isinstance(service, Endpoint) else cls(service)
        host, _, port = endpoint.address.rpartition(":")
        if not host or not port.isdigit() or host.startswith(_HTTP):
            raise InvalidInput(f"service {endpoint.address!r}: expected HOST:PORT")
        return endpoint

    @classmethod
    def of_http(cls, service: "Endpoint | str") -> "Endpoint":
        """Where a service answers HTTP.

        Raises:
            InvalidInput: the address is not http://HOST:PORT.
        """
        endpoint = service if isinstance(service, Endpoint) else cls(service)
        if not _is_url(endpoint.address):
            raise InvalidInput(f"service {endpoint.address!r}: expected http://HOST:PORT")
        return endpoint

    def channel(self) -> grpc.Channel:
        """A gRPC channel, whose calls have these rights and say which protocol they speak."""
        metadata = (protocols_to_metadata(OURS), *self._rights().items())
        channel = grpc.insecure_channel(self.address, _CHANNEL_OPTIONS)
        return grpc.intercept_channel(channel, _Calls(metadata, self.timeout_seconds))

    def get_json(self, path: str) -> Any:
        """The service's JSON answer to an HTTP GET of `path`.

        Raises:
            NotFound: the service knows no such thing.
            ServiceUnavailable: it does not answer in time, or not with JSON.
        """
        return get_json(self.address.rstrip("/") + path, self._rights(), self.timeout_seconds)

    def _rights(self) -> dict[str, str]:
        """What a call sends of them, and of who asks, as metadata in gRPC and as headers in HTTP."""
        rights = {"authorization": f"Bearer {self.token}"} if self.token else {}
        return rights | ({"deltasync-by": self.by} if self.by else {})


class _Calls(grpc.UnaryUnaryClientInterceptor, grpc.StreamStreamClientInterceptor):
    """Gives every call its metadata, and each that is no stream its timeout."""

    def __init__(self, metadata: _Metadata, timeout_seconds: float) -> None:
        self._metadata = metadata
        self._timeout_seconds = timeout_seconds

    def intercept_unary_unary(self, continuation: Callable[[Any, Any], Any], _call: Any, request: Any) -> Any:
        """Make a call."""
        return continuation(_Details(self._metadata, self._timeout_seconds), request)

    def intercept_stream_stream(self, continuation: Callable[[Any, Any], Any], _call: Any, requests: Any) -> Any:
        """Begin a stream."""
        return continuation(_Details(self._metadata, None), requests)


class _Details(grpc.ClientCallDetails):
    """What a call is made with; gRPC takes all that is not said here from the call itself."""

    def __init__(self, metadata: _Metadata, timeout: float | None) -> None:
        self.metadata = metadata
        self.timeout = timeout


def _is_url(address: str) -> bool:
    try:
        url = urllib.parse.urlsplit(address)
        return address.startswith(_HTTP) and bool(url.hostname) and url.port != 0
    except ValueError:  # Say, half of the brackets of IPv6.
        return False

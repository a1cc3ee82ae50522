"""The service that is attacked, as an attacker reaches it."""

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from grpc import Channel, insecure_channel

from deltasync.wire.errors import protocol_to_metadata

_OPTIONS = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
]
MODEL, CONSUMER = "clicks", "predictors"


@dataclass(frozen=True)
class Target:
    """Where the service is, and what the attacker has."""

    grpc: str
    http: str
    token: str = field(default="", repr=False)
    seconds: float = 10.0

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What a call begins with."""
        rights = (("authorization", f"Bearer {self.token}"),) if self.token else ()
        return (protocol_to_metadata(), *rights)

    @contextmanager
    def channel(self) -> Iterator[Channel]:
        with insecure_channel(self.grpc, _OPTIONS) as channel:
            yield channel

    @contextmanager
    def channels(self, number: int) -> Iterator[list[Channel]]:
        with ExitStack() as stack:
            yield [stack.enter_context(insecure_channel(self.grpc, _OPTIONS)) for _ in range(number)]

    def connect(self, port: str, timeout_seconds: float = 5.0) -> socket.socket:
        """A bare connection to the `port` "grpc" or "http"."""
        where = urlsplit(self.http if port == "http" else f"//{self.grpc}")
        return socket.create_connection((where.hostname or "", where.port or 0), timeout_seconds)

    def streams(self, channel: Channel, method: str, requests: Any) -> Any:
        """The answers to a stream of messages that are bytes already, or of a type of their own."""
        call: Any = channel.stream_stream(f"/deltasync.v1.{method}", request_serializer=_serialized)
        return call(requests, timeout=self.seconds + 10, metadata=self.metadata)

    def unary(self, channel: Channel, method: str) -> Any:
        return channel.unary_unary(f"/deltasync.v1.{method}", request_serializer=_serialized)


def _serialized(message: Any) -> bytes:
    return message if isinstance(message, bytes) else message.SerializeToString()


def wait_until(end: float) -> None:
    """Wait for a time of `time.monotonic`."""
    while (left := end - time.monotonic()) > 0:
        time.sleep(left)

"""HTTP/2 frame by frame, on one connection to the gRPC port."""

import contextlib
import select
from collections import Counter
from typing import Any, Self

import h2.config
import h2.connection
import h2.events
import h2.exceptions
import h2.settings
from google.protobuf.message import Message
from tests.attacks.target import Target


class Connection:
    """A connection that does as it is told, beyond what a client's library would."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self.seen: Counter[str] = Counter()
        self.open = True

    def __enter__(self) -> Self:
        self._socket = self._target.connect("grpc")
        config = h2.config.H2Configuration(
            client_side=True, validate_outbound_headers=False, normalize_outbound_headers=False
        )
        self.frames = h2.connection.H2Connection(config)
        self.frames.initiate_connection()
        self.flush()
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    @property
    def told(self) -> str:
        """What the service has answered, in words."""
        counts = ", ".join(f"{count} {name}" for name, count in self.seen.most_common(4)) or "no answer"
        return counts + ("" if self.open else "; the service has ended the connection")

    def headers(self, path: str) -> list[tuple[str, str]]:
        pairs = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
        metadata = [(name, str(value)) for name, value in self._target.metadata]
        return [*pairs, ("content-type", "application/grpc"), ("te", "trailers"), *metadata]

    def begin(self, path: str, *more: tuple[str, str]) -> int:
        stream = self.frames.get_next_available_stream_id()
        with contextlib.suppress(h2.exceptions.ProtocolError):  # More than the service lets one connection have.
            self.frames.send_headers(stream, [*self.headers(path), *more])
        self.flush()
        return stream

    def data(self, stream: int, content: bytes) -> None:
        """Send some bytes of a message."""
        with contextlib.suppress(h2.exceptions.ProtocolError):
            self.frames.send_data(stream, content)
        self.flush()

    def data_if_room(self, stream: int, content: bytes) -> int:
        """Send some bytes if the service takes them; how many."""
        try:
            if self.frames.local_flow_control_window(stream) < len(content):
                return 0
            self.frames.send_data(stream, content)
        except h2.exceptions.ProtocolError:
            return 0
        self.flush()
        return len(content)

    def raw(self, content: bytes) -> bool:
        """Send bytes as they are; whether the connection took them."""
        if not self.open:
            return False
        try:
            self._socket.settimeout(2.0)
            self._socket.sendall(content)
        except OSError:
            self.open = False
        return self.open

    def flush(self) -> None:
        if content := self.frames.data_to_send():
            self.raw(content)

    def take(self, seconds: float = 0.0) -> bool:
        """Take what has come, waiting for so long for it; whether the connection goes on."""
        while self.open and select.select([self._socket], [], [], seconds)[0]:
            seconds = 0.0
            try:
                content = self._socket.recv(1 << 16)
            except OSError:
                content = b""
            if not content:
                self.open = False
                break
            self._note(content)
        self.flush()
        return self.open

    def _note(self, content: bytes) -> None:
        try:
            events: list[Any] = self.frames.receive_data(content)
        except h2.exceptions.ProtocolError as error:
            self.seen[type(error).__name__] += 1
            return
        for event in events:
            if isinstance(event, h2.events.TrailersReceived | h2.events.ResponseReceived):
                status = dict(event.headers or ()).get(b"grpc-status", b"none").decode()
                self.seen[f"status {status}"] += 1
            elif isinstance(event, h2.events.ConnectionTerminated | h2.events.StreamReset):
                self.seen[f"{type(event).__name__} {int(event.error_code or 0)}"] += 1


def message(content: Message) -> bytes:
    """A message as gRPC frames it."""
    written = content.SerializeToString()
    return b"\0" + len(written).to_bytes(4, "big") + written

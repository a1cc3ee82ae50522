"""A gRPC proxy that answers pings on both sides, whatever becomes of its streams."""

import contextlib
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self

import grpc


class GrpcProxy(grpc.GenericRpcHandler):
    """Forwards streams to a service.

    Attributes:
        address: HOST:PORT for clients.
        peers: the client connection of each stream so far.
    """

    def __init__(self, target: str) -> None:
        self._target = target
        self._silent = threading.Event()  # For the streams of now; later ones have another.
        self._closed = threading.Event()
        self._server = grpc.server(ThreadPoolExecutor(50), handlers=[self])
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self.peers = list[str]()
        self._lock, self._ended = threading.Lock(), 0

    @property
    def open(self) -> int:
        """The number of streams that their clients have not ended."""
        with self._lock:
            return len(self.peers) - self._ended

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._server.stop(grace=None).wait()

    def fall_silent(self, *, for_good: bool = False) -> None:
        """Forward nothing more on the open streams, and on later ones if `for_good`. End none of them."""
        self._silent.set()
        if not for_good:
            self._silent = threading.Event()

    def service(self, handler_call_details: Any) -> Any:
        """Answer any method."""
        method, silent = handler_call_details.method, self._silent

        def while_loud(messages: Iterator[bytes]) -> Iterator[bytes]:
            for each in messages:
                if silent.is_set():
                    break
                yield each
            if silent.is_set():  # Not even the end of a side reaches the other.
                self._closed.wait()

        def forward(requests: Iterator[bytes], context: Any) -> Iterator[bytes]:
            def forwarded() -> Iterator[bytes]:
                with contextlib.suppress(grpc.RpcError):  # The client has left.
                    yield from while_loud(requests)
                if silent.is_set():
                    self._closed.wait()

            with self._lock:
                self.peers.append(context.peer())
            if not context.add_callback(self._note_end):
                self._note_end()
            with grpc.insecure_channel(self._target, [("grpc.use_local_subchannel_pool", 1)]) as channel:
                stream: Any = channel.stream_stream(method)
                call = stream(forwarded(), metadata=_own(context.invocation_metadata()))
                context.add_callback(lambda: None if silent.is_set() else call.cancel())
                try:
                    yield from while_loud(call)
                except grpc.RpcError as error:
                    if silent.is_set():
                        self._closed.wait()
                    context.set_trailing_metadata(call.trailing_metadata())
                    context.abort(call.code(), str(error.details()))

        return grpc.stream_stream_rpc_method_handler(forward)

    def _note_end(self) -> None:
        with self._lock:
            self._ended += 1


def _own(metadata: Any) -> list[tuple[str, str]]:
    return [(key, value) for key, value in metadata if key.startswith("deltasync-")]

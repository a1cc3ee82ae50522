"""The processes at the other end of a benchmark's sockets.

    python -m tests.bench.peers replica SERVICE        a replica with NumPy tables
    python -m tests.bench.peers clock SERVICE          the same, which knows when it has applied what
    python -m tests.bench.peers fleet SERVICE NAME...  a replica of each of these consumers
    python -m tests.bench.peers echo                   a bare gRPC server that sends back what comes
    python -m tests.bench.peers sink                   a bare gRPC server that counts a stream
    python -m tests.bench.peers source SINK ROWS DIM   a bare gRPC client that sends rows to a sink

Each answers a line on its standard input with a line. The replica's SERVICE may be the file of an endpoint.
"""

import asyncio
import json
import queue
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any, Self

import grpc.aio
import numpy as np

from deltasync.base.process import keep_freed_memory
from deltasync.client import Endpoint, NumpyTarget, Release, Subscriber, SubscriberOptions, TableSpec
from deltasync.client.targets.target import Written
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.table_form import ReplicaSpec
from deltasync.v1 import publish_pb2, publish_pb2_grpc, tables_pb2
from deltasync.wire.row_messages import chunked

# For a release; the first of a large table takes minutes.
_PATIENCE_SECONDS = 600.0


_SERVICE, _METHOD = "bench.Echo", "Echo"


async def serve_echo() -> None:
    """Send back what comes, until the end of the standard input."""
    server = grpc.aio.server()
    handler: Any = grpc.stream_stream_rpc_method_handler(_echo)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
    await _serve(server)


async def _echo(messages: AsyncIterator[bytes], _: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[bytes]:
    async for message in messages:
        yield message


class Echo:
    """The other end of the stream."""

    def __init__(self, address: str) -> None:
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(address)
        call: Any = self._channel.stream_stream(f"/{_SERVICE}/{_METHOD}")
        self._answers = call(iter(self._messages.get, None))

    def there_and_back(self, message: bytes) -> None:
        """Send a message and wait until it has come back."""
        self._messages.put(message)
        next(self._answers)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._messages.put(None)
        self._channel.close()


class Sink(publish_pb2_grpc.PublishServiceServicer):
    """Receives a stream as the service does, and throws it away."""

    async def Publish(  # noqa: N802  # named as in the .proto file
        self,
        request_iterator: AsyncIterator[publish_pb2.PublishRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[publish_pb2.PublishResponse]:
        """Answer once the close has arrived."""
        async for request in request_iterator:
            if request.WhichOneof("message") == "close":
                yield publish_pb2.PublishResponse(sealed=publish_pb2.CutSealed(step=request.close.step))


async def sink() -> None:
    """Serve until the end of the standard input."""
    server = grpc.aio.server()
    publish_pb2_grpc.add_PublishServiceServicer_to_server(Sink(), server)
    await _serve(server)


async def _serve(server: grpc.aio.Server) -> None:
    _answer(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


def source(address: str, rows: int, dim: int) -> None:
    """Send `rows` rows of `dim` fp32 values at every line, and answer with the seconds that took."""
    ids, values = np.arange(rows), np.random.default_rng(0).normal(size=(rows, dim)).astype(np.float32)
    with grpc.insecure_channel(address) as channel:
        stub = publish_pb2_grpc.PublishServiceStub(channel)
        for _ in sys.stdin:
            started = time.perf_counter()
            answered: queue.SimpleQueue[None] = queue.SimpleQueue()
            next(stub.Publish(_requests(ids, values, answered)))
            _answer(str(time.perf_counter() - started))
            answered.put(None)


def _requests(ids: Any, values: Any, answered: "queue.SimpleQueue[None]") -> Iterator[publish_pb2.PublishRequest]:
    table = TableSpec("peer", *values.shape)
    for piece in chunked(RowBatch.of_table(table, ids, values)):
        rows = tables_pb2.Rows(ids=piece.ids.tobytes(), values=piece.values.tobytes())
        yield publish_pb2.PublishRequest(chunk=publish_pb2.PartChunk(step=1, rows=tables_pb2.TableRows(rows=rows)))
    yield publish_pb2.PublishRequest(close=publish_pb2.PartClose(step=1))
    answered.get()


def replica(service: str) -> None:
    """Follow consumer "bench"; at every line, wait for the version it names."""
    where = Endpoint.from_file(service) if service.endswith(".toml") else service
    options = SubscriberOptions(service=where, consumer="bench", replica="bench", max_outstanding_bytes=64 << 20)
    with Subscriber(options, NumpyTarget()) as subscriber:
        _answer("ready")
        for line in sys.stdin:
            _answer(str(subscriber.wait_for(int(line), _PATIENCE_SECONDS).number))


class _ClockTarget(NumpyTarget):
    """NumPy tables, and when each version was applied, nanoseconds by the clock that all processes share."""

    def __init__(self) -> None:
        super().__init__()
        self.applied_ns: dict[int, int] = {}

    def apply(self, release: Release) -> Written | None:
        written = super().apply(release)
        self.applied_ns[release.version] = time.monotonic_ns()
        return written


def clock(service: str) -> None:
    """Follow consumer "bench"; at every line, wait for the version it names, and say when it was applied."""
    target = _ClockTarget()
    with Subscriber(SubscriberOptions(service=service, consumer="bench", replica="bench"), target) as subscriber:
        _answer("ready")
        for line in sys.stdin:
            subscriber.wait_for(int(line), 120)
            _answer(str(target.applied_ns[int(line)]))


class FleetReplica:
    """A replica that knows which version its rows were made of, and what it was given."""

    def __init__(self, service: str, consumer: str) -> None:
        self.releases = self.rows = 0
        self._version = 0
        self._tables = NumpyTarget()
        self._moved = threading.Condition()
        options = SubscriberOptions(service=service, consumer=consumer, replica="bench")
        self._subscriber = Subscriber(options, self)

    def apply(self, release: Release) -> None:
        """Take over values; ids and norms are only counted, and so are rows for quantised modules."""
        quantised = any(isinstance(each, ReplicaSpec) and each.value_type.tbe_bits for each in release.tables)
        if not quantised and all(rows.norms is None for rows in release.rows):
            self._tables.apply(release)
        with self._moved:
            self.releases += 1
            self.rows += sum(len(rows.ids) for rows in release.rows)
            self._version = release.version
            self._moved.notify_all()

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        return self._tables.read(table, ids)

    def wait_for(self, version: int) -> None:
        """Wait until it was given a release that was made of a version."""
        with self._moved:
            reached = self._moved.wait_for(lambda: self._version >= version, _PATIENCE_SECONDS)
        self._subscriber.check()
        if not reached:
            raise TimeoutError(f"the last release was made of version {self._version}, not {version}")

    def close(self) -> None:
        self._subscriber.close()


def fleet(service: str, consumers: Sequence[str]) -> None:
    """Follow consumers; at every line, wait until the replica of each has rows of the version it names, and answer
    with the releases and rows that each was given by then.
    """
    members = [FleetReplica(service, consumer) for consumer in consumers]
    _answer("ready")
    for line in sys.stdin:
        for member in members:
            member.wait_for(int(line))
        _answer(json.dumps([[member.releases, member.rows] for member in members]))
    for member in members:
        member.close()


def _answer(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def main(role: str, *arguments: str) -> None:
    if role in ("replica", "clock", "fleet"):
        keep_freed_memory()
    if role == "replica":
        replica(arguments[0])
    elif role == "clock":
        clock(arguments[0])
    elif role == "echo":
        asyncio.run(serve_echo())
    elif role == "fleet":
        fleet(arguments[0], arguments[1:])
    elif role == "sink":
        asyncio.run(sink())
    else:
        source(arguments[0], int(arguments[1]), int(arguments[2]))


if __name__ == "__main__":
    main(*sys.argv[1:])

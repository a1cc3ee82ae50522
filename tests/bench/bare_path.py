"""The path of rows with nothing but gRPC, one file and our kernels: the baseline of `bench publish`.

    python -m tests.bench.bare_path service FOLDER ROWS DIM    prints where it listens
    python -m tests.bench.bare_path replica SERVICE ROWS DIM   applies as many cuts as a line of its input says

A chunk is ids, digests and values, one after the other, as bytes that no library encodes. The service checks the
digests, writes the bytes it received to a file, syncs that once a cut, applies the rows, and sends the same bytes
on. The replica writes the rows and digests what it holds. The source publishes a cut while the one before is being
sealed. There is no retry, no lag, no limit, no position and no second consumer.
"""

import asyncio
import os
import queue
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, Self

import grpc.aio
import numpy as np
from numpy.typing import NDArray

from deltasync.base.process import keep_freed_memory
from deltasync.core.digests import RowDigests, weights
from deltasync.kernels import digests as digest_kernels
from deltasync.kernels import rows as row_kernels

_PATH, _PUBLISH, _FOLLOW = "bench.Path", "Publish", "Follow"
_CHUNK_ROWS = 3_600
_MOST_WAITING = 64  # Chunks that the replica has yet to be sent.
_END, _NOTHING = b"end", b""  # Of a cut, and of all.
_NO_FLOATS, _NO_WEIGHTS = np.zeros((0, 0), np.float32), np.zeros(0, np.uint64)

Words = NDArray[np.uint32]


class _Table:
    """Rows, and a digest and a stamp of each."""

    def __init__(self, rows: int, dim: int) -> None:
        self.rows = np.zeros((rows, dim), np.uint32)
        self.digests, self._stamps = np.zeros(rows, np.uint64), np.zeros(rows, np.int64)
        self.weights = weights(0, dim)

    def split(self, chunk: bytes) -> tuple[NDArray[np.int64], RowDigests, Words]:
        """Ids [n], digests [n] and values [n, D] of a chunk, as views."""
        count = len(chunk) // (8 + 8 + 4 * self.rows.shape[1])
        ids, digests = np.frombuffer(chunk, np.int64, count), np.frombuffer(chunk, np.uint64, count, 8 * count)
        return ids, digests, np.frombuffer(chunk, np.uint32, offset=16 * count).reshape(count, -1)

    def check(self, chunk: bytes) -> None:
        """Check that rows are those of which their digests were made."""
        _, digests, values = self.split(chunk)
        found = np.empty_like(digests)
        digest_kernels.digest_rows(values, self.weights, found)
        _check(found, digests)

    def apply(self, chunks: list[bytes], stamp: int) -> None:
        """Write the rows of a cut with their stamps and digests, as the service does."""
        stamps, none = np.array([stamp]), _NO_FLOATS
        for chunk in chunks:
            ids, digests, values = self.split(chunk)
            row_kernels.write(
                self.rows, self._stamps, self.digests, none, 0, 0, ids, ids, values, stamps, digests, none,
                _NO_WEIGHTS,
            )  # fmt: skip

    def put(self, chunk: bytes) -> None:
        """Write rows and prove what is held, as a replica does."""
        ids, digests, values = self.split(chunk)
        held = np.empty_like(digests)
        row_kernels.put(self.rows.view(np.uint8), self.rows, ids, values.view(np.uint8), self.weights, held)
        _check(held, digests)
        digest_kernels.exchange(self.digests, ids, held)


def _check(held: RowDigests, given: RowDigests) -> None:
    if not np.array_equal(held, given):
        raise ValueError("a row does not fit its digest")


class _Service:
    """Takes cuts from one source and sends them to one replica."""

    def __init__(self, file: Path, rows: int, dim: int) -> None:
        self._table = _Table(rows, dim)
        # All rows fit once. Its pages are reused then, as those of a log that is cut early.
        self._bytes = rows * (8 + 8 + 4 * dim)
        self._file = os.open(file, os.O_RDWR | os.O_CREAT)
        os.posix_fallocate(self._file, 0, self._bytes)
        self._written = self._cuts = 0
        self._sent = asyncio.Queue[bytes](_MOST_WAITING)

    async def publish(self, messages: AsyncIterator[bytes], _: Any) -> AsyncIterator[bytes]:
        """Answer a cut once it is on the disk, while chunks of the next one arrive."""
        cuts = asyncio.Queue[list[bytes] | None]()
        receiving = asyncio.create_task(self._receive(messages, cuts))
        while (chunks := await cuts.get()) is not None:
            await asyncio.to_thread(os.fdatasync, self._file)
            yield _END
            self._cuts += 1
            await asyncio.to_thread(self._table.apply, chunks, self._cuts)
            for chunk in (*chunks, _END):
                await self._sent.put(chunk)
        await receiving
        await self._sent.put(_NOTHING)

    async def _receive(self, messages: AsyncIterator[bytes], cuts: "asyncio.Queue[list[bytes] | None]") -> None:
        chunks = list[bytes]()
        async for message in messages:
            if message == _END:
                cuts.put_nowait(chunks)
                chunks = []
                continue
            self._table.check(message)
            if self._written + len(message) > self._bytes:
                self._written = 0
            self._written += os.pwrite(self._file, message, self._written)
            chunks.append(message)
        cuts.put_nowait(None)

    async def follow(self, _request: bytes, _: Any) -> AsyncIterator[bytes]:
        """The bytes that came, cut by cut, until the source has ended."""
        while chunk := await self._sent.get():
            yield chunk


async def _serve(folder: str, rows: int, dim: int) -> None:
    server, service = grpc.aio.server(), _Service(Path(folder) / "bare-path", rows, dim)
    publish: Any = grpc.stream_stream_rpc_method_handler(service.publish)
    follow: Any = grpc.unary_stream_rpc_method_handler(service.follow)
    handlers = grpc.method_handlers_generic_handler(_PATH, {_PUBLISH: publish, _FOLLOW: follow})
    server.add_generic_rpc_handlers((handlers,))
    _answer(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(None)


def _replica(address: str, rows: int, dim: int) -> None:
    table = _Table(rows, dim)
    with grpc.insecure_channel(address) as channel:
        follow: Any = channel.unary_stream(f"/{_PATH}/{_FOLLOW}")
        chunks = iter(follow(b""))
        _answer("ready")
        for cuts in sys.stdin:
            for _ in range(int(cuts)):
                for chunk in iter(chunks.__next__, _END):
                    table.put(chunk)
            _answer("applied")


class BareSource:
    """Publishes cuts to the bare service."""

    def __init__(self, address: str) -> None:
        self._messages: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(address)
        call: Any = self._channel.stream_stream(f"/{_PATH}/{_PUBLISH}")
        self._sealed = call(iter(self._messages.get, None))

    def publish(self, values: NDArray[np.float32], cuts: int) -> None:
        """Publish all rows in some cuts; the last one is sealed when it returns."""
        for number in range(cuts):
            ids = np.arange(number, len(values), cuts)
            chunks = list(_chunks(ids, np.take(values, ids, axis=0, mode="clip").view(np.uint32)))
            if number:
                next(self._sealed)
            for chunk in (*chunks, _END):
                self._messages.put(chunk)
        next(self._sealed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._messages.put(None)
        for _ in self._sealed:  # Until the service has ended the stream.
            pass
        self._channel.close()


def _chunks(ids: NDArray[np.int64], words: Words) -> Iterator[bytes]:
    factors, digests = weights(0, words.shape[1]), np.empty(len(ids), np.uint64)
    digest_kernels.digest_rows(words, factors, digests)
    for start in range(0, len(ids), _CHUNK_ROWS):
        some = slice(start, start + _CHUNK_ROWS)
        yield b"".join(each[some].reshape(-1).view(np.uint8).data for each in (ids, digests, words))


def _answer(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _main(role: str, where: str, rows: str, dim: str) -> None:
    keep_freed_memory()
    if role == "service":
        asyncio.run(_serve(where, int(rows), int(dim)))
    else:
        _replica(where, int(rows), int(dim))


if __name__ == "__main__":
    _main(*sys.argv[1:])

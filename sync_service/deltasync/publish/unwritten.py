"""What a rank's stream has handed to the log that is not on disk yet."""

import asyncio
from collections import deque
from concurrent.futures import Future

from deltasync.storage.write_queue import WriteQueue

# Bounds the memory that an arriving part takes. Many small chunks, of a table each, are not waited for one by one.
_MOST_BYTES = 16 << 20
# What a small one takes in memory.
_CHUNK_BYTES = 4096


class UnwrittenChunks:
    """Writes of a rank's part, in their order. Used in the event loop."""

    def __init__(self, queue: WriteQueue) -> None:
        """`queue` is what all have handed to the log: while that is full, this stream has nothing in it."""
        self._queue = queue
        self._writes: deque[tuple[Future[None], int]] = deque()
        self._bytes = 0

    def add(self, write: Future[None], size: int) -> None:
        """Add a write of so many bytes."""
        self._writes.append((write, max(size, _CHUNK_BYTES)))
        self._bytes += self._writes[-1][1]

    async def wait_for_room(self) -> None:
        """Wait for the first of them until the others are not too much to hold, for one stream and for all.

        Raises:
            StorageFailed: one has failed.
        """
        while self._bytes > _MOST_BYTES or (self._writes and self._queue.full):
            write, size = self._writes.popleft()
            self._bytes -= size
            if write.done():
                write.result()
            else:
                await asyncio.wrap_future(write)

    def take(self) -> tuple[Future[None], ...]:
        """All of them, which are others' to wait for from now on."""
        writes = tuple(write for write, _ in self._writes)
        self._writes.clear()
        self._bytes = 0
        return writes

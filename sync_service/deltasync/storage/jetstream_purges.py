"""Removing messages of a stream that nobody counts any more: in the brokers' event loop."""

import asyncio

from deltasync.core.errors import StorageFailed
from deltasync.storage.brokers import Brokers


class Purges:
    """Purges of one stream. Each names what an accepted note has said to be gone, up to that note, so that it
    removes nothing else, however late it comes.

    Attributes:
        complete: all that were asked for are done: no note is needed any more to know what is gone.
    """

    def __init__(self, brokers: Brokers, stream: str) -> None:
        self._brokers, self._stream = brokers, stream
        self._under_way = set[asyncio.Future[None]]()
        self._failed = False

    @property
    def complete(self) -> bool:
        """Whether all are done."""
        return not self._under_way and not self._failed

    def purge(self, subjects: str, before: int) -> None:
        """Have messages of some subjects removed that come before a sequence."""
        task = asyncio.ensure_future(self._purge(subjects, before))
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    async def cancel(self) -> None:
        """Have none under way: who opens the log next sees from its notes what is gone."""
        for each in list(self._under_way):
            each.cancel()
        await self.settled()

    async def settled(self) -> None:
        """Wait until none is under way."""
        if self._under_way:
            await asyncio.wait(list(self._under_way))

    async def _purge(self, subjects: str, before: int) -> None:
        try:
            found = await self._brokers.ask(f"STREAM.PURGE.{self._stream}", {"filter": subjects, "seq": before})
            self._failed |= "error" in found
        except StorageFailed:  # As above.
            self._failed = True

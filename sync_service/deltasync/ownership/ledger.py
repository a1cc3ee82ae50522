"""Reads and writes the bucket, with a table of what it says."""

import asyncio
from collections.abc import Callable

from deltasync.core.errors import InvalidInput
from deltasync.core.events import EventKind, Events
from deltasync.ownership.bucket import Bucket, Changed, Entry
from deltasync.ownership.claim import Claim
from deltasync.ownership.entries import of_claim, of_consumer, of_member
from deltasync.ownership.keys import CONSUMER, MODEL, PROCESS, key_of
from deltasync.ownership.member import Member
from deltasync.ownership.table import Table


class Ledger:
    """What the processes have written down, and what this one writes. Every write is a comparison with what the
    table says, so that nobody's entry is replaced unseen. In the event loop.

    Writing raises `Changed` if the table is behind the bucket, and `ServiceUnavailable` if brokers do not answer.

    Attributes:
        stale: whether the table may be behind: it is to be read again.
    """

    def __init__(self, bucket: Bucket, table: Table, events: Events, clock_ns: Callable[[], int]) -> None:
        self.stale = True
        self._bucket, self._table, self._events, self._clock_ns = bucket, table, events, clock_ns
        self._seen: Callable[[], None] = lambda: None
        self._read = asyncio.Event()
        self._read.set()

    def on_change(self, seen: Callable[[], None]) -> None:
        """Have it called after each change of the table."""
        self._seen = seen

    async def read(self) -> None:
        """Read all of the bucket, and follow it from there.

        Raises:
            ServiceUnavailable: brokers do not answer.
        """
        await self._read.wait()
        self._read.clear()
        self._table.restart()
        self.stale = True
        try:
            await self._bucket.follow(self._see)
            self.stale = False
        finally:
            self._read.set()

    async def write_member(self, member: Member) -> int:
        """Write down that a process is alive; answers with the revision."""
        return await self._write(key_of(PROCESS, member.name), of_member(member))

    async def erase_member(self, name: str) -> None:
        """A process leaves."""
        await self._write(key_of(PROCESS, name), b"")

    async def write_claim(self, model: str, claim: Claim | None) -> None:
        """Write down who owns a model; None: it was deleted."""
        await self._write(key_of(MODEL, model), of_claim(claim) if claim else b"")

    async def write_consumer(self, name: str, model: str) -> None:
        """Write down which model a consumer follows; empty: there is no such consumer any more."""
        await self._write(key_of(CONSUMER, name), of_consumer(model) if model else b"")

    async def close(self) -> None:
        """Follow the bucket no more."""
        await self._bucket.close()

    async def _write(self, key: str, value: bytes) -> int:
        await self._read.wait()
        try:
            revision = await self._bucket.put(key, value, self._table.revision(key))
        except Changed:
            self.stale = True
            self._seen()
            raise
        self._see(Entry(key, value, revision), followed=False)
        return revision

    def _see(self, entry: Entry, *, followed: bool = True) -> None:
        if followed:
            self._table.follow(entry)
        try:
            self._table.see(entry, self._clock_ns())
        except InvalidInput as error:
            self._events.emit(EventKind.FAILED, "an entry of the owners of models is not understood", error)
        self._seen()

"""Reads and writes the bucket: claims to models, names of consumers, and heartbeats."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from deltasync.base.errors import Contradiction, DeltasyncError, InvalidInput, ServiceUnavailable
from deltasync.base.events import EventKind, Events
from deltasync.base.waiting import backoff
from deltasync.cluster.bucket import (
    CONSUMER,
    MODEL,
    PROCESS,
    Bucket,
    BucketCopy,
    Changed,
    Claim,
    ClusterOptions,
    Entry,
    Member,
    key_of,
    pack,
)

# Attempts to read the bucket at the start.
_START_TRIES = 8


class LeaseStore:
    """Reads and writes the bucket. Used in the event loop.

    A write names the revision in the local copy, and therefore never replaces an entry that this process has not
    seen. It raises `Changed` if the copy is behind the bucket, and `ServiceUnavailable` if brokers do not answer.

    Attributes:
        stale: whether the copy may be behind the bucket, and has to be read again.
    """

    def __init__(
        self,
        bucket: Bucket,
        copy: BucketCopy,
        events: Events,
        clock_ns: Callable[[], int],
        changed: asyncio.Event,
    ) -> None:
        """`changed` is set after each change of the copy."""
        self.stale, self._changed = True, changed
        self._bucket, self._copy, self._events, self._clock_ns = bucket, copy, events, clock_ns
        self._read = asyncio.Event()
        self._read.set()

    async def read(self) -> None:
        """Read the whole bucket, and follow its changes."""
        await self._read.wait()
        self._read.clear()
        self._copy.restart()
        self.stale = True
        try:
            await self._bucket.follow(self._see)
            self.stale = False
        finally:
            self._read.set()

    async def read_patiently(self) -> None:
        """Read the bucket, with retries: brokers that started with this process may still be electing a leader."""
        pauses = backoff()
        for tries in range(_START_TRIES, 0, -1):
            try:
                await self.read()
                return
            except ServiceUnavailable as error:
                if tries == 1:
                    raise
                self._events.emit(EventKind.FAILED, "the owners of models could not be read; trying again", error)
                await asyncio.sleep(next(pauses))

    async def write_member(self, name: str, member: Member | None) -> int:
        """Write the entry of a process; None removes it. Return the revision."""
        return await self._write(key_of(PROCESS, name), pack(member) if member else b"")

    async def write_claim(self, model: str, claim: Claim | None) -> None:
        """Write the claim of a model; None removes it."""
        await self._write(key_of(MODEL, model), pack(claim) if claim else b"")

    async def write_consumer(self, name: str, model: str) -> None:
        """Write the model of a consumer; an empty model removes the entry."""
        await self._write(key_of(CONSUMER, name), pack(model) if model else b"")

    async def close(self) -> None:
        """Stop following the bucket."""
        await self._bucket.close()

    async def _write(self, key: str, value: bytes) -> int:
        await self._read.wait()
        try:
            revision = await self._bucket.put(key, value, self._copy.revision(key))
        except Changed:
            self.stale = True
            self._changed.set()
            raise
        self._see(Entry(key, value, revision), followed=False)
        return revision

    def _see(self, entry: Entry, *, followed: bool = True) -> None:
        if followed:
            self._copy.follow(entry)
        try:
            self._copy.see(entry, self._clock_ns())
        except InvalidInput as error:
            self._events.emit(EventKind.FAILED, "an entry in the bucket could not be read", error)
        self._changed.set()


# Attempts to write a name that other processes write at the same time.
_TRIES = 3


class ConsumerNames:
    """The consumer names that this process has reserved for its models. Used in the event loop."""

    def __init__(self, leases: LeaseStore, copy: BucketCopy) -> None:
        self._leases, self._copy = leases, copy
        self._reserved = dict[str, str]()

    async def reserve(self, name: str, model: str) -> None:
        """Reserve a name for a model. Idempotent. `Contradiction` if a consumer of another model has it."""
        await self._insist(name, model)
        self._reserved[name] = model

    async def forget(self, name: str) -> None:
        """Free a name. Idempotent."""
        self._reserved.pop(name, None)
        await self._insist(name, "")

    async def _insist(self, name: str, model: str) -> None:
        for _ in range(_TRIES):
            follows = self._copy.consumers.get(name, model)
            if model and follows != model:
                raise Contradiction(f"consumer {name!r} follows another model", detail=f": {follows!r}")
            if await self.write(name, model):
                return
        raise ServiceUnavailable(f"consumer {name!r}: other processes are writing its name; try again")

    def drop(self, model: str) -> None:
        """Drop the names of a model before a takeover, which reserves them again."""
        self._reserved = {name: of for name, of in self._reserved.items() if of != model}

    def unwritten(self, owned: set[str]) -> dict[str, str]:
        """The model of each name that is missing or wrong in the bucket; empty for a deleted consumer.

        Only names of consumers whose models this process owns.
        """
        stored = self._copy.stored_consumers
        unwritten = {
            name: model for name, model in self._reserved.items() if model in owned and name not in stored
        }
        left = {name for name, model in stored.items() if model in owned and self._reserved.get(name) != model}
        return unwritten | dict.fromkeys(left, "")

    async def write(self, name: str, model: str) -> bool:
        """Write an entry of `unwritten`. Return False if the bucket had changed; then call this again."""
        if self._copy.stored_consumers.get(name, "") == model:
            return True
        try:
            await self._leases.write_consumer(name, model)
        except Changed:
            await self._leases.read()
            return False
        return True


class Heartbeat:
    """Renews the lease of this process, and checks that brokers confirm it. Used in the event loop.

    The bucket has to report each heartbeat as a change. Otherwise its changes have stopped, or it was lost or
    restored from an old copy, and this process reads it again.
    """

    def __init__(
        self,
        options: ClusterOptions,
        me: Member,
        leases: LeaseStore,
        copy: BucketCopy,
        events: Events,
        clock_ns: Callable[[], int],
    ) -> None:
        self.me, self._options, self._leases, self._copy = me, options, leases, copy
        self._events, self._clock_ns = events, clock_ns
        self._spoke_ns: int | None = None
        self._confirmed_ns: int | None = None
        self._revision = 0
        self._was_confirmed: bool | None = None
        self._superseded = False

    @property
    def confirmed(self) -> bool:
        """Whether brokers confirmed a heartbeat that began within the lease."""
        since = self._confirmed_ns
        fresh = since is not None and self._clock_ns() - since < self._options.lease_ns
        return fresh and not self._superseded

    @property
    def seconds_left(self) -> float:
        """Seconds until the next heartbeat."""
        if self._spoke_ns is None:
            return 0.0
        return max(self._options.beat_seconds - (self._clock_ns() - self._spoke_ns) / 1e9, 0.0)

    @property
    def due(self) -> bool:
        """Whether the next heartbeat is due."""
        return self.seconds_left == 0.0 or self._leases.stale

    def change(self, *, draining: bool) -> None:
        """Change the entry that the next heartbeat writes."""
        self.me = replace(self.me, draining=draining)

    async def speak(self, models: int) -> None:
        """Write a heartbeat with the number of models. `confirmed` shows whether that worked."""
        if self._superseded:
            return
        if self._was_confirmed:
            self._report(None)  # The process may have been suspended.
        began_ns = self._spoke_ns = self._clock_ns()
        self.me = replace(self.me, models=models)
        try:
            # In a new bucket, the revision may be lower than in the lost one.
            if self._leases.stale or self._copy.followed(key_of(PROCESS, self.me.name)) != self._revision:
                await self._leases.read()
            self._revision = await self._write()
            self._confirmed_ns = began_ns
            self._report(None)
        except DeltasyncError as error:
            self._report(error)

    async def leave(self) -> None:
        """Remove the entry of this process."""
        if self._superseded:
            return
        try:
            await self._leases.write_member(self.me.name, None)
        except DeltasyncError as error:
            self._events.emit(EventKind.FAILED, "the entry of this process could not be removed", error)

    async def _write(self) -> int:
        self._give_way()
        try:
            return await self._leases.write_member(self.me.name, self.me)
        except Changed:
            await self._leases.read()
        self._give_way()
        return await self._leases.write_member(self.me.name, self.me)

    def _give_way(self) -> None:
        me, other = self.me, self._copy.member(self.me.name)
        if other and other.run != me.run and (other.started, other.run) > (me.started, me.run):
            self._superseded = True
            raise Contradiction(
                f"another process was started as {me.name!r}, at {other.grpc}: use different names"
            )

    def _report(self, error: Exception | None) -> None:
        confirmed = self.confirmed
        if confirmed == self._was_confirmed:
            return
        if confirmed:
            self._events.emit(EventKind.PROCESS_CONFIRMED, process=self.me.name)
        else:
            text = "it gives up its models" if self._was_confirmed else "it takes over no models"
            self._events.emit(EventKind.PROCESS_UNCONFIRMED, text, error, process=self.me.name)
        self._was_confirmed = confirmed

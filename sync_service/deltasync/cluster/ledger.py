"""Reading and writing the bucket: claims to models, names of consumers, and each process's heartbeat."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

from deltasync.base.errors import Contradiction, DeltasyncError, InvalidInput, ServiceUnavailable
from deltasync.base.events import EventKind, Events
from deltasync.cluster.bucket import (
    CONSUMER,
    MODEL,
    PROCESS,
    Bucket,
    Changed,
    Entry,
    key_of,
    of_claim,
    of_consumer,
    of_member,
)
from deltasync.cluster.bucket_copy import BucketCopy
from deltasync.cluster.member import Claim, Member, OwnershipOptions


class Ledger:
    """What the processes have written down, and what this one writes. Every write is a comparison with the
    copy of the bucket: nobody's entry is replaced unseen. In the event loop.

    Writing raises `Changed` if the copy is behind the bucket, and `ServiceUnavailable` if brokers do not answer.

    Attributes:
        stale: whether the copy may be behind: it is to be read again.
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
        self.stale = True
        self._bucket = bucket
        self._copy = copy
        self._events = events
        self._clock_ns = clock_ns
        self._changed = changed
        self._read = asyncio.Event()
        self._read.set()

    async def read(self) -> None:
        """Read all of the bucket, and follow it from there.

        Raises:
            ServiceUnavailable: brokers do not answer.
        """
        await self._read.wait()
        self._read.clear()
        self._copy.restart()
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
            self._events.emit(EventKind.FAILED, "an entry of the owners of models is not understood", error)
        self._changed.set()


# So often the bucket is read anew because another process has written the same name.
_TRIES = 3


class ConsumerNames:
    """The names reserved by this process, for the models that it owns. In the event loop."""

    def __init__(self, ledger: Ledger, copy: BucketCopy) -> None:
        self._ledger, self._copy = ledger, copy
        self._reserved = dict[str, str]()

    async def reserve(self, name: str, model: str) -> None:
        """Have a name for a model; again changes nothing.

        Raises:
            Contradiction: it is of a consumer of another model.
            ServiceUnavailable: brokers do not answer.
        """
        for _ in range(_TRIES):
            follows = self._copy.consumers.get(name, model)
            if follows != model:
                raise Contradiction(f"consumer {name!r} follows another model", detail=f": {follows!r}")
            if await self._wrote(name, model):
                self._reserved[name] = model
                return
        raise ServiceUnavailable(f"consumer {name!r}: its name is being written by other processes; try again")

    async def forget(self, name: str) -> None:
        """Free a name; again changes nothing.

        Raises:
            ServiceUnavailable: brokers do not answer.
        """
        self._reserved.pop(name, None)
        for _ in range(_TRIES):
            if await self._wrote(name, ""):
                return
        raise ServiceUnavailable(f"consumer {name!r}: its name is being written by other processes; try again")

    def drop(self, model: str) -> None:
        """A model is not owned here any more: its owner says which consumers it has."""
        self._reserved = {name: of for name, of in self._reserved.items() if of != model}

    def unsaid(self, owned: set[str]) -> dict[str, str]:
        """What the bucket does not know of the consumers of models owned here: the model of each, empty for those
        that are no more.
        """
        stored = self._copy.stored_consumers
        unsaid = {name: model for name, model in self._reserved.items() if model in owned and name not in stored}
        left = {name for name, model in stored.items() if model in owned and self._reserved.get(name) != model}
        return unsaid | dict.fromkeys(left, "")

    async def say(self, name: str, model: str) -> None:
        """Write one of them down; if the bucket has changed meanwhile, the next time."""
        await self._wrote(name, model)

    async def _wrote(self, name: str, model: str) -> bool:
        if self._copy.stored_consumers.get(name, "") == model:
            return True
        try:
            await self._ledger.write_consumer(name, model)
        except Changed:
            await self._ledger.read()
            return False
        return True


class Heartbeat:
    """Says that this process is alive, and knows whether it was heard. In the event loop.

    It is to come back with what is followed of the bucket: by this it is found out where changes do not come any
    more, and where the bucket was lost or put back to an earlier copy.
    """

    def __init__(
        self,
        options: OwnershipOptions,
        me: Member,
        ledger: Ledger,
        copy: BucketCopy,
        events: Events,
        clock_ns: Callable[[], int],
    ) -> None:
        self.me = me
        self._options = options
        self._ledger = ledger
        self._copy = copy
        self._events = events
        self._clock_ns = clock_ns
        self._said_ns: int | None = None
        self._confirmed_ns: int | None = None
        self._revision = 0
        self._was_confirmed: bool | None = None
        self._superseded = False

    @property
    def confirmed(self) -> bool:
        """Whether it was heard within the lease. It counts from when it began to speak."""
        since = self._confirmed_ns
        fresh = since is not None and self._clock_ns() - since < self._options.lease_ns
        return fresh and not self._superseded

    @property
    def seconds_left(self) -> float:
        """How long until it is to speak again."""
        if self._said_ns is None:
            return 0.0
        return max(self._options.beat_seconds - (self._clock_ns() - self._said_ns) / 1e9, 0.0)

    @property
    def due(self) -> bool:
        """Whether it is to speak again."""
        return self.seconds_left == 0.0 or self._ledger.stale

    def change(self, *, draining: bool) -> None:
        """Say something else of it from the next time on."""
        self.me = replace(self.me, draining=draining)

    async def speak(self, models: int) -> None:
        """Say that this process is alive, and owns so many models. `confirmed` shows if brokers do not answer."""
        if self._superseded:
            return
        if self._was_confirmed:
            self._tell(None)  # It may have slept.
        began_ns = self._said_ns = self._clock_ns()
        self.me = replace(self.me, models=models)
        try:
            # In a bucket made anew, it may be at a lower revision than what was followed of the one before.
            if self._ledger.stale or self._copy.followed(key_of(PROCESS, self.me.name)) != self._revision:
                await self._ledger.read()
            self._revision = await self._write()
            self._confirmed_ns = began_ns
            self._tell(None)
        except DeltasyncError as error:
            self._tell(error)

    async def leave(self) -> None:
        """Say that it is gone."""
        if self._superseded:
            return
        try:
            await self._ledger.erase_member(self.me.name)
        except DeltasyncError as error:
            self._events.emit(EventKind.FAILED, "telling the other processes that this one ends", error)

    async def _write(self) -> int:
        self._give_way()
        try:
            return await self._ledger.write_member(self.me)
        except Changed:
            await self._ledger.read()
        self._give_way()
        return await self._ledger.write_member(self.me)

    def _give_way(self) -> None:
        me, other = self.me, self._copy.member(self.me.name)
        if other and other.run != me.run and (other.started, other.run) > (me.started, me.run):
            self._superseded = True
            raise Contradiction(f"another process was started as {me.name!r}, at {other.grpc}: names must differ")

    def _tell(self, error: Exception | None) -> None:
        confirmed = self.confirmed
        if confirmed == self._was_confirmed:
            return
        if confirmed:
            self._events.emit(EventKind.PROCESS_CONFIRMED, process=self.me.name)
        else:
            text = "it gives up its models" if self._was_confirmed else "it takes no models"
            self._events.emit(EventKind.PROCESS_UNCONFIRMED, text, error, process=self.me.name)
        self._was_confirmed = confirmed

"""What a process says of itself, again and again, so that the others know that it lives."""

from collections.abc import Callable
from dataclasses import replace

from deltasync.core.errors import Contradiction, DeltasyncError
from deltasync.core.events import EventKind, Events
from deltasync.ownership.bucket import Changed
from deltasync.ownership.keys import PROCESS, key_of
from deltasync.ownership.ledger import Ledger
from deltasync.ownership.member import Member
from deltasync.ownership.options import OwnershipOptions
from deltasync.ownership.table import Table


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
        table: Table,
        events: Events,
        clock_ns: Callable[[], int],
    ) -> None:
        self.me = me
        self._options, self._ledger, self._table, self._events = options, ledger, table, events
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
            if self._ledger.stale or self._table.followed(key_of(PROCESS, self.me.name)) != self._revision:
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
        me, other = self.me, self._table.member(self.me.name)
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

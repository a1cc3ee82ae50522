"""Taking models and giving them up, and which of them a process owns meanwhile."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from deltasync.base.backoff import backoff
from deltasync.base.errors import DeltasyncError, NotOwner, Owner, ServiceUnavailable
from deltasync.base.events import EventKind, Events
from deltasync.cluster.bucket import Changed
from deltasync.cluster.ledger import Ledger
from deltasync.cluster.member import Claim
from deltasync.cluster.owners import Models
from deltasync.cluster.table import Table


class State(Enum):
    """How far a process is with a model."""

    CLAIMING = "claiming"
    TAKING = "taking"
    TAKEN = "taken"
    LEAVING = "leaving"


@dataclass
class Hold:
    """A model that a process owns, takes or gives up.

    Attributes:
        claim: with which claim.
        state: how far it is.
        taking: the task that takes it.
        leaving: the task that gives it up, once it does.
    """

    claim: Claim
    state: State = State.CLAIMING
    taking: "asyncio.Task[Owner] | None" = None
    leaving: "asyncio.Task[None] | None" = None


@dataclass
class _Wait:
    until_ns: int = 0
    seconds: Iterator[float] = field(default_factory=backoff)


class Holds:
    """What a process holds, and what it could not take lately."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._holds = dict[str, Hold]()
        self._waits = dict[str, _Wait]()

    def get(self, model: str) -> Hold | None:
        """The hold of a model, if there is one."""
        return self._holds.get(model)

    def add(self, model: str, hold: Hold) -> None:
        """Hold a model."""
        self._holds[model] = hold

    def drop(self, model: str) -> None:
        """Hold it no more."""
        self._holds.pop(model, None)

    def names(self) -> list[str]:
        """All models held."""
        return sorted(self._holds)

    def claims(self) -> dict[str, Claim]:
        """All models held, with their claims."""
        return {model: hold.claim for model, hold in self._holds.items()}

    def is_taken(self, model: str) -> bool:
        """Whether a model is open here."""
        hold = self._holds.get(model)
        return hold is not None and hold.state is State.TAKEN

    def wait(self, model: str, least_seconds: float = 0.0) -> None:
        """A model could not be taken: not to be tried again for a while, each time for longer."""
        waiting = self._waits.setdefault(model, _Wait())
        seconds = max(next(waiting.seconds), least_seconds)
        waiting.until_ns = self._clock_ns() + int(seconds * 1e9)

    def forgive(self, model: str) -> None:
        """It was taken."""
        self._waits.pop(model, None)

    def waiting(self) -> set[str]:
        """The models not to be tried again yet."""
        now_ns = self._clock_ns()
        return {model for model, wait in self._waits.items() if wait.until_ns > now_ns}


class Transfer:
    """Takes models, and gives them up: first the claim, then the log, and the other way round. In the event loop.

    Args:
        holds: what is held is kept there.
        ledger: where claims are written.
        table: what it says.
        models: the service's side.
        events: told of each.
        owner: this process as the owner of a model, given an epoch.
        at_once: how many models are taken at the same time.
    """

    def __init__(
        self,
        holds: Holds,
        ledger: Ledger,
        table: Table,
        models: Models,
        events: Events,
        owner: Callable[[int], Owner],
        at_once: int,
    ) -> None:
        self._holds, self._ledger, self._table, self._models, self._events = holds, ledger, table, models, events
        self._owner = owner
        self._gate = asyncio.Semaphore(at_once)

    def take(self, model: str, reason: str, heir: Callable[[], str]) -> "asyncio.Task[Owner]":
        """Begin to take a model, unless that was begun.

        Args:
            model: its name.
            reason: why, in words.
            heir: who is to have it if this process cannot take it.

        Returns:
            The task, which raises `NotOwner` or `ServiceUnavailable` if it cannot.
        """
        hold = self._holds.get(model)
        if hold is None:
            hold = Hold(self._new_claim())
            self._holds.add(model, hold)
            hold.taking = asyncio.create_task(self._take(model, hold, reason, heir))
            hold.taking.add_done_callback(_retrieve)
        if hold.taking is None:
            raise NotOwner(f"model {model!r} is not to be taken now")
        return hold.taking

    def leave(self, model: str, reason: str, heir: str | None = None) -> "asyncio.Task[None]":
        """Begin to give a model up, unless that was begun.

        Args:
            model: its name, of one that is held.
            reason: why, in words.
            heir: who is to have it, empty for whoever is chosen; None: another has it already, or brokers do not
                answer, and nothing is written.
        """
        hold = self._holds.get(model)
        if hold is None:
            raise NotOwner(f"model {model!r} is not owned here")
        if hold.leaving is None:
            hold.leaving = asyncio.create_task(self._leave(model, hold, reason, heir))
            hold.leaving.add_done_callback(_retrieve)
        return hold.leaving

    async def let_go(self, model: str, heir: str) -> None:
        """Write down that this process does not own a model any more."""
        await self._ledger.write_claim(model, Claim(None, self._table.next_epoch, heir))

    def _new_claim(self) -> Claim:
        epoch = self._table.next_epoch
        return Claim(self._owner(epoch), epoch)

    async def _take(self, model: str, hold: Hold, reason: str, heir: Callable[[], str]) -> Owner:
        async with self._gate:
            before = self._table.claims.get(model)
            owner = await self._claim(model, hold)
            hold.state = State.TAKING
            try:
                await self._models.take(model, owner)
            except Exception as error:  # Whatever it is, nobody is to wait for this process.
                await self._fail(model, error, heir())
                raise NotOwner(f"model {model!r} cannot be taken by {owner.process}: {error}") from error
            hold.state = State.TAKEN
        self._holds.forgive(model)
        over = before is not None and before.process not in ("", owner.process)
        kind = EventKind.MODEL_TAKEN_OVER if over else EventKind.MODEL_CLAIMED
        self._events.emit(kind, reason, model=model, process=owner.process, epoch=owner.epoch)
        return owner

    async def _claim(self, model: str, hold: Hold) -> Owner:
        hold.claim = self._new_claim()
        owner = self._owner(hold.claim.epoch)
        try:
            await self._ledger.write_claim(model, hold.claim)
        except Changed as error:
            self._holds.drop(model)
            winner = self._table.claims.get(model)
            raise NotOwner(
                f"model {model!r} was claimed by another process", owner=winner.owner if winner else None
            ) from error
        except ServiceUnavailable:
            self._holds.drop(model)
            self._holds.wait(model)
            raise
        return owner

    async def _fail(self, model: str, error: Exception, heir: str) -> None:
        self._holds.wait(model)
        self._events.emit(EventKind.MODEL_NOT_TAKEN, "it is given back, and tried again", error, model=model)
        await self._close(model, "it could not be taken")
        await self._write_release(model, heir)

    async def _leave(self, model: str, hold: Hold, reason: str, heir: str | None) -> None:
        hold.state = State.LEAVING
        if hold.taking and not hold.taking.done():
            hold.taking.cancel()
            await asyncio.wait([hold.taking])
        await self._close(model, reason)
        self._events.emit(EventKind.MODEL_GIVEN_UP, reason, model=model, epoch=hold.claim.epoch)
        if heir is not None:
            await self._write_release(model, heir)

    async def _close(self, model: str, reason: str) -> None:
        try:
            await self._models.give_up(model, reason)
        except Exception as error:  # noqa: BLE001  # The fence of the next owner ends what this one could not.
            self._events.emit(EventKind.FAILED, "giving a model up", error, model=model)
        finally:
            self._holds.drop(model)

    async def _write_release(self, model: str, heir: str) -> None:
        try:
            await self.let_go(model, heir)
        except DeltasyncError as error:
            self._events.emit(EventKind.FAILED, "writing down that a model was given up", error, model=model)


def _retrieve(task: "asyncio.Task[Owner] | asyncio.Task[None]") -> None:
    """What it failed with was said where it failed."""
    if not task.cancelled():
        task.exception()

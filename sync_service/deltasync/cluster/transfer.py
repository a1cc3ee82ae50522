"""Taking models and giving them up, and which of them a process owns meanwhile."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from deltasync.base.errors import DeltasyncError, NotOwner, Owner, ServiceUnavailable
from deltasync.base.events import EventKind, Events
from deltasync.base.waiting import backoff
from deltasync.cluster.bucket import Changed
from deltasync.cluster.bucket_copy import BucketCopy
from deltasync.cluster.ledger import Heartbeat, Ledger
from deltasync.cluster.member import Claim
from deltasync.cluster.owners import Host


class Transfer:
    """Takes models, and gives them up: first the claim, then the log, and the other way round. In the event loop.

    Args:
        tenures: the models that this process has.
        ledger: where claims are written.
        copy: of the bucket.
        host: opens and closes their logs.
        events: told of each.
        beat: this process.
        at_once: how many models are taken at the same time.
    """

    def __init__(
        self,
        tenures: "Tenures",
        ledger: Ledger,
        copy: BucketCopy,
        host: Host,
        events: Events,
        beat: Heartbeat,
        at_once: int,
    ) -> None:
        self._tenures = tenures
        self._ledger = ledger
        self._copy = copy
        self._host = host
        self._events = events
        self._beat = beat
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
        tenure = self._tenures.get(model)
        if tenure is None:
            tenure = Tenure(self._new_claim())
            self._tenures.add(model, tenure)
            tenure.taking = asyncio.create_task(self._take(model, tenure, reason, heir))
            tenure.taking.add_done_callback(_retrieve)
        if tenure.taking is None:
            raise NotOwner(f"model {model!r} is not to be taken now")
        return tenure.taking

    def leave(self, model: str, reason: str, heir: str | None = None) -> "asyncio.Task[None]":
        """Begin to give a model up, unless that was begun.

        Args:
            model: its name, of one that this process has.
            reason: why, in words.
            heir: who is to have it, empty for whoever is chosen; None: another has it already, or brokers do not
                answer, and nothing is written.
        """
        tenure = self._tenures.get(model)
        if tenure is None:
            raise NotOwner(f"model {model!r} is not owned here")
        if tenure.leaving is None:
            tenure.leaving = asyncio.create_task(self._leave(model, tenure, reason, heir))
            tenure.leaving.add_done_callback(_retrieve)
        return tenure.leaving

    async def let_go(self, model: str, heir: str) -> None:
        """Write down that this process does not own a model any more."""
        await self._ledger.write_claim(model, Claim(None, self._copy.next_epoch, heir))

    def _new_claim(self) -> Claim:
        epoch = self._copy.next_epoch
        return Claim(self._beat.me.owner(epoch), epoch)

    async def _take(self, model: str, tenure: "Tenure", reason: str, heir: Callable[[], str]) -> Owner:
        async with self._gate:
            before = self._copy.claims.get(model)
            owner = await self._claim(model, tenure)
            tenure.stage = Stage.TAKING
            try:
                await self._host.take(model, owner)
            except Exception as error:  # Whatever it is, nobody is to wait for this process.
                await self._fail(model, error, heir())
                raise NotOwner(f"model {model!r} cannot be taken by {owner.process}: {error}") from error
            tenure.stage = Stage.OPEN
        self._tenures.forgive(model)
        over = before is not None and before.process not in ("", owner.process)
        kind = EventKind.MODEL_TAKEN_OVER if over else EventKind.MODEL_CLAIMED
        self._events.emit(kind, reason, model=model, process=owner.process, epoch=owner.epoch)
        return owner

    async def _claim(self, model: str, tenure: "Tenure") -> Owner:
        tenure.claim = self._new_claim()
        owner = self._beat.me.owner(tenure.claim.epoch)
        try:
            await self._ledger.write_claim(model, tenure.claim)
        except Changed as error:
            self._tenures.drop(model)
            winner = self._copy.claims.get(model)
            raise NotOwner(
                f"model {model!r} was claimed by another process", owner=winner.owner if winner else None
            ) from error
        except ServiceUnavailable:
            self._tenures.drop(model)
            self._tenures.wait(model)
            raise
        return owner

    async def _fail(self, model: str, error: Exception, heir: str) -> None:
        self._tenures.wait(model)
        self._events.emit(EventKind.MODEL_NOT_TAKEN, "it is given back, and tried again", error, model=model)
        await self._close(model, "it could not be taken")
        await self._write_release(model, heir)

    async def _leave(self, model: str, tenure: "Tenure", reason: str, heir: str | None) -> None:
        tenure.stage = Stage.LEAVING
        if tenure.taking and not tenure.taking.done():
            tenure.taking.cancel()
            await asyncio.wait([tenure.taking])
        await self._close(model, reason)
        self._events.emit(EventKind.MODEL_GIVEN_UP, reason, model=model, epoch=tenure.claim.epoch)
        if heir is not None:
            await self._write_release(model, heir)

    async def _close(self, model: str, reason: str) -> None:
        try:
            await self._host.give_up(model, reason)
        except Exception as error:  # noqa: BLE001  # The fence of the next owner ends what this one could not.
            self._events.emit(EventKind.FAILED, "giving a model up", error, model=model)
        finally:
            self._tenures.drop(model)

    async def _write_release(self, model: str, heir: str) -> None:
        try:
            await self.let_go(model, heir)
        except DeltasyncError as error:
            self._events.emit(EventKind.FAILED, "writing down that a model was given up", error, model=model)


class Stage(Enum):
    """How far a process is with a model."""

    CLAIMING = "claiming"
    TAKING = "taking"
    OPEN = "open"
    LEAVING = "leaving"


@dataclass
class Tenure:
    """A model that a process owns, takes or gives up.

    Attributes:
        claim: with which claim.
        stage: how far it is.
        taking: the task that takes it.
        leaving: the task that gives it up, once it does.
    """

    claim: Claim
    stage: Stage = Stage.CLAIMING
    taking: "asyncio.Task[Owner] | None" = None
    leaving: "asyncio.Task[None] | None" = None


@dataclass
class _Wait:
    until_ns: int = 0
    seconds: Iterator[float] = field(default_factory=backoff)


class Tenures:
    """The models that a process has, and those that it could not take lately."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._tenures = dict[str, Tenure]()
        self._waits = dict[str, _Wait]()

    def get(self, model: str) -> Tenure | None:
        """The tenure of a model, if there is one."""
        return self._tenures.get(model)

    def add(self, model: str, tenure: Tenure) -> None:
        """Begin to have a model."""
        self._tenures[model] = tenure

    def drop(self, model: str) -> None:
        """Tenure it no more."""
        self._tenures.pop(model, None)

    def names(self) -> list[str]:
        """The models that this process owns, takes or gives up."""
        return sorted(self._tenures)

    def claims(self) -> dict[str, Claim]:
        """The claims of these models."""
        return {model: tenure.claim for model, tenure in self._tenures.items()}

    def is_open(self, model: str) -> bool:
        """Whether a model is open here."""
        tenure = self._tenures.get(model)
        return tenure is not None and tenure.stage is Stage.OPEN

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


def _retrieve(task: "asyncio.Task[Owner] | asyncio.Task[None]") -> None:
    """What it failed with was said where it failed."""
    if not task.cancelled():
        task.exception()

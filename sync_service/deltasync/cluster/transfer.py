"""Takes over models and gives them up."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from deltasync.base.errors import DeltasyncError, NotOwner, Owner, ServiceUnavailable
from deltasync.base.events import EventKind, Events
from deltasync.base.waiting import backoff
from deltasync.cluster.bucket import BucketCopy, Changed, Claim, ClusterState
from deltasync.cluster.lease_store import ConsumerNames, Heartbeat, LeaseStore
from deltasync.cluster.owners import Host
from deltasync.cluster.placement import Steps, next_after, next_heir

# Models that a process loads at the same time.
_TAKEN_AT_ONCE = 4


class Transfer:
    """Takes over models (claim first, then log) and gives them up (log first). Used in the event loop."""

    def __init__(
        self,
        owned: "OwnedModels",
        leases: LeaseStore,
        copy: BucketCopy,
        names: ConsumerNames,
        host: Host,
        events: Events,
        beat: Heartbeat,
        state: Callable[[], ClusterState],
    ) -> None:
        self._owned, self._leases, self._copy, self._names = owned, leases, copy, names
        self._host, self._events, self._beat, self._state = host, events, beat, state
        self._gate = asyncio.Semaphore(_TAKEN_AT_ONCE)

    def take(self, model: str, reason: str) -> "asyncio.Task[Owner]":
        """Begin the takeover of a model, or join one that has begun. If it fails, the next process tries."""
        tenure = self._owned.get(model)
        if tenure is None:
            self._names.drop(model)
            tenure = Tenure(self._new_claim())
            self._owned[model] = tenure
            tenure.taking = asyncio.create_task(self._take(model, tenure, reason))
            tenure.taking.add_done_callback(_retrieve)
        if tenure.taking is None:
            raise NotOwner(f"model {model!r} cannot be taken over now; try again")
        return tenure.taking

    def leave(self, model: str, reason: str, heir: str | None = None) -> "asyncio.Task[None]":
        """Begin to give up a model of this process, or join a release that has begun.

        `heir` should take it over; empty = the first in its order; None = write no release, because another
        process already owns it or brokers do not answer.
        """
        tenure = self._owned.get(model)
        if tenure is None:
            raise NotOwner(f"model {model!r} is not owned here")
        if tenure.leaving is None:
            tenure.leaving = asyncio.create_task(self._leave(model, tenure, reason, heir))
            tenure.leaving.add_done_callback(_retrieve)
        return tenure.leaving

    async def write(self, steps: Steps) -> None:
        """Write entries that are missing in the bucket: claims, releases, and names of consumers."""
        owned = self._owned.open()
        # The next heartbeat repeats a failed write, and reports the error.
        with suppress(Changed, ServiceUnavailable):
            for model in steps.write_again:
                tenure = self._owned.get(model)
                claim = tenure.claim if tenure else self._copy.claims.get(model)
                if claim and (tenure is None or tenure.stage is Stage.OPEN):
                    await self._leases.write_claim(model, claim)
            for model in steps.let_go:
                heir = next_heir(model, self._state())
                await self._leases.write_claim(model, Claim(None, self._copy.next_epoch, heir))
            for name, model in self._names.unwritten(owned).items():
                await self._names.write(name, model)

    def _new_claim(self) -> Claim:
        epoch = self._copy.next_epoch
        return Claim(self._beat.me.owner(epoch), epoch)

    async def _take(self, model: str, tenure: "Tenure", reason: str) -> Owner:
        async with self._gate:
            before = self._copy.claims.get(model)
            owner = await self._claim(model, tenure)
            tenure.stage = Stage.TAKING
            try:
                await self._host.take(model, owner)
            except Exception as error:  # Release it on any error, as others would otherwise wait.
                await self._fail(model, error)
                raise NotOwner(f"process {owner.process} cannot take over model {model!r}: {error}") from error
            tenure.stage = Stage.OPEN
        self._owned.forgive(model)
        over = before is not None and before.process not in ("", owner.process)
        kind = EventKind.MODEL_TAKEN_OVER if over else EventKind.MODEL_CLAIMED
        self._events.emit(kind, reason, model=model, process=owner.process, epoch=owner.epoch)
        return owner

    async def _claim(self, model: str, tenure: "Tenure") -> Owner:
        tenure.claim = self._new_claim()
        owner = self._beat.me.owner(tenure.claim.epoch)
        try:
            await self._leases.write_claim(model, tenure.claim)
        except Changed as error:
            self._owned.pop(model, None)
            winner = self._copy.claims.get(model)
            raise NotOwner(
                f"model {model!r} was claimed by another process", owner=winner.owner if winner else None
            ) from error
        except ServiceUnavailable:
            self._owned.pop(model, None)
            self._owned.wait(model)
            raise
        return owner

    async def _fail(self, model: str, error: Exception) -> None:
        self._owned.wait(model)
        self._events.emit(EventKind.MODEL_NOT_TAKEN, "its takeover failed and will be retried", error, model=model)
        heir = next_after(model, self._beat.me.name, self._state().members.values())
        await self._close(model, "its takeover failed")
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
        except Exception as error:  # noqa: BLE001  # the next owner fences off the rest
            self._events.emit(EventKind.FAILED, "it could not be closed", error, model=model)
        finally:
            self._owned.pop(model, None)

    async def _write_release(self, model: str, heir: str) -> None:
        try:
            await self._leases.write_claim(model, Claim(None, self._copy.next_epoch, heir))
        except DeltasyncError as error:
            self._events.emit(EventKind.FAILED, "its release could not be written", error, model=model)


class Stage(Enum):
    """The stage of a tenure."""

    CLAIMING = "claiming"
    TAKING = "taking"
    OPEN = "open"
    LEAVING = "leaving"


@dataclass
class Tenure:
    """A model that a process owns, takes over or gives up.

    Attributes:
        claim: its claim.
        stage: its stage.
        taking: the task of the takeover.
        leaving: the task that gives it up, if any.
    """

    claim: Claim
    stage: Stage = Stage.CLAIMING
    taking: "asyncio.Task[Owner] | None" = None
    leaving: "asyncio.Task[None] | None" = None


@dataclass
class _Wait:
    until_ns: int = 0
    seconds: Iterator[float] = field(default_factory=backoff)


class OwnedModels(dict[str, Tenure]):
    """The models that a process owns, takes over or gives up, and those that it failed to take over."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._waits = dict[str, _Wait]()

    def claims(self) -> dict[str, Claim]:
        """The claims of these models."""
        return {model: tenure.claim for model, tenure in self.items()}

    def open(self) -> set[str]:
        """The models whose logs are open here."""
        return {model for model, tenure in self.items() if tenure.stage is Stage.OPEN}

    def wait(self, model: str, least_seconds: float = 0.0) -> None:
        """Record a failed takeover: wait before the next attempt, longer each time."""
        waiting = self._waits.setdefault(model, _Wait())
        seconds = max(next(waiting.seconds), least_seconds)
        waiting.until_ns = self._clock_ns() + int(seconds * 1e9)

    def forgive(self, model: str) -> None:
        """Forget the failed takeovers of a model."""
        self._waits.pop(model, None)

    def waiting(self) -> set[str]:
        """The models that wait for the next attempt."""
        now_ns = self._clock_ns()
        return {model for model, wait in self._waits.items() if wait.until_ns > now_ns}


def _retrieve(task: "asyncio.Task[Owner] | asyncio.Task[None]") -> None:
    """Retrieve the error of a task, which is already reported."""
    if not task.cancelled():
        task.exception()

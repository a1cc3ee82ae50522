"""The `Owners` of a process in a cluster."""

import asyncio
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum

from deltasync.base.clock import steady_ns
from deltasync.base.errors import DeltasyncError, NotOwner, Owner, ServiceUnavailable
from deltasync.base.events import EventKind, Events
from deltasync.base.waiting import backoff, first_of
from deltasync.cluster.bucket import Bucket, BucketCopy, Changed, Claim, ClusterOptions, ClusterState, Member
from deltasync.cluster.lease_store import ConsumerNames, Heartbeat, LeaseStore
from deltasync.cluster.owners import Host, Owners
from deltasync.cluster.placement import Steps, next_after, next_heir, next_steps, responsibility_for

# Models that a process loads at the same time.
_TAKEN_AT_ONCE = 4


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


class SharedOwners(Owners):
    """The `Owners` of a process in a cluster.

    The log decides ownership: a process that takes over a model fences off the others. The bucket lets all
    processes agree beforehand.
    """

    def __init__(
        self,
        options: ClusterOptions,
        me: Member,
        bucket: Bucket,
        host: Host,
        events: Events,
        clock_ns: Callable[[], int] = steady_ns,
    ) -> None:
        self._options, self._host, self._events, self._clock_ns = options, host, events, clock_ns
        self._copy = BucketCopy(options.lease_ns)
        self._nudged = asyncio.Event()
        self._leases = LeaseStore(bucket, self._copy, events, clock_ns, self._nudged)
        self._owned = OwnedModels(clock_ns)
        self._beat = Heartbeat(options, me, self._leases, self._copy, events, clock_ns)
        self._names = ConsumerNames(self._leases, self._copy)
        self._gate = asyncio.Semaphore(_TAKEN_AT_ONCE)
        self._with_log: frozenset[str] = frozenset()
        self._looked_ns: int | None = None
        self._started_ns = clock_ns()
        self._writing: asyncio.Task[None] | None = None
        self._running: asyncio.Task[None] | None = None

    @property
    def me(self) -> Member:
        """This process."""
        return self._beat.me

    @property
    def confirmed(self) -> bool:
        """Whether this process may serve its models: brokers confirmed a heartbeat within the lease."""
        return self._beat.confirmed

    def check(self, model: str) -> None:
        """Check that this process serves a model, or would own it if it is new."""
        if not responsibility_for(model, state := self._state()).here:
            raise _not_owner(model, state)

    def owner_of(self, model: str) -> Owner | None:
        """The live owner of a model; None without one."""
        return self._state().owner_of(model)

    def models(self) -> Collection[str]:
        """All models of the cluster that this process knows."""
        return sorted({*self._copy.claims, *self._with_log, *self._owned})

    def model_of(self, consumer: str) -> str | None:
        """The model of a consumer; None if there is no such consumer."""
        return self._copy.consumers.get(consumer)

    def consumers_of(self, model: str) -> Collection[str]:
        """The names of the consumers that follow a model."""
        return [name for name, of in self._copy.consumers.items() if of == model]

    def processes(self) -> Sequence[Member]:
        """The live processes of the cluster, including this one, by name."""
        return list(self._state().members.values())

    def gone(self) -> Sequence[Member]:
        """The processes whose lease expired without a goodbye, by name."""
        return [each for each in self._copy.silent(self._clock_ns()) if each.name != self.me.name]

    async def claim(self, model: str) -> Owner:
        """Own a model if this process already does or is its heir. Its log is open here when this returns."""
        state, tenure = self._state(), self._owned.get(model)
        answer = responsibility_for(model, state)
        mine = answer.here or (answer.owner is None and self.confirmed and not self.me.draining)
        if not mine or model in state.waiting or (tenure and tenure.leaving):
            raise _not_owner(model, state)
        try:
            return await _ended(model, self._begin_taking(model, "a client opened it here"))
        except NotOwner as error:
            if not self._leases.stale:
                raise
            await self._leases.read()  # It shows which process was first.
            raise _not_owner(model, self._state()) from error

    async def move(self, model: str, to: str) -> None:
        """Save a model (`Host.save`) and hand it over to another process."""
        next_heir(model, self._state(), to)
        if model not in self._owned.open():
            raise _not_owner(model, self._state())
        await self._release(model, to)

    async def lost(self, model: str, reason: str) -> None:
        """Give up a model after another process took over its log."""
        if self._owned.get(model) is None:
            return
        self._owned.wait(model, self._options.lease_seconds)
        self._leases.stale = True
        await asyncio.shield(self._begin_leaving(model, reason))
        self._nudged.set()

    async def forget(self, model: str) -> None:
        """Remove the log and the claim of a deleted model."""
        self.check(model)
        await self._host.forget(model)
        for name in self.consumers_of(model):
            await self._names.forget(name)
        try:
            await self._leases.write_claim(model, None)
        except Changed as error:
            raise NotOwner(f"model {model!r}: another process changed its entry; try again") from error
        self._with_log -= {model}
        self._owned.pop(model, None)

    async def reserve_consumer(self, name: str, model: str) -> None:
        """Reserve the name of a consumer for a model owned here. Idempotent."""
        await self._names.reserve(name, model)

    async def forget_consumer(self, name: str) -> None:
        """Free the name of a consumer of a model owned here. Idempotent."""
        await self._names.forget(name)

    async def drain(self) -> None:
        """Take over no more models; save the models owned here and hand them over one by one."""
        self._events.emit(EventKind.PROCESS_DRAINING, process=self.me.name)
        self._beat.change(draining=True)
        await self._beat.speak(len(self._owned))
        for model in sorted(self._owned):
            with suppress(NotOwner):  # The model may have left already.
                await self._release(model)

    async def start(self) -> None:
        """Join the cluster: read the bucket, write heartbeats, and take over models as their heir."""
        self._started_ns = self._clock_ns()
        await self._leases.read_patiently()
        self._running = asyncio.create_task(self._run())

    async def close(self) -> None:
        """Give up all models and leave the cluster."""
        self._beat.change(draining=True)
        tasks = [
            self._begin_leaving(model, "the process is shutting down", next_heir(model, self._state()))
            for model in sorted(self._owned)
        ]
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in filter(None, [self._running, self._writing]):
            task.cancel()
            await asyncio.wait([task])
        await self._beat.leave()
        await self._leases.close()

    async def step(self) -> None:
        """Write a heartbeat if it is due, and begin the next steps. Called repeatedly."""
        for model in self._owned.waiting():
            owner = self._state().owner_of(model)
            if owner and owner.process != self.me.name:  # Another process had it: no need to wait.
                self._owned.forgive(model)
        if not self.confirmed:  # Before it renews the lease: others may have taken over during a suspension.
            self._begin(next_steps(self._state()))
        if self._beat.due:
            await self._beat.speak(len(self._owned))
            await self._look()
        self._begin(next_steps(self._state()))

    async def _run(self) -> None:
        try:
            while True:
                self._nudged.clear()
                await self.step()
                await first_of(self._nudged.wait(), seconds=self._beat.seconds_left)
        except Exception as error:  # noqa: BLE001  # the other processes take over
            text = "ownership failed; this process gives up all models within the lease"
            self._events.emit(EventKind.FAILED, text, error)

    async def _look(self) -> None:
        """Ask brokers which models have a log, once per lease."""
        now_ns, deletions = self._clock_ns(), self._copy.deletions
        if self._looked_ns is not None and now_ns - self._looked_ns < self._options.lease_ns:
            return
        try:
            models = frozenset(await self._host.models_with_log())
        except DeltasyncError as error:
            self._events.emit(EventKind.FAILED, "brokers could not be asked for the models", error)
            return
        self._looked_ns = now_ns
        if deletions == self._copy.deletions:  # Otherwise the answer may be older than the deletion.
            self._with_log = models

    def _begin(self, steps: Steps) -> None:
        for model, reason in steps.give_up.items():
            self._begin_leaving(model, reason)
        if self._leases.stale or not self.confirmed:
            return
        # This wait lets processes that start together find each other.
        if self._clock_ns() - self._started_ns >= self._options.beat_seconds * 1e9:
            for model, reason in steps.claim.items():
                self._begin_taking(model, reason)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._write(steps))

    async def _release(self, model: str, to: str = "") -> None:
        """Save a model if it is open, and hand it over to another process: `to`, or else its heir."""
        if model in self._owned.open():
            try:
                await self._host.save(model)
            except DeltasyncError as error:
                self._events.emit(EventKind.FAILED, "it could not be saved before the move", error, model=model)
        heir = next_heir(model, self._state(), to)
        if self._owned.get(model) is None:
            raise _not_owner(model, self._state())
        self._owned.wait(model, self._options.lease_seconds)
        reason = f"handed over to {heir}" if heir else "released; no other process can take it over"
        await asyncio.shield(self._begin_leaving(model, reason, heir))

    # Takeovers claim a model first and open its log then; giving up closes the log first.

    def _begin_taking(self, model: str, reason: str) -> "asyncio.Task[Owner]":
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

    def _begin_leaving(self, model: str, reason: str, heir: str | None = None) -> "asyncio.Task[None]":
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

    async def _write(self, steps: Steps) -> None:
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

    def _state(self) -> ClusterState:
        members = self._copy.living(self._clock_ns())
        return ClusterState(
            me=self.me.name,
            confirmed=self.confirmed,
            members={**members, self.me.name: self.me},
            claims=self._copy.claims,
            stored=self._copy.stored,
            own=self._owned.claims(),
            open=self._owned.open(),
            with_log=self._with_log,
            waiting=self._owned.waiting(),
        )


async def _ended(model: str, task: "asyncio.Task[Owner]") -> Owner:
    """Wait for the takeover of a model, which continues if the caller is cancelled."""
    await asyncio.wait([task])
    if task.cancelled():
        raise NotOwner(f"model {model!r} was given up during its takeover")
    return task.result()


def _not_owner(model: str, state: ClusterState) -> NotOwner:
    answer = responsibility_for(model, state)
    return NotOwner(f"model {model!r} is not served here: {answer.reason}", owner=answer.owner)


def _retrieve(task: "asyncio.Task[Owner] | asyncio.Task[None]") -> None:
    """Retrieve the error of a task, which is already reported."""
    if not task.cancelled():
        task.exception()

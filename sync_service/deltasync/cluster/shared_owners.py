"""The `Owners` of a process in a cluster."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from deltasync.base.clock import steady_ns
from deltasync.base.errors import DeltasyncError, NotOwner, Owner
from deltasync.base.events import EventKind, Events
from deltasync.base.waiting import first_of
from deltasync.cluster.bucket import Bucket, BucketCopy, Changed, ClusterOptions, ClusterState, Member
from deltasync.cluster.lease_store import ConsumerNames, Heartbeat, LeaseStore
from deltasync.cluster.owners import Host, Owners
from deltasync.cluster.placement import Steps, next_heir, next_steps, responsibility_for
from deltasync.cluster.transfer import OwnedModels, Transfer


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
        self._transfer = Transfer(
            self._owned, self._leases, self._copy, self._names, host, events, self._beat, self._state
        )
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
            return await _ended(model, self._transfer.take(model, "a client opened it here"))
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
        await asyncio.shield(self._transfer.leave(model, reason))
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
            self._transfer.leave(model, "the process is shutting down", next_heir(model, self._state()))
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
            self._transfer.leave(model, reason)
        if self._leases.stale or not self.confirmed:
            return
        # This wait lets processes that start together find each other.
        if self._clock_ns() - self._started_ns >= self._options.beat_seconds * 1e9:
            for model, reason in steps.claim.items():
                self._transfer.take(model, reason)
        if self._writing is None or self._writing.done():
            self._writing = asyncio.create_task(self._transfer.write(steps))

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
        await asyncio.shield(self._transfer.leave(model, reason, heir))

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

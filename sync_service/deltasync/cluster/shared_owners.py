"""Who owns which model, where several processes make up one service."""

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from functools import partial

from deltasync.base.clock import steady_ns
from deltasync.base.errors import DeltasyncError, NotFound, NotOwner, Owner, ServiceUnavailable
from deltasync.base.events import EventKind, Events
from deltasync.base.waiting import backoff, first_of
from deltasync.cluster.bucket import Bucket, Changed
from deltasync.cluster.bucket_copy import BucketCopy, ClusterState
from deltasync.cluster.heirs import Responsibility, Steps, heir_of, next_after, next_steps, responsibility_for
from deltasync.cluster.ledger import ConsumerNames, Heartbeat, Ledger
from deltasync.cluster.member import Claim, Member, OwnershipOptions
from deltasync.cluster.owners import Host
from deltasync.cluster.transfer import Stage, Tenures, Transfer

# To read the bucket at the start, before this process gives up.
_TRIES = 8


class SharedOwners:
    """What this process owns, and what it knows of the others: an `Owners`.

    Nothing that the bucket says is the truth. Whoever takes a model fences the others off its log, which decides;
    the bucket brings all processes to want the same.

    Args:
        options: how it takes part.
        me: this process, under a name of its own.
        bucket: where processes say what they own.
        host: takes models, and gives them up.
        events: told of what changes.
        clock_ns: nanoseconds, by a clock that nobody sets.
    """

    def __init__(
        self,
        options: OwnershipOptions,
        me: Member,
        bucket: Bucket,
        host: Host,
        events: Events,
        clock_ns: Callable[[], int] = steady_ns,
    ) -> None:
        self._options = options
        self._host = host
        self._events = events
        self._clock_ns = clock_ns
        self._copy = BucketCopy(options.lease_ns)
        self._nudged = asyncio.Event()
        self._ledger = Ledger(bucket, self._copy, events, clock_ns, self._nudged)
        self._tenures = Tenures(clock_ns)
        self._beat = Heartbeat(options, me, self._ledger, self._copy, events, clock_ns)
        self._names = ConsumerNames(self._ledger, self._copy)
        self._transfer = Transfer(
            self._tenures, self._ledger, self._copy, host, events, self._beat, options.taking_at_once
        )
        self._with_log: frozenset[str] = frozenset()
        self._looked_ns: int | None = None
        self._started_ns = clock_ns()
        self._saying: asyncio.Task[None] | None = None
        self._running: asyncio.Task[None] | None = None

    @property
    def me(self) -> Member:
        """This process."""
        return self._beat.me

    @property
    def confirmed(self) -> bool:
        """Whether this process may answer for its models: the others have heard of it within the lease."""
        return self._beat.confirmed

    def check(self, model: str) -> None:
        """Make sure that a model is answered for here.

        Raises:
            NotOwner: it is not, or not yet; with the process to ask, where that is known.
        """
        answer = self._responsibility(model)
        if not answer.here:
            raise _not_owner(model, answer)

    def owner_of(self, model: str) -> Owner | None:
        """Who owns a model; None if nobody does, or whoever did is gone."""
        return self._state().owner_of(model)

    def models(self) -> Collection[str]:
        """The models that anybody is known to have or have had."""
        return sorted({*self._copy.claims, *self._with_log, *self._tenures.names()})

    def model_of(self, consumer: str) -> str | None:
        """The model that a consumer follows; None if no such consumer is known."""
        return self._copy.consumers.get(consumer)

    def consumers_of(self, model: str) -> Collection[str]:
        """The names of the consumers that are known to follow a model."""
        return [name for name, of in self._copy.consumers.items() if of == model]

    def processes(self) -> Sequence[Member]:
        """The processes of the service that are alive, this one among them, by name."""
        return list(({**self._copy.living(self._clock_ns()), self.me.name: self.me}).values())

    def gone(self) -> Sequence[Member]:
        """The processes that went silent for longer than the lease without saying goodbye, by name."""
        return [each for each in self._copy.silent(self._clock_ns()) if each.name != self.me.name]

    async def claim(self, model: str) -> Owner:
        """Own a model, if this process has it, or is to have it: when this returns, it was taken.

        Raises:
            NotOwner: another process has it or is to have it, or this one cannot take it now.
            ServiceUnavailable: brokers do not answer.
        """
        answer, tenure = self._responsibility(model), self._tenures.get(model)
        mine = answer.here or (answer.owner is None and self.confirmed and not self.me.draining)
        if not mine or model in self._tenures.waiting() or (tenure and tenure.leaving):
            raise _not_owner(model, answer)
        try:
            return await _ended(model, self._take(model, "it is opened here"))
        except NotOwner as error:
            if not self._ledger.stale:
                raise
            await self._ledger.read()  # Which says who was first.
            raise _not_owner(model, self._responsibility(model)) from error

    async def release(self, model: str, to: str | None = None) -> None:
        """Give a model up, for another process to take: the one named, if it lives.

        Raises:
            NotOwner: this process does not own it.
            NotFound: no such process is alive, or it is draining.
        """
        heir = self._other(to) if to is not None else self._heir(model)
        if self._tenures.get(model) is None:
            raise _not_owner(model, self._responsibility(model))
        self._tenures.wait(model, self._options.lease_seconds)
        words = f"for {heir} to have" if heir else "and nobody is there to have it"
        await asyncio.shield(self._transfer.leave(model, f"it is given away, {words}", heir))

    async def move(self, model: str, to: str) -> None:
        """Save a model (`Host.save`), and give it up for another process to take.

        Raises:
            NotOwner: this process does not own it.
            NotFound: no such process is alive, or it is draining.
        """
        self._other(to)
        if not self._tenures.is_open(model):
            raise _not_owner(model, self._responsibility(model))
        await self._save(model)
        await self.release(model, to)

    async def lost(self, model: str, reason: str) -> None:
        """Give a model up that was found to be owned by another: its log refuses what this process appends."""
        if self._tenures.get(model) is None:
            return
        self._tenures.wait(model, self._options.lease_seconds)
        self._ledger.stale = True
        await asyncio.shield(self._transfer.leave(model, reason))
        self._nudged.set()

    async def forget(self, model: str) -> None:
        """Remove the log of a model that was deleted; nobody owns it until somebody claims it anew.

        Raises:
            NotOwner: another process has claimed it.
            ServiceUnavailable: brokers do not answer.
        """
        await self._host.forget(model)
        for name in self.consumers_of(model):
            await self._names.forget(name)
        try:
            await self._ledger.write_claim(model, None)
        except Changed as error:
            raise NotOwner(f"model {model!r}: its entry was changed by another process; try again") from error
        self._with_log -= {model}
        self._tenures.drop(model)

    async def reserve_consumer(self, name: str, model: str) -> None:
        """Have the name of a consumer for a model owned here. Again changes nothing.

        Raises:
            Contradiction: it follows another model.
            ServiceUnavailable: brokers do not answer.
        """
        await self._names.reserve(name, model)

    async def forget_consumer(self, name: str) -> None:
        """Free the name of a consumer of a model owned here. Again changes nothing.

        Raises:
            ServiceUnavailable: brokers do not answer.
        """
        await self._names.forget(name)

    async def drain(self) -> None:
        """Take no more models, and give away those owned here, one after the other, each saved first."""
        self._events.emit(EventKind.PROCESS_DRAINING, process=self.me.name)
        self._beat.change(draining=True)
        await self._beat.speak(len(self._tenures.names()))
        for model in self._tenures.names():
            if self._tenures.is_open(model):
                await self._save(model)
            with suppress(NotOwner):  # It was given up meanwhile.
                await self.release(model)

    async def start(self) -> None:
        """Begin: see who is there, be seen, and take what this process is to have.

        Raises:
            ServiceUnavailable: brokers do not answer.
        """
        self._started_ns = self._clock_ns()
        await self._read_patiently()
        self._running = asyncio.create_task(self._run())
        self._running.add_done_callback(self._stopped)

    async def close(self) -> None:
        """Give all models up, and leave."""
        self._beat.change(draining=True)
        tasks = [
            self._transfer.leave(model, "the process ends", self._heir(model)) for model in self._tenures.names()
        ]
        await asyncio.gather(*tasks, return_exceptions=True)
        for task in filter(None, [self._running, self._saying]):
            task.cancel()
            await asyncio.wait([task])
        await self._beat.leave()
        await self._ledger.close()

    async def step(self) -> None:
        """Be heard, look at what the others do, and begin what is to be done about it. Called again and again."""
        self._forgive()
        if (
            not self.confirmed
        ):  # Before it is confirmed again: it may have slept, and others have taken its models.
            self._begin(next_steps(self._state()))
        if self._beat.due:
            await self._beat.speak(len(self._tenures.names()))
            await self._look()
        self._begin(next_steps(self._state()))

    async def _read_patiently(self) -> None:
        """Read the bucket, with retries: brokers that started with this process may still be electing a leader."""
        pauses = backoff()
        for tries in range(_TRIES, 0, -1):
            try:
                await self._ledger.read()
                return
            except ServiceUnavailable as error:
                if tries == 1:
                    raise
                self._events.emit(EventKind.FAILED, "reading who owns which model, which is tried again", error)
                await asyncio.sleep(next(pauses))

    async def _run(self) -> None:
        while True:
            self._nudged.clear()
            await self.step()
            await first_of(self._nudged.wait(), seconds=self._beat.seconds_left)

    def _forgive(self) -> None:
        """What another process has had since it was given up here may be taken again at once."""
        for model in self._tenures.waiting():
            if (owner := self._state().owner_of(model)) and owner.process != self.me.name:
                self._tenures.forgive(model)

    def _stopped(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()):
            failure = error if isinstance(error, Exception) else None
            self._events.emit(
                EventKind.FAILED, "owning models: within the lease, this process gives up all", failure
            )

    async def _look(self) -> None:
        """Ask which models have a log, once in a lease."""
        now_ns, deletions = self._clock_ns(), self._copy.deletions
        if self._looked_ns is not None and now_ns - self._looked_ns < self._options.lease_ns:
            return
        try:
            known = frozenset(await self._host.known())
        except DeltasyncError as error:
            self._events.emit(EventKind.FAILED, "asking brokers which models there are", error)
            return
        self._looked_ns = now_ns
        if deletions == self._copy.deletions:  # Else what they said may be of before.
            self._with_log = known

    def _begin(self, steps: Steps) -> None:
        for model, reason in steps.give_up.items():
            self._transfer.leave(model, reason)
        if self._ledger.stale or not self.confirmed:
            return
        if self._is_settled:
            for model, reason in steps.claim.items():
                self._take(model, reason)
        if self._saying is None or self._saying.done():
            self._saying = asyncio.create_task(self._say(steps))

    @property
    def _is_settled(self) -> bool:
        """Whether those that were started with this process had the time to be heard of."""
        return self._clock_ns() - self._started_ns >= self._options.beat_seconds * 1e9

    async def _say(self, steps: Steps) -> None:
        taken = {model for model in self._tenures.names() if self._tenures.is_open(model)}
        with suppress(Changed, ServiceUnavailable):  # Then with the next beat; the heartbeat says what is wrong.
            for model in steps.say_again:
                if claim := self._claim_to_say(model):
                    await self._ledger.write_claim(model, claim)
            for model in steps.let_go:
                await self._transfer.let_go(model, self._heir(model))
            for name, model in self._names.unsaid(taken).items():
                await self._names.say(name, model)

    def _claim_to_say(self, model: str) -> Claim | None:
        tenure = self._tenures.get(model)
        if tenure is None:
            return self._copy.claims.get(model)
        return tenure.claim if tenure.stage is Stage.OPEN else None

    def _take(self, model: str, reason: str) -> "asyncio.Task[Owner]":
        if self._tenures.get(model) is None:
            self._names.drop(model)
        return self._transfer.take(model, reason, partial(self._next_after, model))

    def _next_after(self, model: str) -> str:
        return next_after(model, self.me.name, list(self._state().members.values()))

    async def _save(self, model: str) -> None:
        try:
            await self._host.save(model)
        except DeltasyncError as error:
            self._events.emit(EventKind.FAILED, "saving a model before it moves", error, model=model)

    def _state(self) -> ClusterState:
        members = self._copy.living(self._clock_ns())
        return ClusterState(
            me=self.me.name,
            confirmed=self.confirmed,
            members={**members, self.me.name: self.me},
            claims=self._copy.claims,
            stored=self._copy.stored,
            own=self._tenures.claims(),
            with_log=self._with_log,
            waiting=self._tenures.waiting(),
        )

    def _responsibility(self, model: str) -> Responsibility:
        return responsibility_for(model, self._state(), is_open=self._tenures.is_open(model))

    def _heir(self, model: str) -> str:
        others = [member for member in self.processes() if member.name != self.me.name]
        heir = heir_of(model, others)
        return heir.name if heir else ""

    def _other(self, name: str) -> str:
        others = {member.name for member in self.processes() if not member.draining} - {self.me.name}
        if name not in others:
            raise NotFound(f"no process {name!r} to give a model to", detail=f"; there are {sorted(others)}")
        return name


async def _ended(model: str, task: "asyncio.Task[Owner]") -> Owner:
    """What a task comes to. If who waits is cancelled, the task goes on."""
    await asyncio.wait([task])
    if task.cancelled():
        raise NotOwner(f"model {model!r} was given up while it was taken")
    return task.result()


def _not_owner(model: str, answer: Responsibility) -> NotOwner:
    return NotOwner(f"model {model!r} is not answered for here: {answer.reason}", owner=answer.owner)

"""The service's state: one log, the models in it, and the consumers that follow them."""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from deltasync.access.limits import Limits
from deltasync.base.arguments import check_name
from deltasync.base.errors import DeltasyncError, NotFound, ServiceUnavailable
from deltasync.base.events import EventCounts, EventKind, EventLog, Events, RecentEvents
from deltasync.base.signals import Signal
from deltasync.base.words import listed
from deltasync.checkpoints.place import Place
from deltasync.checkpoints.store import CheckpointStore
from deltasync.cluster.member import Member
from deltasync.cluster.owners import Alone, Joining, Owners
from deltasync.consumers.consumer import ITSELF, Consumer, ConsumerOptions
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.delivery import spec_of_record
from deltasync.core.policy import Policy
from deltasync.core.table_memory import TableMemory
from deltasync.core.tables import TableSpec
from deltasync.cuts.coordinator import CutCoordinator
from deltasync.cuts.deletes import PendingDeletes
from deltasync.cuts.norm_guard import NormGuard
from deltasync.cuts.sealing import CutSealer
from deltasync.log.data_directory import lock_data_directory
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import EmbeddedLogs, LogOptions, Logs
from deltasync.log.records import check_log, reading
from deltasync.model.feed import Feed
from deltasync.model.model import Model
from deltasync.model.model_store import finish_removal, remove_records
from deltasync.service.checkpoints import Checkpoints
from deltasync.service.configuration import Configuration
from deltasync.service.options import PendingDelete, ServiceOptions
from deltasync.service.probe import ProbeStatus
from deltasync.service.recovery import Reloading, models_to_recover, recover_model
from deltasync.service.volumes import Volumes
from deltasync.views.registry import ViewRegistry

if TYPE_CHECKING:
    from deltasync.service.hosting import Hosting


class Service:
    """Everything the APIs work on. Made and used in one event loop. Without `logs` it has one of its own.

    Whatever changes something is told `by` whom it is asked for.

    Attributes:
        options: what it keeps, and where.
        logs: what outlives the process.
        owners: which process has which model.
        hosting: takes models, and gives them up; None where all are here.
        checkpoints: writes those of its models.
        volumes: where it writes to.
        limits: what peers may take, and what is taken.
        events: what happens, told to all who listen.
        recent_events: the last ones.
        started_unix_ns: when it was made, nanoseconds since 1970.
        event_log: writes down what happens.
        event_counts: how often what has happened since the service started.
        models: those that were ever published, by name; but for those that are still recovering.
        unpublished: those that ranks have opened, and of which nothing is published yet.
        recovering: what is written down of these, by name.
        recovery_failures: why the last try to recover some of these has failed, by name.
        reloading: brings back models whose rows do not fit their digests.
        model_added: wakes who waits for a model to be there.
        coordinators: of the ranks that publish them, by the model's name.
        registry: the consumers.
        views: of the consumers that ever had a policy.
        configuration: the consumers that its configuration names.
        certificates_expire: when the certificates do that it speaks TLS with, seconds since 1970, by the name of
            their setting.
        compiling: whether kernels are still compiled, and no streams taken.
        probe: what has become of rows that go all the way; None if none do.
        draining: set once the service is to end.
        changing: held while consumers, with their views, or models are made and removed: one at a time.
    """

    def __init__(self, options: ServiceOptions, tasks: asyncio.TaskGroup, logs: Logs | None = None) -> None:
        self.owners: Owners = Joining(Member("", "", "")) if logs else Alone(Member("", "", ""))
        self.hosting: Hosting | None = None
        self.options, self.started_unix_ns = options, time.time_ns()
        self._tasks = tasks
        self.limits = Limits(options.limits)
        self.event_counts = EventCounts()
        # That a volume has failed is said before what comes of it.
        self.recent_events = RecentEvents(lambda: self.owners.me.name)
        self.event_log = EventLog(keep=self.recent_events.add)
        self.events = Events(lambda event: self.volumes.hear(event), self.event_log, self.event_counts)
        with contextlib.ExitStack() as undo:
            self._lock = undo.enter_context(lock_data_directory(options.data_dir))
            self.logs = undo.enter_context(contextlib.closing(logs or _embedded_log(options)))
            checkpoints = options.data_dir / "checkpoints"
            self._local_checkpoints = Place(str(checkpoints))
            self._remote_checkpoints = Place(options.checkpoints) if options.checkpoints else None
            self.table_memory = TableMemory(options.table_memory)
            self.volumes = Volumes(self.logs, checkpoints, self.events)
            self.recovering, self.recovery_failures = dict[str, Mapping[str, Any]](), dict[str, str]()
            for log in self.logs.each():
                self.recovering |= models_to_recover(log, self.checkpoint_store)
            self.registry = ConsumerRegistry(
                self.logs, options.replica_retention_seconds, self.events, self.limits
            )
            self.registry.elsewhere = self._elsewhere
            undo.pop_all()
        self.views = ViewRegistry(tasks, self.events)
        self.models, self.coordinators = dict[str, Model](), dict[str, CutCoordinator]()
        self.unpublished = UnpublishedModels(self, tasks)
        self.reloading = Reloading(self, tasks)
        self.checkpoints = Checkpoints(self)
        self.model_added = Signal()
        self.configuration = Configuration(self)
        self.certificates_expire = dict[str, float]()
        self.compiling = False
        self.probe: ProbeStatus | None = None
        self.draining = asyncio.Event()
        self.changing = asyncio.Lock()

    async def recover(self, *, patient: bool = True) -> None:
        """Come back as of the last sealed cut of every model: all at once, and each is there once it has. One that
        lacks what may come back waits for it, if `patient`; see `recover_model`.

        Raises:
            StorageFailed: a file is damaged or missing; or something passing, where that is not waited for.
        """
        recoveries = (recover_model(self, *each, patient=patient) for each in dict(self.recovering).items())
        ended = await asyncio.gather(*recoveries, return_exceptions=True)
        for error in ended:  # Now: none of them reads the log any more.
            if error:
                raise error

    async def have(self, model: Model) -> None:
        """Have a model that has recovered, with the views of its consumers.

        Raises:
            StorageFailed: a view's records could not be written.
        """
        for consumer in self.registry.of_model(model.name):
            await self.have_view(consumer, model)
        async with self.changing:
            for consumer in self.registry.of_model(model.name):  # Some may have come or changed meanwhile.
                await self.have_view(consumer, model)
            coordinator = self.coordinator(model)
            coordinator.deletes.recover()
            del self.recovering[model.name]
            self.limits.taken["bytes_in_all"] += model.table_bytes
            self.add(coordinator)

    def check_recovered(self, model: str) -> None:
        """Check that a model, if there is one, can be used.

        Raises:
            ServiceUnavailable: it is still recovering, or is reloaded.
        """
        self.reloading.check(model)
        if model in self.recovering:
            text, why = f"model {model!r} is still recovering; try again", self.waits_for(model)
            raise ServiceUnavailable(text, detail=f": {why}" if why else "")

    def waits_for(self, model: str) -> str:
        """What keeps a recovering model from coming back, and what to do; empty if nothing does."""
        return "; ".join(filter(None, (self.recovery_failures.get(model), self.volumes.trouble)))

    def model(self, name: str) -> Model:
        """The model of that name.

        Raises:
            NotFound: there is none; the message names those that exist.
            NotOwner: another process has it.
            ServiceUnavailable: it is still recovering.
        """
        self.check_recovered(name)
        if name in self.models:
            return self.models[name]
        self.check_confirmed()
        known = sorted({*self.models, *self.owners.models()})
        if name in known:
            self.owners.check(name)
        raise NotFound(f"no model {name!r}", detail=f"; models: {listed(known) or 'none yet'}")

    def consumer(self, name: str) -> Consumer:
        """The consumer of that name, whose model this process owns.

        Raises:
            NotFound: there is none; the message names those that exist.
            NotOwner: another process has its model.
            ServiceUnavailable: it is about to be made, or this process is not among the others now.
        """
        consumer = self.registry.get(name)
        self.owners.check(consumer.model)  # Another process may have taken it over meanwhile.
        return consumer

    def check_confirmed(self) -> None:
        """Check that this process may answer for its models.

        Raises:
            ServiceUnavailable: the other processes have not heard of it within the lease.
        """
        if not self.owners.confirmed:
            raise ServiceUnavailable("this process is not among the others now; try again")

    async def open_model(self, name: str) -> CutCoordinator:
        """Where the ranks of a model publish, which is there once its first cut is sealed. The name is checked.

        Whoever has opened it tells `unpublished` once its stream has ended.

        Raises:
            NotOwner: another process has it, or is to have it.
            ServiceUnavailable: it is still recovering.
            LimitReached: there would be too many models.
            StorageFailed: another of that name was deleted, and what is left of it cannot be removed.
        """
        await self.owners.claim(name)
        self.check_recovered(name)
        async with self.changing:
            if name not in self.models:
                return await self.unpublished.open(name)
            # Each time: where that failed before, replicas would be sent the model's tables, without their policy.
            for consumer in self.registry.of_model(name):
                await self._follow(consumer)
        return self.coordinators[name]

    def feed(self, consumer: Consumer) -> Feed | None:
        """What a consumer's replicas are fed from: its view, or the model itself; None while there is no model."""
        return self.views.get(consumer) or self.models.get(consumer.model)

    async def create_consumer(self, name: str, model: str, policy: Policy, by: str = ITSELF) -> Consumer:
        """Make a consumer; making an equal one again changes nothing.

        Raises:
            InvalidInput: a name that cannot be one, or a policy that the model's tables cannot meet.
            Contradiction: it exists for another model, or with another policy.
            NotOwner: another process has the model, or is to have it.
        """
        check_name("consumer", name)
        await self.owners.claim(check_name("model", model))
        async with self.changing:
            return await self._create(name, model, policy, by)

    async def ensure_consumer(self, wanted: ConsumerOptions, by: str = ITSELF) -> Consumer:
        """Make a consumer if it is missing; give one that exists the policy, if there is one.

        Raises:
            InvalidInput: a name that cannot be one, or a policy that the model's tables cannot meet.
            Contradiction: it exists for another model.
            NotOwner: another process has the model, or is to have it.
        """
        await self.owners.claim(wanted.model)
        async with self.changing:
            existing = self.registry.consumers.get(wanted.name)
            policy = wanted.policy or (existing.policy if existing else Policy())
            if existing and existing.model == wanted.model:
                return await self._update(wanted.name, policy, by)
            return await self._create(wanted.name, wanted.model, policy, by)

    @property
    def shortcomings(self) -> list[str]:
        """What only one model, or one consumer, lacks, in words."""
        models = [f"model {name!r}: {each.failure}" for name, each in sorted(self.models.items()) if each.failure]
        return models + [
            f"consumer {name!r}: {text}" for name, text in sorted(self.configuration.shortcomings.items())
        ]

    async def update_consumer(self, name: str, policy: Policy, by: str = ITSELF) -> Consumer:
        """Give a consumer another policy; its replicas keep their place.

        Raises:
            NotFound: there is none of that name.
            InvalidInput: a policy that the model's tables cannot meet.
        """
        async with self.changing:
            return await self._update(name, policy, by)

    async def delete_consumer(self, name: str, by: str = ITSELF) -> None:
        """Forget a consumer, its offsets and its view.

        Raises:
            NotFound: there is none of that name.
            ServiceUnavailable: its model is still recovering.
        """
        async with self.changing:
            self.check_recovered(self.registry.get(name).model)
            try:
                await self.registry.delete(name)
            finally:  # Else a new consumer of that name would have a view that serves the old one.
                await self.views.forget(name)
        await self.owners.forget_consumer(name)
        self.configuration.forget(name)
        self.events.emit(EventKind.CONSUMER_CHANGED, "deleted", consumer=name, by=by)

    async def delete_rows(self, model: str, table: str, ids: Sequence[int], by: str = ITSELF) -> PendingDelete:
        """Ask the trainer of a model to delete rows; durable once this returns.

        Raises:
            NotFound: no such model, or no such table in it.
            InvalidInput: no ids or too many, an id outside of the table, or a table that is none of embeddings.
            Contradiction: too many deletes of the model are pending.
            ServiceUnavailable: the model is still recovering.
        """
        tables = [each.spec for each in self.model(model).tables]
        coordinator = self.coordinators[model]
        request = await coordinator.deletes.ask(table, ids, tables, by)
        return PendingDelete(model, request, coordinator.waits_for(request))

    def pending_deletes(self) -> list[PendingDelete]:
        """The deletes that are asked for and not done, by model and number."""
        return [
            PendingDelete(name, request, coordinator.waits_for(request))
            for name, coordinator in sorted(self.coordinators.items())
            for request in coordinator.deletes.requests.values()
        ]

    async def wait_idle(self, seconds: float) -> None:
        """Wait until no cut is under way, but no longer than `seconds`."""
        busy = [self.unpublished.idle(), *(coordinator.idle() for coordinator in self.coordinators.values())]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*busy), seconds)

    async def drain(self) -> None:
        """Finish what is under way and put everything on disk."""
        self.registry.write_offsets()  # First: whatever fails after that must not keep them from the log.
        await self.reloading.end()
        await self.unpublished.drain()
        await self.views.drain()
        for name, model in self.models.items():
            await self.coordinators[name].drain()
            await model.stop()
        await asyncio.to_thread(self.logs.close)
        self._lock.close()

    async def _create(self, name: str, model: str, policy: Policy, by: str) -> Consumer:
        self._check(policy, model)
        await self.owners.reserve_consumer(check_name("consumer", name), model)
        consumer = await self.registry.create(name, model, policy)
        await self._follow(consumer)
        text = f"sent {_words(policy)}"
        self.events.emit(EventKind.CONSUMER_CHANGED, text, consumer=name, model=consumer.model, by=by)
        return consumer

    async def _update(self, name: str, policy: Policy, by: str) -> Consumer:
        before = self.registry.get(name).policy
        if policy != before:  # A policy accepted earlier goes on, whatever tables were added since.
            self._check(policy, self.registry.get(name).model)
        consumer = await self.registry.update(name, policy)
        await self._follow(consumer)
        if policy != before:
            text = f"sent {_words(policy)}; before that {_words(before)}"
            self.events.emit(EventKind.CONSUMER_CHANGED, text, consumer=name, model=consumer.model, by=by)
        return consumer

    def _elsewhere(self, consumer: str) -> DeltasyncError | None:
        """What who asks for a consumer is told that another process has, or is to make."""
        try:
            self.check_confirmed()
            if model := self.owners.model_of(consumer) or self.configuration.model_of(consumer):
                self.owners.check(model)
                return ServiceUnavailable(f"consumer {consumer!r} is about to be made; try again")
        except ServiceUnavailable as error:
            return error
        return None

    def _check(self, policy: Policy, model: str) -> None:
        if model in self.models or model in self.recovering:
            policy.check(self._specs(model))

    def _specs(self, model: str) -> list[TableSpec]:
        if model in self.models:
            return [table.spec for table in self.models[model].tables]
        with reading(f"record model/{model}"):
            return [spec_of_record(each) for each in self.recovering[model]["tables"]]

    async def _follow(self, consumer: Consumer) -> None:
        """Have the view that a consumer needs, if there is a model to have a view of."""
        if model := self.models.get(consumer.model):
            await self.have_view(consumer, model)

    async def have_view(self, consumer: Consumer, model: Model) -> None:
        """Have the view that a consumer of a model needs, if it needs one; see `ViewRegistry.follow`."""
        await self.views.follow(consumer, model)

    def make_model(self, name: str) -> Model:
        """A model of which nothing is read yet."""
        options = self.options
        return Model(
            name, self.logs.of(name), self.checkpoint_store(name), self.table_memory, options.release_memory_bytes
        )

    def checkpoint_store(self, model: str) -> CheckpointStore:
        """Where the checkpoints of a model are."""
        return CheckpointStore(model, self._local_checkpoints, self._remote_checkpoints)

    def add(self, coordinator: CutCoordinator) -> None:
        """Have a model that is published, and tell who waits for it."""
        name = coordinator.model.name
        self.models[name], self.coordinators[name] = coordinator.model, coordinator
        self.model_added.wake()

    async def end_model(
        self, coordinator: CutCoordinator, refusal: Callable[[], DeltasyncError] | None = None
    ) -> None:
        """Stop a model in this process, with its views; nothing of it is written or sent any more, and others may
        have its memory. What its log and its checkpoints have of it stays.

        Args:
            coordinator: where its ranks publish.
            refusal: makes the error for its ranks; None = it is deleted.
        """
        model = coordinator.model
        if self.models.get(model.name) is model:
            del self.models[model.name], self.coordinators[model.name]
        await coordinator.retire(refusal)
        await self.views.give_up(model)
        await model.stop()
        await asyncio.to_thread(model.store.retire)
        self.limits.taken["bytes_in_all"] -= model.table_bytes
        model.tables = []  # Streams may hold on to the model for a while.

    def coordinator(self, model: Model) -> CutCoordinator:
        """Where the ranks of a model publish."""
        deletes = PendingDeletes(model.log, model.name, self.events)
        guard = NormGuard(self.options.norm_limit)
        sealer = CutSealer(model, deletes, self._tasks, self.events, guard, self.registry)
        return CutCoordinator(sealer, self._tasks, self.limits)


def _words(policy: Policy) -> str:
    return policy.words or "everything"


def _embedded_log(options: ServiceOptions) -> Logs:
    log = LmdbStore(LogOptions(directory=options.data_dir / "log", max_bytes=options.log_max_bytes))
    log.queue.limit(options.limits.log_queue_bytes)
    try:
        check_log(log, options.data_dir / "checkpoints")
    except BaseException:
        log.close()
        raise
    return EmbeddedLogs(log)


class UnpublishedModels:
    """Those of a service, in memory while there is a stream of a rank that could publish them.

    One becomes a model of the service with its first sealed cut; one that nobody publishes leaves nothing behind.
    Used in the event loop.
    """

    def __init__(self, service: "Service", tasks: asyncio.TaskGroup) -> None:
        self._service = service
        self._tasks = tasks
        self._coordinators = dict[str, CutCoordinator]()
        self._removals = dict[str, asyncio.Task[None]]()

    def __iter__(self) -> Iterator[CutCoordinator]:
        """Where their ranks publish."""
        return iter(list(self._coordinators.values()))

    @property
    def models_in_all(self) -> int:
        """How many models there are, published, recovering or only opened."""
        return len(self._service.models) + len(self._service.recovering) + len(self._coordinators)

    async def open(self, name: str) -> CutCoordinator:
        """Where the ranks of a model of that name publish, for one stream more; see `leave`. While `changing`.

        Raises:
            LimitReached: there would be too many models.
            StorageFailed: another of that name was deleted, and what is left of it cannot be removed.
        """
        if removal := self._removals.get(name):
            await asyncio.wait([removal])
        if name not in self._coordinators:
            service = self._service
            service.limits.check("models", self.models_in_all + 1)
            model = service.make_model(name)
            await asyncio.to_thread(finish_removal, model.log, name, model.checkpoints)
            coordinator = self._coordinators[name] = service.coordinator(model)
            coordinator.whenever_sealed = lambda: self._publish(coordinator)
        self._coordinators[name].streams += 1
        return self._coordinators[name]

    def give_up(self, name: str) -> CutCoordinator | None:
        """Have a model no more, if it is one of these: where its ranks publish."""
        return self._coordinators.pop(name, None)

    def leave(self, coordinator: CutCoordinator) -> None:
        """Note that one of the streams of a model has ended."""
        coordinator.streams -= 1
        self._forget_if_left(coordinator)

    async def look_after(self) -> None:
        """Have what is sealed, and could not be had; forget what was left as a cut was being sealed."""
        for coordinator in self:
            if coordinator.model.seals.newest:
                await self._publish(coordinator)
            else:
                self._forget_if_left(coordinator)

    async def idle(self) -> None:
        """Wait until no cut is under way."""
        await asyncio.gather(*(each.idle() for each in self))

    async def drain(self) -> None:
        """Finish what is being sealed; of the others nothing is left."""
        for coordinator in self:
            await coordinator.drain()
            coordinator.streams = 0
            self._forget_if_left(coordinator)
        await asyncio.gather(*self._removals.values())
        for coordinator in self:  # Sealed, but not had: the next start has them.
            await coordinator.model.stop()

    async def _publish(self, coordinator: CutCoordinator) -> None:
        """Have a model of which the first version is sealed, unless it is there already."""
        service, model = self._service, coordinator.model
        if self._coordinators.get(model.name) is not coordinator:
            return
        try:
            async with service.changing:
                # Before it is there: replicas of a consumer with a policy would be sent its tables without that.
                for consumer in service.registry.of_model(model.name):
                    await service.have_view(consumer, model)
                if self._coordinators.get(model.name) is coordinator:
                    del self._coordinators[model.name]
                    service.add(coordinator)
        except Exception as error:  # noqa: BLE001  # the cut is sealed, whatever becomes of its consumers
            text = "its consumers cannot be given it yet, which is tried again"
            service.events.emit(EventKind.FAILED, text, error, model=model.name)

    def _forget_if_left(self, coordinator: CutCoordinator) -> None:
        name, model = coordinator.model.name, coordinator.model
        if self._coordinators.get(name) is not coordinator or coordinator.streams:
            return
        coordinator.abandon("all ranks of its run have gone")
        if coordinator.open_cut is None and model.seals.newest is None:
            del self._coordinators[name]
            if model.store.written:
                self._removals[name] = self._tasks.create_task(self._remove(coordinator))

    async def _remove(self, coordinator: CutCoordinator) -> None:
        """Remove what a cut that was given up has left; what cannot be removed now is at the next start."""
        service, model = self._service, coordinator.model
        try:
            await service.end_model(coordinator)
            # Its checkpoints, if there are any, are of one that this log has lost: they may be all that is left.
            await asyncio.to_thread(remove_records, model.log, model.name)
            if service.hosting and not service.registry.of_model(model.name):
                await service.hosting.forget(model.name)
        except Exception as error:  # noqa: BLE001  # one model's trouble is its own
            text = "what is left of a cut that was given up is removed at the next start"
            service.events.emit(EventKind.FAILED, text, error, model=model.name)
        finally:
            del self._removals[model.name]

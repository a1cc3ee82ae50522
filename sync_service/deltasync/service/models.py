"""The models of a process: where they are kept, which there are, and the ranks that publish them."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from deltasync.access.limits import Limits
from deltasync.base.errors import Contradiction, DeltasyncError, NotFound, ServiceUnavailable
from deltasync.base.events import EventKind, Events
from deltasync.base.waiting import Signal
from deltasync.base.words import listed
from deltasync.checkpoints.place import Place
from deltasync.checkpoints.store import CheckpointStore
from deltasync.cluster.owners import Owners
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.delivery import spec_of_record
from deltasync.core.table_memory import TableMemory
from deltasync.core.tables import TableSpec
from deltasync.cuts.coordinator import CutCoordinator
from deltasync.cuts.deletes import PendingDeletes
from deltasync.cuts.norm_guard import NormGuard, NormLimit
from deltasync.cuts.sealing import CutSealer
from deltasync.log.data_directory import CHECKPOINTS
from deltasync.log.log_store import Logs
from deltasync.log.records import reading
from deltasync.model.model import Model
from deltasync.model.model_store import finish_removal, remove_records
from deltasync.service.options import ServiceOptions
from deltasync.service.volumes import Volumes
from deltasync.views.registry import ViewRegistry


class Storage:
    """Where a service keeps its models: logs, checkpoints, and the memory of tables.

    Attributes:
        logs: what outlives the process.
        shared: whether other processes can go on with these logs.
        place: the checkpoints in the data directory.
    """

    def __init__(self, options: ServiceOptions, logs: Logs, *, shared: bool) -> None:
        self.logs, self.shared = logs, shared
        self.place = Place(str(options.data_dir / CHECKPOINTS))
        self._remote = Place(options.checkpoints) if options.checkpoints else None
        self._memory = TableMemory(options.table_memory)
        self._release_memory_bytes = options.release_memory_bytes

    def checkpoints_of(self, model: str) -> CheckpointStore:
        """Where the checkpoints of a model are."""
        return CheckpointStore(model, self.place, self._remote)

    def model(self, name: str) -> Model:
        """A model of which nothing is read yet."""
        checkpoints = self.checkpoints_of(name)
        return Model(name, self.logs.of(name), checkpoints, self._memory, self._release_memory_bytes)


class Models(Mapping[str, Model]):
    """The models that this process can answer for, by name: published, and recovered. Used in the event loop.

    A model is added and ended here and nowhere else.

    Attributes:
        storage: where they are kept.
        owners: which process has which model; another one once this process joins others.
        coordinators: of the ranks that publish them, by name. A model that is fed by something else has none.
        opened: of the ranks of models of which nothing is published yet, by name.
        recovering: the records of models that are coming back, by name.
        recovery_failures: why the last try to recover some of these has failed, by name.
        reloading: why models are reloaded, and what keeps them from coming back, by name.
        added: wakes who waits for a model.
        changing: locked while models, or consumers with their views, are made and removed.
    """

    def __init__(
        self,
        storage: Storage,
        owners: Owners,
        registry: ConsumerRegistry,
        views: ViewRegistry,
        limits: Limits,
        volumes: Volumes,
    ) -> None:
        self.storage, self.owners = storage, owners
        self._registry = registry
        self._views = views
        self._volumes = volumes
        self.coordinators, self.opened = dict[str, CutCoordinator](), dict[str, CutCoordinator]()
        self.recovering = dict[str, Mapping[str, Any]]()
        self.recovery_failures, self.reloading = dict[str, str](), dict[str, str]()
        self.added, self.changing = Signal(), asyncio.Lock()
        self._models = dict[str, Model]()
        self._ending = set[Model]()  # Their tables still take memory.
        limits.count("models", self._number)
        limits.count("bytes_in_all", self._table_bytes)

    def __getitem__(self, name: str) -> Model:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def model(self, name: str) -> Model:
        """The model of that name.

        Raises:
            NotFound: there is none; the message names those that exist.
            NotOwner: another process has it.
            ServiceUnavailable: it is still recovering.
        """
        self.check_recovered(name)
        if name in self._models:
            return self._models[name]
        self.check_confirmed()
        names = sorted({*self._models, *self.owners.models()})
        if name in names:
            self.owners.check(name)
        raise NotFound(f"no model {name!r}", detail=f"; models: {listed(names) or 'none yet'}")

    def specs(self, name: str) -> list[TableSpec] | None:
        """The tables of a model, also of one that is recovering; None if there is no such model."""
        if name in self._models:
            return [table.spec for table in self._models[name].tables]
        if name not in self.recovering:
            return None
        with reading(f"record model/{name}"):
            return [spec_of_record(each) for each in self.recovering[name]["tables"]]

    def publishers(self) -> list[CutCoordinator]:
        """The coordinators of all models that ranks publish, also of those of which nothing is published yet."""
        return [*self.coordinators.values(), *self.opened.values()]

    @property
    def troubles(self) -> list[str]:
        """What keeps cuts of single models from being sealed or applied, in words."""
        return [f"model {name!r}: {each.failure}" for name, each in sorted(self.items()) if each.failure]

    # Whether a model can be used.

    def check_confirmed(self) -> None:
        """Check that this process may answer for its models.

        Raises:
            ServiceUnavailable: the other processes have not heard of it within the lease.
        """
        if not self.owners.confirmed:
            raise ServiceUnavailable("this process is not among the others now; try again")

    def check_recovered(self, name: str) -> None:
        """Check that a model, if there is one, can be used.

        Raises:
            ServiceUnavailable: it is still recovering, or is reloaded.
        """
        self.check_reloaded(name)
        if name in self.recovering:
            text, why = f"model {name!r} is still recovering; try again", self.waits_for(name)
            raise ServiceUnavailable(text, detail=f": {why}" if why else "")

    def check_reloaded(self, name: str) -> None:
        """Check that a model is not being reloaded.

        Raises:
            ServiceUnavailable: it is; the error has the reason.
        """
        if reason := self.reload_reason(name):
            text = f"model {name!r} is being reloaded from its checkpoint and the log; try again"
            raise ServiceUnavailable(text, detail=f" ({reason})")

    def reload_reason(self, name: str) -> str:
        """Why a model is being reloaded, or is about to be; empty if it is not."""
        if reason := self.reloading.get(name):
            return "; ".join(filter(None, (reason, self.recovery_failures.get(name))))
        return self._models[name].failed if name in self._models else ""

    def waits_for(self, name: str) -> str:
        """What keeps a recovering model from coming back, and what to do; empty if nothing does."""
        return "; ".join(filter(None, (self.recovery_failures.get(name), self._volumes.trouble)))

    # Adding and ending them.

    async def make_views(self, model: Model) -> None:
        """Make the views that the consumers of a model need and do not have.

        Raises:
            StorageFailed: a view's records could not be written.
        """
        for consumer in self._registry.of_model(model.name):
            await self._views.follow(consumer, model)

    async def add(self, model: Model, coordinator: CutCoordinator | None = None) -> None:
        """Add a published model, with the views of its consumers, and wake who waits for it. Call it while
        `changing`.

        Args:
            model: a model that was published or has recovered.
            coordinator: of its ranks; None if something else feeds it.

        Raises:
            StorageFailed: a view's records could not be written; the model is not added.
        """
        # First: replicas of a consumer with a policy would be sent the model's tables without it.
        await self.make_views(model)
        self._models[model.name] = model
        if coordinator:
            self.coordinators[model.name] = coordinator
        self.opened.pop(model.name, None)
        self.recovering.pop(model.name, None)
        self.added.wake()

    async def end(self, model: Model, refusal: Callable[[], DeltasyncError] | None = None) -> None:
        """End a model in this process, with its views: nothing of it is written or sent any more, and its memory
        is free. Its log and its checkpoints stay.

        Args:
            model: a published model, or one that ranks have opened.
            refusal: makes the error for its ranks; None: the model is deleted.
        """
        coordinator = next((each for each in self.publishers() if each.model is model), None)
        if self._models.get(model.name) is model:
            del self._models[model.name]
        for group in (self.coordinators, self.opened):
            if coordinator and group.get(model.name) is coordinator:
                del group[model.name]
        self._ending.add(model)
        try:
            if coordinator:
                await coordinator.retire(refusal)
            await self.drop(model)
            await asyncio.to_thread(model.store.retire)
        finally:
            self._ending.discard(model)
        model.drop_tables()  # Streams may hold on to the model for a while.

    async def drop(self, model: Model) -> None:
        """Stop a model that is not among these, or not any more, and its views."""
        await self._views.give_up(model)
        await model.stop()

    # What the limits count.

    def _number(self) -> int:
        return len(self._models) + len(self.recovering) + len(self.opened)

    def _table_bytes(self) -> int:
        """Bytes of all tables, of which some may be about to be made."""
        found = {each: each.table_bytes for each in (*self._models.values(), *self._ending)}
        found |= {each.model: each.announced.table_bytes for each in self.publishers()}
        return sum(found.values())


class Publishing:
    """Lets ranks publish models. Used in the event loop.

    A model that ranks open is in memory while one of their streams is open. Its first sealed cut adds it to the
    models; one that nobody publishes leaves nothing behind.
    """

    def __init__(
        self,
        models: Models,
        registry: ConsumerRegistry,
        limits: Limits,
        events: Events,
        tasks: asyncio.TaskGroup,
        norm_limit: NormLimit | None,
    ) -> None:
        self._models = models
        self._registry = registry
        self._limits = limits
        self._events = events
        self._tasks, self._norm_limit = tasks, norm_limit
        self._removals = dict[str, asyncio.Task[None]]()

    def coordinator(self, model: Model) -> CutCoordinator:
        """What takes the cuts of a model's ranks."""
        deletes = PendingDeletes(model.log, model.name, self._events)
        guard = NormGuard(self._norm_limit)
        sealer = CutSealer(model, deletes, self._tasks, self._events, guard, self._registry)
        return CutCoordinator(sealer, self._tasks, self._limits)

    async def open(self, name: str) -> CutCoordinator:
        """What takes the cuts of a model's ranks, for one stream more; `leave` ends it. The name is checked.

        Raises:
            NotOwner: another process has the model, or is to have it.
            ServiceUnavailable: it is still recovering.
            Contradiction: no ranks publish this model.
            LimitReached: there would be too many models.
            StorageFailed: another of that name was deleted, and what is left of it cannot be removed.
        """
        models = self._models
        while True:
            # Not with the lock, for which a removal waits; and before the claim, which it takes back.
            while removal := self._removals.get(name):
                await asyncio.wait([removal])
            await models.owners.claim(name)
            models.check_recovered(name)
            async with models.changing:
                if name in self._removals:
                    continue
                if name not in models:
                    return await self._open(name)
                # Each time: where that failed before, replicas would be sent the model's tables without their
                # policy.
                await models.make_views(models[name])
            return ranks_of(models, name)

    def leave(self, coordinator: CutCoordinator) -> None:
        """Note that one of the streams of a model has ended."""
        coordinator.streams -= 1
        self._forget_if_left(coordinator)

    async def look_after(self) -> None:
        """Add models that were sealed and could not be added; forget those that were left during a seal."""
        for coordinator in list(self._models.opened.values()):
            if coordinator.model.seals.newest:
                await self._publish(coordinator)
            else:
                self._forget_if_left(coordinator)

    async def drain(self) -> None:
        """Finish what is being sealed; nothing is left of models that were only opened."""
        for coordinator in list(self._models.opened.values()):
            await coordinator.drain()
            coordinator.streams = 0
            self._forget_if_left(coordinator)
        await self.removed()
        for coordinator in self._models.opened.values():  # Sealed, but not added: the next start has them.
            await coordinator.model.stop()

    async def removed(self) -> None:
        """Wait until nothing is left of models that were given up."""
        await asyncio.gather(*self._removals.values())

    async def _open(self, name: str) -> CutCoordinator:
        models = self._models
        if name not in models.opened:
            self._limits.check_more("models")
            model = models.storage.model(name)
            await asyncio.to_thread(finish_removal, model.log, name, model.checkpoints)
            coordinator = models.opened[name] = self.coordinator(model)
            coordinator.whenever_sealed = partial(self._publish, coordinator)
        models.opened[name].streams += 1
        return models.opened[name]

    async def _publish(self, coordinator: CutCoordinator) -> None:
        """Add a model of which the first version is sealed, unless that was done."""
        models, model = self._models, coordinator.model
        if models.opened.get(model.name) is not coordinator:
            return
        try:
            async with models.changing:
                if models.opened.get(model.name) is coordinator:
                    await models.add(model, coordinator)
        except Exception as error:  # noqa: BLE001  # the cut is sealed, whatever becomes of its consumers
            text = "its consumers cannot be given it yet, which is tried again"
            self._events.emit(EventKind.FAILED, text, error, model=model.name)

    def _forget_if_left(self, coordinator: CutCoordinator) -> None:
        name, opened = coordinator.model.name, self._models.opened
        if opened.get(name) is not coordinator or coordinator.streams:
            return
        coordinator.abandon("all ranks of its run have gone")
        if coordinator.open_cut is not None or coordinator.model.seals.newest:
            return
        del opened[name]
        if coordinator.model.store.written:
            self._removals[name] = self._tasks.create_task(self._remove(coordinator))

    async def _remove(self, coordinator: CutCoordinator) -> None:
        """Remove what a cut that was given up has left; what cannot be removed now is at the next start."""
        model = coordinator.model
        try:
            await coordinator.retire()
            await self._models.end(model)
            # Its checkpoints, if there are any, are of one that this log has lost: they may be all that is left.
            await asyncio.to_thread(remove_records, model.log, model.name)
            if not self._registry.of_model(model.name):
                await self._models.owners.forget(model.name)
        except Exception as error:  # noqa: BLE001  # one model's trouble is its own
            text = "what is left of a cut that was given up is removed at the next start"
            self._events.emit(EventKind.FAILED, text, error, model=model.name)
        finally:
            del self._removals[model.name]


def ranks_of(models: Models, name: str) -> CutCoordinator:
    """The coordinator of a model's ranks.

    Raises:
        Contradiction: no ranks publish this model.
    """
    if name not in models.coordinators:
        raise Contradiction(f"model {name!r} is not published by ranks: ask for this where it is published")
    return models.coordinators[name]

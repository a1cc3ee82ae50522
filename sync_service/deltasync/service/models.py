"""The models of a process, their storage, and the ranks that publish them."""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import partial
from typing import Any

from deltasync.access.limits import Limits
from deltasync.base.errors import (
    Contradiction,
    DeltasyncError,
    NotFound,
    ServiceUnavailable,
    StorageFailed,
)
from deltasync.base.events import EventKind, Events
from deltasync.base.threads import in_own_thread
from deltasync.base.waiting import Signal
from deltasync.base.words import listed
from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.store import CheckpointStore
from deltasync.cluster.owners import Owners
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.stamped_table import table_bytes
from deltasync.core.table_form import spec_of_record
from deltasync.core.table_memory import TableMemory
from deltasync.core.tables import TableSpec
from deltasync.cuts.coordinator import CutCoordinator
from deltasync.cuts.deletes import PendingDeletes
from deltasync.cuts.norm_guard import NormGuard, NormLimit
from deltasync.log.data_directory import CHECKPOINTS
from deltasync.log.log_store import Logs
from deltasync.log.records import reading
from deltasync.model.model import Model
from deltasync.model.model_store import removal_noted, remove_model, remove_records
from deltasync.service.options import ServiceOptions
from deltasync.service.volumes import Volumes
from deltasync.views.registry import ViewRegistry

OpenPlace = Callable[..., Place]


class Storage:
    """Storage of models: logs, checkpoints and memory for tables."""

    def __init__(self, options: ServiceOptions, logs: Logs, open_place: OpenPlace, *, shared: bool) -> None:
        self.logs, self.shared = logs, shared
        self.place = open_place(str(options.data_dir / CHECKPOINTS), deadline_seconds=None)
        url, self.deadline_seconds = options.checkpoints, options.storage_seconds
        self.remote = open_place(url, deadline_seconds=options.storage_seconds) if url else None
        self._memory, self._options = TableMemory(options.table_memory), options

    def checkpoints_of(self, model: str) -> CheckpointStore:
        """The checkpoints of a model."""
        return CheckpointStore(model, self.place, self.remote)

    def model(self, name: str) -> Model:
        """Create a model without reading its log."""
        log, options = self.logs.of(name), self._options
        memory_bytes, block_bytes = options.release_memory_bytes, options.release_block_bytes
        return Model(name, log, self.checkpoints_of(name), self._memory, memory_bytes, block_bytes)


class Models(Mapping[str, Model]):
    """The published and recovered models that this process serves, by name. Used in the event loop.

    Models are added and ended only here.

    Attributes:
        storage: their storage.
        owners: which process owns which model; replaced when this process joins a cluster.
        coordinators: coordinators of the ranks that publish them, by name. A model with another feed has none.
        opened: coordinators of the ranks of models that replicas cannot get yet, by name: without a published
            version, or lacking rows that only their trainer has.
        recovering: the records of models that are being recovered, by name.
        recovery_failures: why the last attempt to recover a model failed, by name.
        stuck: why models in `recovering` wait for their trainer or an operator, by name.
        reloading: why models are being reloaded, and why that fails, by name.
        added: wakes tasks that wait for a model.
        removals: removals of models' data under way, by name. They do not hold `changing`.
        changing: locked while models, or consumers with their views, are created and removed.
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
        self.stuck = dict[str, str]()
        self.added, self.changing = Signal(), asyncio.Lock()
        self.removals = dict[str, asyncio.Task[None]]()
        self._releasing = defaultdict[str, asyncio.Lock](asyncio.Lock)
        self._models = dict[str, Model]()
        self._ending = set[Model]()  # Models whose tables still take memory.
        limits.count("models", self._number)
        limits.count("bytes_in_all", self._table_bytes)

    def __getitem__(self, name: str) -> Model:
        return self._models[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._models)

    def __len__(self) -> int:
        return len(self._models)

    def model(self, name: str) -> Model:
        """The model of that name."""
        self.check_recovered(name)
        if name in self._models:
            return self._models[name]
        self.check_confirmed()
        names = sorted({*self._models, *self.owners.models()})
        if name in names:
            self.owners.check(name)
        raise NotFound(f"no model {name!r}", detail=f"; models: {listed(names) or 'none yet'}")

    def releasing(self, name: str) -> asyncio.Lock:
        """The lock of a model, locked while its kept versions are released, or consumers begin to follow them.

        Its owner may wait for object storage, and may then lock `changing`, never the other way round.
        """
        return self._releasing[name]

    def specs(self, name: str) -> list[TableSpec] | None:
        """The tables of a model, even while it is recovering; None if there is no such model."""
        if name in self._models:
            return [table.spec for table in self._models[name].tables]
        if name not in self.recovering:
            return None
        with reading(f"record model/{name}"):
            return [spec_of_record(each) for each in self.recovering[name]["tables"]]

    def publishers(self) -> list[CutCoordinator]:
        """The coordinators of all models that ranks publish, with or without a published version."""
        return [*self.coordinators.values(), *self.opened.values()]

    @property
    def troubles(self) -> list[str]:
        """Why cuts of models cannot be sealed or applied, in words."""
        return [f"model {name!r}: {each.failure}" for name, each in sorted(self.items()) if each.failure]

    # Whether a model can be used.

    def check_confirmed(self) -> None:
        """Check that this process may serve its models."""
        if not self.owners.confirmed:
            raise ServiceUnavailable("this process has lost its lease in the cluster for now; try again")

    def check_recovered(self, name: str) -> None:
        """Check that a model, if there is one, can be used."""
        self.check_reloaded(name)
        if name in self.recovering:
            text, why = f"model {name!r} is still recovering; try again", self.waits_for(name)
            raise ServiceUnavailable(text, detail=f": {why}" if why else "")

    def check_reloaded(self, name: str) -> None:
        """Check that a model is not being reloaded."""
        if reason := self.reload_reason(name):
            text = f"model {name!r} is being reloaded from its checkpoint and the log; try again"
            raise ServiceUnavailable(text, detail=f" ({reason})")

    def reload_reason(self, name: str) -> str:
        """Why a model is being reloaded, or is about to be; empty if it is not."""
        if reason := self.reloading.get(name):
            return "; ".join(filter(None, (reason, self.recovery_failures.get(name))))
        return self._models[name].tables.failed if name in self._models else ""

    def waits_for(self, name: str) -> str:
        """Why a model cannot be recovered, and what to do; empty if it can."""
        why = self.recovery_failures.get(name), self.stuck.get(name), self._volumes.trouble
        return "; ".join(filter(None, why))

    # Adding and ending them.

    async def make_views(self, model: Model) -> None:
        """Create the missing views of a model's consumers."""
        for consumer in self._registry.of_model(model.name):
            await self._views.follow(consumer, model)

    async def add(self, model: Model, coordinator: CutCoordinator | None = None) -> None:
        """Add a published model with the views of its consumers, and wake tasks that wait for it.

        The caller holds `changing`.
        """
        # First, because replicas of a consumer with a policy would otherwise get the model's tables without it.
        await self.make_views(model)
        self._models[model.name] = model
        if coordinator:
            self.coordinators[model.name] = coordinator
        self.opened.pop(model.name, None)
        self.forget_recovery(model.name)
        self.added.wake()

    def begin_removal(self, name: str, work: Awaitable[None]) -> "asyncio.Task[None]":
        """Remove a model's data in a task, which is in `removals` until it ends."""

        async def remove() -> None:
            try:
                await work
            finally:
                del self.removals[name]

        removal = self.removals[name] = asyncio.create_task(remove())
        return removal

    def forget_recovery(self, name: str) -> None:
        """End the recovery of a model: it succeeded, or an operator gave the model up."""
        self.recovering.pop(name, None)
        self.stuck.pop(name, None)

    async def end(self, model: Model, refusal: Callable[[], DeltasyncError] | None = None) -> None:
        """End a model and its views in this process: stop writing and sending, and free its memory.

        Its log and its checkpoints stay. `refusal` makes the error for its ranks; None = the model is deleted.
        """
        coordinator = next((each for each in self.publishers() if each.model is model), None)
        if self._models.get(model.name) is model:
            del self._models[model.name]
        for group in (self.coordinators, self.opened):
            if coordinator and group.get(model.name) is coordinator:
                del group[model.name]
        self._ending.add(model)
        try:
            try:
                if coordinator:
                    await coordinator.retire(refusal)
            finally:
                await self.drop(model)
            await in_own_thread(model.store.retire)
        finally:
            self._ending.discard(model)
            model.tables.drop()  # Streams may keep a reference to the model for a while.

    async def drop(self, model: Model) -> None:
        """Stop a model that is not (or no longer) among these, and its views."""
        try:
            await self._views.give_up(model)
        finally:
            await model.stop()

    # What the limits count.

    def _number(self) -> int:
        return len({*self._models, *self.recovering, *self.opened})

    def _table_bytes(self) -> int:
        """Bytes of all tables, including those that a first cut will create."""
        sizes = {each: each.tables.nbytes for each in (*self._models.values(), *self._ending)}
        sizes |= {each.model: each.table_bytes for each in self.publishers()}
        recovering = self.recovering.keys() - {each.name for each in sizes}
        return sum(sizes.values()) + sum(map(self._recovering_bytes, recovering))

    def _recovering_bytes(self, name: str) -> int:
        """Bytes of the tables of a model that is being recovered."""
        try:
            return sum(map(table_bytes, self.specs(name) or ()))
        except StorageFailed:  # The record is damaged, which the recovery reports.
            return 0


class Publishing:
    """Lets ranks publish models. Used in the event loop.

    A model that ranks open exists in memory while one of their streams is open. Its first sealed cut adds it to
    the models. Without a sealed cut, it leaves nothing behind.
    """

    def __init__(
        self,
        models: Models,
        registry: ConsumerRegistry,
        limits: Limits,
        events: Events,
        norm_limit: NormLimit | None,
    ) -> None:
        self._models = models
        self._registry = registry
        self._limits = limits
        self._events = events
        self._norm_limit = norm_limit

    def coordinator(self, model: Model) -> CutCoordinator:
        """Create the coordinator of a model's ranks."""
        deletes = PendingDeletes(model.log, model.name, self._events)
        guard = NormGuard(self._norm_limit)
        return CutCoordinator(model, deletes, self._events, guard, self._registry, self._limits)

    async def open(self, name: str) -> CutCoordinator:
        """Get the coordinator of a model's ranks for a new stream, which ends with `leave`.

        The caller has checked the name.
        """
        models = self._models
        while True:
            # Wait without the lock: the removal waits for a cut that needs the lock to add the model.
            while removal := models.removals.get(name):
                await asyncio.wait([removal])
            await models.owners.claim(name)
            if name not in models.opened:  # Only its trainer has the rows that a recovered model lacks.
                models.check_recovered(name)
            async with models.changing:
                if name in models.removals:
                    continue
                if name in models:
                    # Repeated on every open: after a failure, replicas would get the tables without their policy.
                    await models.make_views(models[name])
                    return ranks_of(models, name)
                if name in models.opened or not await in_own_thread(
                    removal_noted, models.storage.logs.of(name), name
                ):
                    return self._open(name)
                log, store = models.storage.logs.of(name), models.storage.checkpoints_of(name)
                removal = models.begin_removal(name, in_own_thread(remove_model, log, name, store))
            await asyncio.shield(removal)

    def leave(self, coordinator: CutCoordinator) -> None:
        """Record that a stream of a model has ended."""
        coordinator.streams -= 1
        self._forget_if_left(coordinator)

    async def look_after(self) -> None:
        """Add sealed models that could not be added before; drop models that ranks left during a seal."""
        for coordinator in list(self._models.opened.values()):
            if not coordinator.model.lacks:
                await self._publish(coordinator)
            else:
                self._forget_if_left(coordinator)

    def wait_for_rows(self, coordinator: CutCoordinator) -> None:
        """Let ranks send the rows that a recovered model lacks. The cut that has them adds it to the models."""
        model = coordinator.model
        coordinator.whenever_sealed = partial(self._publish, coordinator)
        self._models.opened[model.name] = coordinator
        self._models.stuck[model.name] = _lacking(model)

    async def drain(self) -> None:
        """Finish cuts that are being sealed, and remove models without a sealed cut."""
        for coordinator in list(self._models.opened.values()):
            await coordinator.drain()
            coordinator.streams = 0
            self._forget_if_left(coordinator)
        await self.removed()
        for coordinator in list(self._models.opened.values()):  # Sealed but not added: the next start adds them.
            await coordinator.model.stop()

    async def removed(self) -> None:
        """Wait until abandoned models are removed."""
        await asyncio.gather(*self._models.removals.values(), return_exceptions=True)

    def _open(self, name: str) -> CutCoordinator:
        models = self._models
        if name not in models.opened:
            self._limits.check_more("models")
            model = models.storage.model(name)
            coordinator = models.opened[name] = self.coordinator(model)
            coordinator.whenever_sealed = partial(self._publish, coordinator)
        models.opened[name].streams += 1
        return models.opened[name]

    async def _publish(self, coordinator: CutCoordinator) -> None:
        """Add a model once its first version is sealed. Idempotent."""
        models, model = self._models, coordinator.model
        if models.opened.get(model.name) is not coordinator:
            return
        try:
            if model.lacks and model.name in models.recovering:
                models.stuck[model.name] = _lacking(model)
            async with models.changing:
                if models.opened.get(model.name) is coordinator and not model.lacks:
                    recovered = model.name in models.recovering
                    await models.add(model, coordinator)
                    if recovered:
                        text, version = "its trainer has sent the rows that it lacked", model.seals.newest_version
                        self._events.emit(EventKind.MODEL_RECOVERED, text, model=model.name, version=version)
        except Exception as error:  # noqa: BLE001  # the cut is sealed even if its consumers fail
            text = "its consumers cannot follow it yet; this will be retried"
            self._events.emit(EventKind.FAILED, text, error, model=model.name)

    def _forget_if_left(self, coordinator: CutCoordinator) -> None:
        name, opened = coordinator.model.name, self._models.opened
        if opened.get(name) is not coordinator or coordinator.streams:
            return
        coordinator.abandon("all ranks of its run have left")
        if name in self._models.recovering:  # It stays, with all that is left of it.
            return
        if coordinator.open_cut is not None or coordinator.model.seals.newest:
            return
        del opened[name]
        if coordinator.model.store.written:
            self._models.begin_removal(name, self._remove(coordinator))

    async def _remove(self, coordinator: CutCoordinator) -> None:
        """Remove what an abandoned cut has written.

        This process keeps an empty shared log. Deleting it could destroy the records of a consumer that is being
        created for the model, or of another process that is taking the model over.
        """
        model = coordinator.model
        try:
            await coordinator.retire()
            await self._models.end(model)
            # Keep its checkpoints: they may be all that is left of a model that this log lost.
            await in_own_thread(remove_records, model.log, model.name)
        except Exception as error:  # noqa: BLE001  # an error of one model must not affect others
            text = "an abandoned cut could not be removed; the next start removes it"
            self._events.emit(EventKind.FAILED, text, error, model=model.name)


def _lacking(model: Model) -> str:
    """What a model lacks, why, and what to do."""
    remedy = f"start its trainer, which sends them, or {remedy_of_last_resort(model.name)}"
    return ": ".join(filter(None, [f"it lacks {model.lacks}", "; ".join(model.problems), remedy]))


def remedy_of_last_resort(model: str) -> str:
    """What to do if nothing else helps."""
    return f"give the model up, so that its trainer publishes every row (deltasync models give-up {model})"


def ranks_of(models: Models, name: str) -> CutCoordinator:
    """The coordinator of a model's ranks."""
    if name not in models.coordinators:
        raise Contradiction(
            f"model {name!r} is not published by ranks here: send the request to the service that they publish to"
        )
    return models.coordinators[name]

"""The service's state: one log, the models in it, and the consumers that follow them."""

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltasync.consumers.consumer import Consumer, ConsumerOptions
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.delete_request import DeleteRequest
from deltasync.core.errors import NotFound, ServiceUnavailable
from deltasync.core.events import EventCounts, EventKind, Events, log_event
from deltasync.core.policy import Policy
from deltasync.core.signals import Signal
from deltasync.core.tables import TableSpec
from deltasync.feeds.feed import Feed
from deltasync.feeds.model import Model
from deltasync.publish.coordinator import CutCoordinator
from deltasync.publish.pending_deletes import PendingDeletes
from deltasync.storage.data_directory import lock_data_directory
from deltasync.storage.lmdb_store import LmdbStore
from deltasync.storage.log_format import check_log
from deltasync.storage.log_store import LogOptions, LogStore
from deltasync.storage.model_store import recorded_models
from deltasync.storage.records import reading, spec_of_record
from deltasync.views.registry import ViewRegistry


@dataclass(frozen=True)
class PendingDelete:
    """A request to delete rows of a model, and what it waits for."""

    model: str
    request: DeleteRequest
    reason: str


@dataclass(frozen=True, kw_only=True)
class ServiceOptions:
    """What the service keeps, and where.

    Attributes:
        data_dir: folder of everything the service keeps; made if missing.
        log_max_bytes: hard cap of the log's file.
        flush_bytes: tables are flushed, and the log is cut, once it holds this many bytes of newer rows.
        replica_retention_seconds: a replica away for longer no longer holds its consumer's offset.
    """

    data_dir: Path
    log_max_bytes: int = 64 << 30
    flush_bytes: int = 1 << 30
    replica_retention_seconds: float = 3600.0

    def __post_init__(self) -> None:
        if not 1 <= self.flush_bytes <= self.log_max_bytes // 2:
            raise ValueError(
                f"flush_bytes: {self.flush_bytes}, expected 1 to {self.log_max_bytes // 2}, half of log_max_bytes"
            )
        if self.replica_retention_seconds < 0:
            raise ValueError(f"replica_retention_seconds: {self.replica_retention_seconds}, expected 0 or more")


class Service:
    """Everything the APIs work on. Made and used in one event loop.

    Attributes:
        options: what it keeps, and where.
        log: what outlives the process.
        events: what happens, told to all who listen.
        event_counts: how often what has happened since the service started.
        models: those that were ever published, by name; but for those that are still recovering.
        recovering: what is written down of these, by name.
        model_added: wakes who waits for a model to be there.
        coordinators: of the ranks that publish them, by the model's name.
        registry: the consumers.
        views: of the consumers that ever had a policy.
        compiling: whether kernels are still compiled, and no streams taken.
        draining: set once the service is to end.
    """

    def __init__(self, options: ServiceOptions, tasks: asyncio.TaskGroup) -> None:
        self.options = options
        self._tasks = tasks
        self.event_counts = EventCounts()
        self.events = Events(log_event, self.event_counts)
        with contextlib.ExitStack() as undo:
            self._lock = undo.enter_context(lock_data_directory(options.data_dir))
            self.log = undo.enter_context(contextlib.closing(_open_log(options)))
            self.registry = ConsumerRegistry(self.log, options.replica_retention_seconds, self.events)
            self.recovering: dict[str, Mapping[str, Any]] = recorded_models(self.log)
            undo.pop_all()
        self.views = ViewRegistry(self.log, tasks, self.events)
        self.models: dict[str, Model] = {}
        self.coordinators: dict[str, CutCoordinator] = {}
        self.model_added = Signal()
        self.compiling = False
        self.draining = asyncio.Event()
        self._changing = asyncio.Lock()  # A consumer and its view are made and removed together.

    async def recover(self) -> None:
        """Come back as of the last sealed cut of every model: all at once, and each is there once it has.

        Raises:
            StorageFailed: a file is damaged or missing.
        """
        records = dict(self.recovering)
        ended = await asyncio.gather(*(self._recover(*each) for each in records.items()), return_exceptions=True)
        for error in ended:  # Now: none of them reads the log any more.
            if error:
                raise error

    async def _recover(self, name: str, record: Mapping[str, Any]) -> None:
        """Have a model, with the views of its consumers."""
        started = time.monotonic()
        model = Model(name, self.log, self._directory(name))
        await model.recover(record)
        for consumer in self.registry.of_model(name):
            await self._have_view(consumer, model)
        async with self._changing:
            for consumer in self.registry.of_model(name):  # Of these, some may have come or changed meanwhile.
                await self._have_view(consumer, model)
            self._add(model)
            self.coordinators[name].deletes.recover()
            del self.recovering[name]
        took = f"in {time.monotonic() - started:.2f} s"
        self.events.emit(EventKind.MODEL_RECOVERED, took, model=name, version=model.seals.newest_version)
        self.model_added.wake()

    def check_recovered(self, model: str) -> None:
        """Check that a model, if there is one, can be used.

        Raises:
            ServiceUnavailable: it is still recovering.
        """
        if model in self.recovering:
            raise ServiceUnavailable(f"model {model!r} is still recovering; try again")

    async def open_model(self, name: str) -> CutCoordinator:
        """Where the ranks of a model publish. The model is made if there is none of that (checked) name.

        Raises:
            ServiceUnavailable: it is still recovering.
        """
        self.check_recovered(name)
        async with self._changing:
            if name not in self.models:
                self._add(Model(name, self.log, self._directory(name)))
                self.model_added.wake()
            # Each time: where that failed before, replicas would be sent the model's tables, without their policy.
            for consumer in self.registry.of_model(name):
                await self._follow(consumer)
        return self.coordinators[name]

    def feed(self, consumer: Consumer) -> Feed | None:
        """What a consumer's replicas are fed from: its view, or the model itself; None while there is no model."""
        return self.views.get(consumer) or self.models.get(consumer.model)

    async def create_consumer(self, name: str, model: str, policy: Policy) -> Consumer:
        """Make a consumer; making an equal one again changes nothing.

        Raises:
            InvalidInput: a name that cannot be one, or a policy that the model's tables cannot meet.
            Contradiction: it exists for another model, or with another policy.
        """
        async with self._changing:
            return await self._create(name, model, policy)

    async def ensure_consumer(self, wanted: ConsumerOptions) -> Consumer:
        """Make a consumer if it is missing; give one that exists the policy, if there is one.

        Raises:
            InvalidInput: a name that cannot be one, or a policy that the model's tables cannot meet.
            Contradiction: it exists for another model.
        """
        async with self._changing:
            existing = self.registry.consumers.get(wanted.name)
            policy = wanted.policy or (existing.policy if existing else Policy())
            if existing and existing.model == wanted.model:
                return await self._update(wanted.name, policy)
            return await self._create(wanted.name, wanted.model, policy)

    async def update_consumer(self, name: str, policy: Policy) -> Consumer:
        """Give a consumer another policy; its replicas keep their place.

        Raises:
            NotFound: there is none of that name.
            InvalidInput: a policy that the model's tables cannot meet.
        """
        async with self._changing:
            return await self._update(name, policy)

    async def delete_consumer(self, name: str) -> None:
        """Forget a consumer, its offsets and its view.

        Raises:
            NotFound: there is none of that name.
            ServiceUnavailable: its model is still recovering.
        """
        async with self._changing:
            self.check_recovered(self.registry.get(name).model)
            try:
                await self.registry.delete(name)
            finally:  # Else a new consumer of that name would have a view that serves the old one.
                await self.views.forget(name)
        self.events.emit(EventKind.CONSUMER_CHANGED, "deleted", consumer=name)

    async def delete_rows(self, model: str, table: str, ids: Sequence[int]) -> PendingDelete:
        """Ask the trainer of a model to delete rows; durable once this returns.

        Raises:
            NotFound: no such model, or no such table in it.
            InvalidInput: no ids or too many, an id outside of the table, or a table that is none of embeddings.
            Contradiction: too many deletes of the model are pending.
            ServiceUnavailable: the model is still recovering.
        """
        self.check_recovered(model)
        if model not in self.models:
            raise NotFound(f"no model {model!r}; models: {', '.join(sorted(self.models)) or 'none yet'}")
        tables = [each.spec for each in self.models[model].tables]
        coordinator = self.coordinators[model]
        request = await coordinator.deletes.ask(table, ids, tables)
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
        busy = [coordinator.idle() for coordinator in self.coordinators.values()]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*busy), seconds)

    async def drain(self) -> None:
        """Finish what is under way and put everything on disk."""
        await self.views.drain()
        for name, model in self.models.items():
            await self.coordinators[name].drain()
            await model.close()
        await asyncio.to_thread(self.log.close)
        self._lock.close()

    async def _create(self, name: str, model: str, policy: Policy) -> Consumer:
        self._check(policy, model)
        consumer = await self.registry.create(name, model, policy)
        await self._follow(consumer)
        self.events.emit(EventKind.CONSUMER_CHANGED, f"sent {_words(policy)}", consumer=name, model=consumer.model)
        return consumer

    async def _update(self, name: str, policy: Policy) -> Consumer:
        before = self.registry.get(name).policy
        if policy != before:  # A policy accepted earlier goes on, whatever tables were added since.
            self._check(policy, self.registry.get(name).model)
        consumer = await self.registry.update(name, policy)
        await self._follow(consumer)
        if policy != before:
            text = f"sent {_words(policy)}, before that {_words(before)}"
            self.events.emit(EventKind.CONSUMER_CHANGED, text, consumer=name, model=consumer.model)
        return consumer

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
            await self._have_view(consumer, model)

    async def _have_view(self, consumer: Consumer, model: Model) -> None:
        await self.views.follow(consumer, model, self._directory(model.name) / "views" / consumer.name)

    def _directory(self, model: str) -> Path:
        return self.options.data_dir / "models" / model

    def _add(self, model: Model) -> None:
        self.models[model.name] = model
        deletes = PendingDeletes(self.log, model.name, self.events)
        self.coordinators[model.name] = CutCoordinator(model, deletes, self._tasks, self.events)


def _words(policy: Policy) -> str:
    return policy.words or "everything"


def _open_log(options: ServiceOptions) -> LogStore:
    """The log, in the implementation that the service uses."""
    log = LmdbStore(LogOptions(directory=options.data_dir / "log", max_bytes=options.log_max_bytes))
    try:
        check_log(log, options.data_dir / "models")
    except BaseException:
        log.close()
        raise
    return log

"""Recovers models at the start, and reloads models with damaged rows."""

import asyncio
import time
from collections.abc import Coroutine, Mapping
from functools import partial
from typing import Any

from deltasync.base.errors import ServiceUnavailable
from deltasync.base.events import EventKind, Events
from deltasync.base.threads import in_own_thread
from deltasync.base.waiting import backoff, first_of
from deltasync.checkpoints.file_storage import PlaceFailed
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.table_memory import NoTableMemory
from deltasync.log.data_directory import RESTORE
from deltasync.log.log_store import LogStore, LogUnavailable
from deltasync.log.volume import VolumeFailed
from deltasync.model.model import Model
from deltasync.model.model_store import (
    StoreOf,
    finish_removals,
    recorded_models,
    remove_unpublished,
)
from deltasync.model.recovery import RowsLost
from deltasync.service.models import Models, Publishing, remedy_of_last_resort
from deltasync.views.registry import ViewRegistry


def models_to_recover(log: LogStore, checkpoints_of: StoreOf) -> dict[str, Mapping[str, Any]]:
    """Finish interrupted removals in a log; return the records of its models, by name. Blocks."""
    removed = finish_removals(log, checkpoints_of) + remove_unpublished(log, checkpoints_of)
    return {name: record for name, record in recorded_models(log).items() if name not in removed}


# Errors that may pass without a repair.
_PASSING = (VolumeFailed, PlaceFailed, LogUnavailable, NoTableMemory)
_PASSING_IF_SHARED = (VolumeFailed,)


class Recoveries:
    """Recovers models to their last sealed cut. Used in the event loop."""

    def __init__(
        self,
        models: Models,
        publishing: Publishing,
        registry: ConsumerRegistry,
        views: ViewRegistry,
        events: Events,
        draining: asyncio.Event,
    ) -> None:
        self._models, self._publishing = models, publishing
        self._registry = registry
        self._views = views
        self._events = events
        self._draining = draining

    async def all(self) -> None:
        """Recover all models concurrently; each becomes available once it is recovered."""
        ended = await asyncio.gather(*map(self.model, list(self._models.recovering)), return_exceptions=True)
        for error in ended:  # Only now, when no recovery reads the log any more.
            if error:
                raise error

    async def model(self, name: str) -> None:
        """Recover a model whose record is in `recovering`.

        Nothing is removed because of damage. A model that lacks rows stays in `recovering` until its trainer has
        sent them, and one that cannot be recovered until an operator gives it up; `stuck` has the reason.

        It retries while a volume refuses writes, there is no memory for its tables, or its checkpoints or
        the log cannot be reached; `recovery_failures` has the reason. On shared logs, it retries only errors of
        volumes, because another process may take over instead. Returns without the model if the service ends.
        """
        models, started, model = self._models, time.monotonic(), None
        record, passing = models.recovering[name], _PASSING_IF_SHARED if models.storage.shared else _PASSING
        try:
            for pause in backoff():
                try:
                    model = model or await self._load(name, record)
                    await self._add(model)
                except RowsLost as error:
                    remedy = f"put its checkpoints right and restart; {RESTORE}; or {remedy_of_last_resort(name)}"
                    models.stuck[name] = f"{error}: {remedy}"
                    self._events.emit(EventKind.FAILED, "it cannot be recovered", error, model=name)
                    return
                except passing as error:
                    text = "its recovery failed and will be retried"
                    self._events.emit(EventKind.FAILED, text, error, model=name)
                    # `volumes` already reports a refused write, with its path, until the volume recovers.
                    models.recovery_failures[name] = "" if isinstance(error, VolumeFailed) else str(error)
                else:
                    if name in models.stuck:
                        self._events.emit(EventKind.ROWS_MISSING, models.stuck[name], model=name)
                        return
                    took = f"in {time.monotonic() - started:.2f} s"
                    version = model.seals.newest_version
                    self._events.emit(EventKind.MODEL_RECOVERED, took, model=name, version=version)
                    return
                await first_of(self._draining.wait(), seconds=pause)
                if self._draining.is_set():
                    return
        finally:
            models.recovery_failures.pop(name, None)
            opened = models.opened.get(name)
            if model and models.get(name) is not model and not (opened and opened.model is model):
                await models.drop(model)

    async def _load(self, name: str, record: Mapping[str, Any]) -> Model:
        model = self._models.storage.model(name)
        try:
            replays = await self._views.replays(model, self._registry.of_model(name))
            await model.recover(record, replays)
        except BaseException:
            await self._models.drop(model)
            raise
        finally:
            for problem in model.problems:
                self._events.emit(EventKind.FAILED, problem, model=name)
        return model

    async def _add(self, model: Model) -> None:
        lacks = model.lacks
        if not lacks:
            await self._models.make_views(model)
        async with self._models.changing:
            coordinator = self._publishing.coordinator(model)
            await coordinator.deletes.recover()
            if not lacks:
                await self._models.add(model, coordinator)
                return
            self._publishing.wait_for_rows(coordinator)


_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 60.0


class Reloading:
    """Reloads models whose rows do not match their digests. Used in the event loop."""

    def __init__(
        self,
        models: Models,
        recovery: Recoveries,
        events: Events,
        draining: asyncio.Event,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self._models = models
        self._recovery = recovery
        self._events = events
        self._draining, self._tasks = draining, tasks
        self._reloads = dict[str, asyncio.Task[None]]()

    async def run(self) -> None:
        """Watch each model in a separate task, until cancelled."""
        watched = set[Model]()
        async with asyncio.TaskGroup() as tasks:
            while True:
                for model in set(self._models.values()) - watched:
                    tasks.create_task(self.watch(model))
                watched = set(self._models.values())
                await self._models.added.changed()

    async def watch(self, model: Model) -> None:
        """Start to reload a model when it fails. Returns then, or once the model has left this process."""
        name = model.name
        while self._models.get(name) is model:
            if model.tables.failed:
                self._models.reloading[name] = model.tables.failed
                self._reloads[name] = self._tasks.create_task(self._reload(model))
                return
            await first_of(model.signal.changed(), seconds=_SECONDS)

    async def give_up(self, model: str) -> None:
        """Stop reloading a model that another process takes over, or at the end of the service."""
        if reload := self._reloads.get(model):
            reload.cancel()
            await asyncio.wait([reload])
            if self._reloads.get(model) is reload:  # The task had not begun, and so could not clean up.
                del self._models.reloading[model], self._reloads[model]

    async def end(self) -> None:
        """Stop all reloads at the end of the service."""
        for name in list(self._reloads):
            await self.give_up(name)

    async def _reload(self, model: Model) -> None:
        models, name, why, started = self._models, model.name, model.tables.failed, time.monotonic()
        text = f"{why}; the service reloads the model from its checkpoint and the log"
        self._events.emit(EventKind.ROWS_DAMAGED, text, model=name)
        try:
            for pause in backoff(_LONGEST_PAUSE_SECONDS):
                try:
                    await _to_the_end(self._drop(model))
                    if name in models.recovering:  # It may have been deleted or given up.
                        await self._recovery.model(name)
                except Exception as error:  # noqa: BLE001  # an error of one model must not affect others
                    models.reloading[name] = f"{why}; the reload failed and will be retried: {error}"
                    self._events.emit(EventKind.FAILED, "its reload failed and will be retried", error, model=name)
                else:
                    break
                await first_of(self._draining.wait(), seconds=pause)
                if self._draining.is_set():
                    return
        finally:
            del models.reloading[name], self._reloads[name]
        if reloaded := models.get(name):  # The service may be ending, or the model may have left.
            text = f"it was unavailable for {time.monotonic() - started:.2f} s: {why}"
            version = reloaded.seals.newest_version
            self._events.emit(EventKind.MODEL_RELOADED, text, model=name, version=version)

    async def _drop(self, model: Model) -> None:
        """End a model until it is recovered. Its consumers and their offsets stay."""
        models, name = self._models, model.name
        async with models.changing:
            if models.get(name) is model:
                models.recovering[name] = await in_own_thread(_recorded, model.log, name)
                text = f"model {name!r} is being reloaded; try again"
                await models.end(model, partial(ServiceUnavailable, text))
            if name in models.recovering:
                # Read the record again: a cut that was being sealed may have added a table.
                models.recovering[name] = await in_own_thread(_recorded, model.log, name)


def _recorded(log: LogStore, name: str) -> Mapping[str, Any]:
    return recorded_models(log)[name]


async def _to_the_end(work: Coroutine[None, None, None]) -> None:
    """Run work to its end, even if the caller is cancelled."""
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise

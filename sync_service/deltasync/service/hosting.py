"""Takes over and gives up models on logs that the processes of a cluster share."""

import contextlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, Protocol

from deltasync.base.errors import Contradiction, DeltasyncError, NotFound, NotOwner, Owner, StorageFailed
from deltasync.base.events import EventKind, Events
from deltasync.base.threads import in_own_thread
from deltasync.base.words import listed
from deltasync.checkpoints.file_storage import PlaceFailed
from deltasync.checkpoints.store import CheckpointStore
from deltasync.consumers.offsets import recorded_consumers
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.log.log_store import Logs, LogStore
from deltasync.log.records import check_log
from deltasync.service.checkpoints import Checkpoints
from deltasync.service.models import Models
from deltasync.service.recoveries import Recoveries, Reloading, models_to_recover


class SharedLogs(Logs, Protocol):
    """Shared logs, each owned by one process at a time. All calls block."""

    def open(self, model: str, owner: Owner) -> LogStore:
        """Open a model's log for this process, and fence off its earlier owner."""

    def close_log(self, model: str, *, written: bool) -> None:
        """Close a log; write the pending records first if `written`, otherwise refuse them."""

    def lost(self, model: str) -> StorageFailed | None:
        """The reason if this process has lost an open log, or another one wrote to it; otherwise None."""

    def delete(self, model: str) -> None:
        """Remove the log of a model."""

    def known_models(self) -> list[str]:
        """The models that have a log."""


class Hosting:
    """A `Host`: takes over models for this process, and gives them up. In the event loop."""

    def __init__(
        self,
        logs: SharedLogs,
        models: Models,
        registry: ConsumerRegistry,
        recovery: Recoveries,
        reloading: Reloading,
        checkpoints: Checkpoints,
        events: Events,
    ) -> None:
        self._logs = logs
        self._models = models
        self._registry = registry
        self._events = events
        self._recovery = recovery
        self._reloading = reloading
        self._checkpoints = checkpoints
        self._open = dict[str, LogStore]()
        self._owned = set[str]()

    async def take(self, model: str, owner: Owner) -> None:
        """Take over a model with its consumers: load its newest checkpoint and apply the rest of the log.

        If the log is incomplete, the model gets the newest complete version. After an error the model is given up.
        """
        self._owned.add(model)
        log = self._open[model] = await in_own_thread(self._logs.open, model, owner)
        recorded = await in_own_thread(self._recorded, log)
        self._registry.have(await in_own_thread(recorded_consumers, log), log)
        if record := recorded.get(model):
            self._models.recovering[model] = record
            await self._recovery.model(model)
        for consumer in self._registry.of_model(model):
            await self._models.owners.reserve_consumer(consumer.name, model)

    async def give_up(self, model: str, reason: str) -> None:
        """Give up a model: end its streams, and write pending records if its log still accepts them."""
        if model not in self._owned:
            return
        self._registry.end_streams(model)  # Now, because they report a newest version that may be outdated.
        log = self._open.get(model)
        written = self._models.owners.confirmed and await in_own_thread(self._logs.lost, model) is None
        written = written and not (log and log.volume.trouble)
        if not written:  # First, because tasks would otherwise wait for writes that cannot succeed.
            await in_own_thread(self._logs.close_log, model, written=False)
        await self._let_go(model, partial(self._gone, model, reason), written=written)
        if written:
            await in_own_thread(self._logs.close_log, model, written=True)
        self._owned.discard(model)

    async def forget(self, model: str) -> None:
        """Remove the log of a model that was deleted, or was never published."""
        await self._let_go(model, partial(self._gone, model, "it was deleted"), written=True)
        await in_own_thread(self._logs.close_log, model, written=True)
        await in_own_thread(self._logs.delete, model)
        self._owned.discard(model)

    async def save(self, model: str) -> None:
        """Write a checkpoint, to shorten the log that the next owner has to read."""
        await self._checkpoints.make(model)

    async def models_with_log(self) -> Collection[str]:
        """The models that have a log, here or in another process."""
        return await in_own_thread(self._logs.known_models)

    async def look_after(self) -> None:
        """Give up models whose logs are lost, and remove files of models that other processes own."""
        await in_own_thread(self._remove_checkpoints)
        for model in sorted(self._owned):
            error = await in_own_thread(self._logs.lost, model)
            if error and model in self._owned:
                self._events.emit(EventKind.FAILED, "this process has lost its log", error, model=model)
                await self._models.owners.lost(model, str(error))

    def _remove_checkpoints(self) -> None:
        """Remove local checkpoints of models of other processes, which wrote newer ones to the URL."""
        here = self._models.storage.place
        with contextlib.suppress(PlaceFailed):  # The next call tries again.
            for each in here.names(""):
                if each.name not in self._owned:
                    CheckpointStore(each.name, here).remove_all()

    def _recorded(self, log: LogStore) -> dict[str, Mapping[str, Any]]:
        """Check the log's format, and read the record of its model. Blocks."""
        check_log(log)
        return models_to_recover(log, self._models.storage.checkpoints_of)

    async def _let_go(self, name: str, refusal: Callable[[], NotOwner], *, written: bool) -> None:
        """Stop all work of this process on a model; `refusal` makes the error for its ranks and replicas."""
        await self._reloading.give_up(name)
        # Before taking the lock: a first cut that was just sealed needs the lock to add its model.
        if opened := self._models.opened.get(name):
            await opened.retire(refusal)
        async with self._models.changing:
            self._models.forget_recovery(name)
            if log := self._open.pop(name, None):
                self._registry.give_up(name, log, written=written)
            opened = self._models.opened.get(name)
            if model := self._models.get(name) or (opened and opened.model):
                await self._models.end(model, refusal)

    def _gone(self, model: str, reason: str) -> NotOwner:
        try:
            self._models.owners.check(model)
        except NotOwner as error:
            return error
        except DeltasyncError as error:
            reason = str(error)
        return NotOwner(f"model {model!r} has left this process: {reason}; reconnect")


async def drain_process(models: Models, name: str) -> list[str]:
    """Hand over all models of process `name`, which must be this one or empty, for good; return their names."""
    owners = models.owners
    others = {each.name: each for each in owners.processes() if each.name != owners.me.name}
    if name and name != owners.me.name:
        if name not in others:
            raise NotFound(f"no process {name!r}", detail=f"; processes: {listed([*others, owners.me.name])}")
        raise NotOwner(f"this is not process {name!r}: send the request there", owner=others[name].owner())
    if all(each.draining for each in others.values()):
        raise Contradiction("no other process can take the models: start one, or stop this one")
    names = sorted(models)
    await owners.drain()
    return names

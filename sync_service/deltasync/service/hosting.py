"""The models that this process owns, on logs that other processes can go on with."""

import asyncio
import contextlib
from collections.abc import Callable, Collection, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from deltasync.base.errors import Contradiction, DeltasyncError, NotFound, NotOwner, Owner, StorageFailed
from deltasync.base.events import EventKind, Events
from deltasync.base.words import listed
from deltasync.checkpoints.place import PlaceFailed
from deltasync.checkpoints.store import CheckpointStore
from deltasync.consumers.offsets import recorded_consumers
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.log.log_store import Logs, LogStore
from deltasync.log.records import check_log
from deltasync.service.checkpoints import Checkpoints
from deltasync.service.models import Models
from deltasync.service.recovery import Recoveries, Reloading, models_to_recover

_NO_FOLDER = Path("/nonexistent")  # A shared log may be new, whatever checkpoints this process has.


class SharedLogs(Logs, Protocol):
    """Logs of which one process at a time has each. All of it blocks."""

    def open(self, model: str, owner: Owner) -> LogStore:
        """Have a model's log: from here on, who had it before can write nothing.

        Raises:
            StorageFailed: it cannot be reached, or read.
        """

    def close_log(self, model: str, *, written: bool) -> None:
        """Have a log no more; what is submitted is `written` before, or refused."""

    def lost(self, model: str) -> StorageFailed | None:
        """Why a log that is open is this process's no more, or not what it was; None while it is."""

    def delete(self, model: str) -> None:
        """Remove the log of a model.

        Raises:
            StorageFailed: it cannot be reached.
        """

    def known_models(self) -> list[str]:
        """The models that have a log.

        Raises:
            StorageFailed: it cannot be asked.
        """


class Hosting:
    """Takes models that this process becomes the owner of, and gives them up: a `Host`. In the event loop."""

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
        """Take a model with its consumers: load its newest checkpoint and apply the log that follows it. Where the
        log has lost something, the model comes back as of the newest version that is complete. If taking it fails,
        it is given up.

        Raises:
            StorageFailed: its log, or its checkpoints, cannot be reached or read.
        """
        self._owned.add(model)
        log = self._open[model] = await asyncio.to_thread(self._logs.open, model, owner)
        recorded = await asyncio.to_thread(self._recorded, log)
        self._registry.have(await asyncio.to_thread(recorded_consumers, log), log)
        if record := recorded.get(model):
            self._models.recovering[model] = record
            await self._recovery.model(model)
        for consumer in self._registry.of_model(model):
            await self._models.owners.reserve_consumer(consumer.name, model)

    async def give_up(self, model: str, reason: str) -> None:
        """Have a model no more: its streams end, and nothing of it is written any more but what it takes still."""
        if model not in self._owned:
            return
        self._registry.end_streams(model)  # At once: what they say of the newest version is true no more.
        written = self._models.owners.confirmed and await asyncio.to_thread(self._logs.lost, model) is None
        if not written:  # First: who waits for it to be written would wait for long.
            await asyncio.to_thread(self._logs.close_log, model, written=False)
        await self._let_go(model, partial(self._gone, model, reason), written=written)
        if written:
            await asyncio.to_thread(self._logs.close_log, model, written=True)
        self._owned.discard(model)

    async def forget(self, model: str) -> None:
        """Remove the log of a model that was deleted, or was never published."""
        await self._let_go(model, partial(self._gone, model, "it was deleted"), written=True)
        await asyncio.to_thread(self._logs.close_log, model, written=True)
        await asyncio.to_thread(self._logs.delete, model)
        self._owned.discard(model)

    async def save(self, model: str) -> None:
        """Write a checkpoint, so that the next owner has little of the log to read.

        Raises:
            DeltasyncError: it could not be written or copied.
        """
        await self._checkpoints.make(model)

    async def known(self) -> Collection[str]:
        """The models that have a log, whoever owns them.

        Raises:
            StorageFailed: brokers do not answer.
        """
        return await asyncio.to_thread(self._logs.known_models)

    async def look_after(self) -> None:
        """Give up models whose logs are lost, and remove files of models that others have."""
        await asyncio.to_thread(self._remove_checkpoints)
        for model in sorted(self._owned):
            error = await asyncio.to_thread(self._logs.lost, model)
            if error and model in self._owned:
                self._events.emit(EventKind.FAILED, "its log is lost", error, model=model)
                await self._models.owners.lost(model, str(error))

    def _remove_checkpoints(self) -> None:
        """Remove the checkpoints in the data directory of models that this process does not own: their owners have
        written others at the URL.
        """
        here = self._models.storage.place
        with contextlib.suppress(PlaceFailed):  # What cannot be removed now is a second later.
            for each in here.names(""):
                if each.name not in self._owned:
                    CheckpointStore(each.name, here).remove_all()

    def _recorded(self, log: LogStore) -> dict[str, Mapping[str, Any]]:
        """Read the log's record of its model, once it is known that this version can read it. Blocks."""
        check_log(log, _NO_FOLDER)
        return models_to_recover(log, self._models.storage.checkpoints_of)

    async def _let_go(self, name: str, refusal: Callable[[], NotOwner], *, written: bool) -> None:
        """End everything that this process does for a model.

        Args:
            name: the model.
            refusal: makes the error for its ranks and replicas.
            written: whether to write down what is under way: the log takes it still.
        """
        await self._reloading.give_up(name)
        # Before the lock: a first cut that has just been sealed waits for it, to add its model.
        if opened := self._models.opened.get(name):
            await opened.retire(refusal)
        async with self._models.changing:
            self._models.recovering.pop(name, None)
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
        return NotOwner(f"model {model!r} is not here any more: {reason}; reconnect")


async def drain_process(models: Models, name: str) -> list[str]:
    """Have this process give all its models to others, and take none any more: their names.

    Args:
        models: those of this process.
        name: that of the process; empty is this one.

    Raises:
        NotOwner: it is another one, which is to be asked.
        NotFound: there is none of that name.
        Contradiction: there is no other that could have them.
    """
    owners = models.owners
    others = {each.name: each for each in owners.processes() if each.name != owners.me.name}
    if name and name != owners.me.name:
        if name not in others:
            raise NotFound(f"no process {name!r}", detail=f"; processes: {listed([*others, owners.me.name])}")
        raise NotOwner(f"process {name!r} is to be asked itself", owner=others[name].owner())
    if all(each.draining for each in others.values()):
        raise Contradiction("there is no other process that could have the models: start one, or stop this one")
    names = sorted(models)
    await owners.drain()
    return names

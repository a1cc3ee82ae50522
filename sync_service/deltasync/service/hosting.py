"""The models that this process owns, on logs that other processes can go on with."""

import asyncio
from collections.abc import Collection
from typing import Protocol

from deltasync.core.errors import DeltasyncError, NotOwner, StorageFailed
from deltasync.core.events import EventKind
from deltasync.core.owner import Owner
from deltasync.service.model_files import ModelFiles
from deltasync.service.moves import Moves
from deltasync.service.service import Service
from deltasync.service.snapshots import SnapshotLoop
from deltasync.storage.log_store import LogStore
from deltasync.storage.logs import Logs

_SECONDS = 1.0


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
    """Takes models that this process is made the owner of, and gives them up: a `Models`. In the event loop."""

    def __init__(self, service: Service, logs: SharedLogs, files: ModelFiles, snapshots: SnapshotLoop) -> None:
        self._service, self._logs, self._files, self._snapshots = service, logs, files, snapshots
        self._moves = Moves(service)
        self._owned = set[str]()

    async def take(self, model: str, owner: Owner) -> None:
        """Have a model, with its consumers. If that fails it is given up.

        Raises:
            StorageFailed: its log cannot be reached or read, or there are no files of it to be had.
        """
        self._owned.add(model)
        log = await asyncio.to_thread(self._logs.open, model, owner)
        await asyncio.to_thread(self._files.make, model, log)
        await self._moves.take(model, log)
        for consumer in self._service.registry.of_model(model):
            await self._service.owners.reserve_consumer(consumer.name, model)

    async def give_up(self, model: str, reason: str) -> None:
        """Have a model no more: its streams end, and nothing of it is written any more but what it takes still."""
        if model not in self._owned:
            return
        self._service.registry.end_streams(model)  # At once: what they say of the newest version is true no more.
        written = self._service.owners.confirmed and await asyncio.to_thread(self._logs.lost, model) is None
        if not written:  # First: who waits for it to be written would wait for long.
            await asyncio.to_thread(self._logs.close_log, model, written=False)
        await self._moves.give_up(model, lambda: self._gone(model, reason), written=written)
        if written:
            await asyncio.to_thread(self._logs.close_log, model, written=True)
        self._snapshots.forget(model)
        self._owned.discard(model)

    async def forget(self, model: str) -> None:
        """Have no log of a model that was deleted, or was never published; nobody owns it then."""
        await self._moves.give_up(model, lambda: self._gone(model, "it was deleted"), written=True)
        await asyncio.to_thread(self._logs.close_log, model, written=True)
        await asyncio.to_thread(self._logs.delete, model)
        self._snapshots.forget(model)
        self._owned.discard(model)
        await self._service.owners.forget(model)

    async def save(self, model: str) -> None:
        """Make a snapshot, from which the next owner is soon at the head.

        Raises:
            DeltasyncError: it could not be made.
        """
        await self._snapshots.make(model)

    async def known(self) -> Collection[str]:
        """The models that have a log, whoever owns them.

        Raises:
            StorageFailed: brokers do not answer.
        """
        return await asyncio.to_thread(self._logs.known_models)

    async def look_after(self) -> None:
        """Give up what is lost, until cancelled."""
        while True:
            await asyncio.sleep(_SECONDS)
            for model in sorted(self._owned):
                error = await asyncio.to_thread(self._logs.lost, model)
                if error and model in self._owned:
                    self._service.events.emit(EventKind.FAILED, "its log is lost", error, model=model)
                    await self._service.owners.lost(model, str(error))

    def _gone(self, model: str, reason: str) -> NotOwner:
        try:
            self._service.owners.check(model)
        except NotOwner as error:
            return error
        except DeltasyncError as error:
            reason = str(error)
        return NotOwner(f"model {model!r} is not here any more: {reason}; reconnect")

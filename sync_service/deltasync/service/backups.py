"""Backups of a service that goes on: files as of a flush, then the log, which has what came after that."""

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path

from deltasync.core.errors import Contradiction, InvalidInput, ServiceUnavailable, StorageFailed
from deltasync.core.events import EventKind
from deltasync.core.words import counted
from deltasync.feeds.model import Model
from deltasync.service.service import Service
from deltasync.storage.backup import Backup, Check, check_for_backup, make_backup
from deltasync.views.view import View


class Backups:
    """Makes backups of a service, one at a time. Used in the event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def make(self, directory: Path, by: str) -> Backup:
        """Copy all that the service keeps into a folder; `by` is who has asked for it.

        Cuts and releases go on; flushes and new tables of views wait, and no consumer can be deleted.

        Raises:
            InvalidInput: the path is relative or inside of the data directory, or the folder has something.
            Contradiction: another backup is being made.
            ServiceUnavailable: models are still recovering, or the service is shutting down.
            StorageFailed: something could not be read or written.
        """
        service = self._service
        async with service.changing:  # What is being removed is, and nothing is from here on.
            for model in service.recovering:
                service.check_recovered(model)
            if service.backing_up:
                raise Contradiction("another backup is being made: wait for its end")
            service.backing_up = True
        try:
            await asyncio.to_thread(_check_place, directory, service.options.data_dir)
            backup = await self._make(directory)
        finally:
            service.backing_up = False
        text = f"{counted(len(backup.files), 'file')}, {counted(backup.bytes, 'byte')}"
        service.events.emit(EventKind.BACKED_UP, text, directory=str(directory), by=by)
        return backup

    async def _make(self, directory: Path) -> Backup:
        views, models = self._service.views.by_consumer(), list(self._service.models.values())
        left = False

        def check() -> None:
            if left:
                raise ServiceUnavailable("whoever has asked for the backup has left")
            if self._service.draining.is_set():
                raise ServiceUnavailable("the service is shutting down: the backup is not complete")
            if self._service.logs.refusing:
                raise StorageFailed("the log is full, and tables are not flushed while they are copied: try again")

        async with contextlib.AsyncExitStack() as held:
            for view in views.values():
                await held.enter_async_context(view.making_tables)
            copying = asyncio.create_task(asyncio.to_thread(self._copy, models, views, directory, check))
            try:
                return await asyncio.shield(copying)
            except asyncio.CancelledError:
                left = True
                await asyncio.wait({copying})
                if not copying.cancelled() and (error := copying.exception()):
                    self._service.events.emit(EventKind.FAILED, f"backup {directory}: {error}")
                raise

    def _copy(self, models: list[Model], views: Mapping[str, View], directory: Path, check: Check) -> Backup:
        feeds: list[Model | View] = [*models, *views.values()]
        for feed in feeds:
            feed.flush()
        with contextlib.ExitStack() as held:
            for feed in feeds:
                held.enter_context(feed.without_flush())
            histories = {name: view.history for name, view in views.items()}
            (log,) = self._service.logs.each()
            return make_backup(self._service.options.data_dir, log, histories, directory, check)


def _check_place(directory: Path, data_dir: Path) -> None:
    if not directory.is_absolute():
        raise InvalidInput(f"{directory}: expected an absolute path, of the service's machine")
    if directory.resolve().is_relative_to(data_dir.resolve()):
        raise InvalidInput(f"{directory} is inside of the data directory {data_dir}: name a folder elsewhere")
    check_for_backup(directory)

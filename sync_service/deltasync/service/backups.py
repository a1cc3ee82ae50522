"""Backups of a service that goes on: a snapshot of each model, in a folder."""

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path

from deltasync.core.errors import Contradiction, InvalidInput
from deltasync.core.events import EventKind
from deltasync.core.words import counted
from deltasync.service.backup_folder import Backup, BackupFolder, check_for_backup
from deltasync.service.service import Service
from deltasync.service.snapshot_now import make_snapshot
from deltasync.service.snapshot_records import recorded_consumers
from deltasync.snapshots.manifest import Manifest, Piece
from deltasync.snapshots.packing import PieceWriter, pack_small
from deltasync.storage.log_store import LogStore

_OTHERS = "others"


class Backups:
    """Makes backups of a service, one at a time. Used in the event loop."""

    def __init__(self, service: Service) -> None:
        self._service, self._making = service, asyncio.Lock()

    async def make(self, directory: Path, by: str) -> Backup:
        """Have all that the service keeps in a folder; `by` is who has asked for it. Everything goes on meanwhile.

        Raises:
            InvalidInput: the path is relative or inside of the data directory, or the folder has something.
            Contradiction: another backup is being made, or the log is not the service's own.
            ServiceUnavailable: models are still recovering, or the service is shutting down.
            StorageFailed: something could not be read or written.
        """
        service = self._service
        if service.hosting:
            raise Contradiction(
                "its log is among brokers, and other processes have models: deltasync snapshot MODEL makes a "
                "snapshot of each, and deltasync restore a data directory of those"
            )
        for model in service.recovering:
            service.check_recovered(model)
        if self._making.locked():
            raise Contradiction("another backup is being made: wait for its end")
        async with self._making:
            await asyncio.to_thread(_check_place, directory, service.options.data_dir)
            backup = await self._make(BackupFolder(directory))
        text = f"{counted(backup.files, 'file')}, {counted(backup.bytes, 'byte')}"
        service.events.emit(EventKind.BACKED_UP, text, directory=str(directory), by=by)
        return backup

    async def _make(self, folder: BackupFolder) -> Backup:
        await asyncio.to_thread(folder.begin)
        try:
            found = {
                name: await make_snapshot(self._service, name, folder.place, None)
                for name in sorted(self._service.models)
            }
            return await asyncio.to_thread(self._complete, folder, found)
        except BaseException:
            await asyncio.to_thread(folder.abandon)
            raise

    def _complete(self, folder: BackupFolder, found: Mapping[str, Manifest]) -> Backup:
        small = {name: value for log in self._service.logs.each() for name, value in _others(log, found).items()}
        pieces = PieceWriter(folder.place, _OTHERS, "others")
        others = pieces.add(pack_small(small)) if small else Piece("", 0, 0, "")
        pieces.end()
        return folder.complete(found, others, time.time_ns())


def _others(log: LogStore, found: Mapping[str, Manifest]) -> dict[str, bytes]:
    """Consumers whose models were not published by then."""
    waiting = {name for name, model in recorded_consumers(log).items() if model not in found}
    return {f"consumer/{name}": log.items(f"consumer/{name}")[""] for name in sorted(waiting)}


def _check_place(directory: Path, data_dir: Path) -> None:
    if not directory.is_absolute():
        raise InvalidInput(f"{directory}: expected an absolute path, of the service's machine")
    if directory.resolve().is_relative_to(data_dir.resolve()):
        raise InvalidInput(f"{directory} is inside of the data directory {data_dir}: name a folder elsewhere")
    check_for_backup(directory)

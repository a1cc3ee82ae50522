"""A backup of a data directory that no service uses: one that nobody can reach makes it."""

import asyncio
from pathlib import Path

from deltasync.service.backup_folder import Backup, check_for_backup
from deltasync.service.backups import Backups
from deltasync.service.options import ServiceOptions
from deltasync.service.service import Service
from deltasync.storage.data_directory import check_is_data_directory, lock_data_directory
from deltasync.storage.files import for_owner_only


@for_owner_only()
def back_up_offline(data_dir: Path, directory: Path) -> Backup:
    """Make a backup of a data directory that no service uses; none can meanwhile.

    Raises:
        InvalidInput: it is none, or the folder has something.
        StorageFailed: a service uses it, something in it is damaged, or could not be read or written.
    """
    check_is_data_directory(data_dir)
    check_for_backup(directory)
    lock_data_directory(data_dir, "stop it, or back it up while it runs, without --data-dir").close()
    try:
        return asyncio.run(_back_up(data_dir, directory.absolute()))
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from group


async def _back_up(data_dir: Path, directory: Path) -> Backup:
    async with asyncio.TaskGroup() as tasks:
        service = Service(ServiceOptions(data_dir=data_dir), tasks)
        try:
            await service.recover(patient=False)
            made = await Backups(service).make(directory, "deltasync backup --data-dir")
        finally:
            await service.drain()
    return made

"""Mending a data directory that no service uses, as a service does it."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from deltasync.core.errors import DeltasyncError
from deltasync.service.inspection import InspectedTable, inspect
from deltasync.service.options import ServiceOptions
from deltasync.service.service import Service
from deltasync.storage.data_directory import check_is_data_directory
from deltasync.storage.files import for_owner_only
from deltasync.storage.made_files import foreign


@dataclass(frozen=True)
class Mended:
    """What was found, and is mended as far as it can be.

    Attributes:
        tables: what was found of each table, and what is left.
        removed: files and folders that nothing used, and that are no more.
        foreign: files and folders that no service has made, which are left alone.
    """

    tables: Sequence[InspectedTable]
    removed: Sequence[Path]
    foreign: Sequence[Path]


@for_owner_only()
def mend_data_directory(data_dir: Path) -> Mended:
    """Open a data directory, mend what can be mended from the log, and put that on disk.

    Raises:
        InvalidInput: it is none.
        StorageFailed: a service uses it, or it cannot be opened: something is missing that the log does not have,
            or a volume refuses what that needs.
    """
    check_is_data_directory(data_dir)
    before = set(data_dir.rglob("*"))
    tables = asyncio.run(_mended(data_dir))
    removed = before - set(data_dir.rglob("*"))
    outermost = sorted(each for each in removed if each.parent not in removed)
    return Mended(tables, outermost, foreign(data_dir))


async def _mended(data_dir: Path) -> list[InspectedTable]:
    async with asyncio.TaskGroup() as tasks:
        try:
            return await _mended_by(Service(ServiceOptions(data_dir=data_dir), tasks))
        except DeltasyncError as error:
            failed = error
    raise failed  # Here: a group of tasks would put it into a group of errors.


async def _mended_by(service: Service) -> list[InspectedTable]:
    try:
        await service.recover(patient=False)  # Nobody looks after volumes, or could see that it waits.
        return await inspect(service, "fsck --mend")
    finally:
        await service.drain()

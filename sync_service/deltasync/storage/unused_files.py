"""What files have that no table uses: of tables that have moved, or were never written down."""

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

from deltasync.storage.table_files import SHARED, TableFiles, offsets

_BLOCK_BYTES = 1 << 20


def remove_unused(parent: Path, used: Iterable[TableFiles]) -> None:
    """Remove the folders in which no table is used, and what a shared file still has of others."""
    folders: dict[Path, list[TableFiles]] = {}
    for table in used:
        folders.setdefault(table.place.folder, []).append(table)
    for folder in parent.iterdir() if parent.exists() else ():
        if folder.is_dir() and folder not in folders:
            shutil.rmtree(folder, ignore_errors=True)  # Or at the next change.
    for tables in folders.values():
        _clear_between([table for table in tables if table.place.offset is not None])


def _clear_between(tables: Sequence[TableFiles]) -> None:
    """Leave nothing but these tables in a shared file: no deleted row may be left where another table was."""
    after = 0
    for table in sorted(tables, key=_start):
        _clear(table.place.folder / SHARED, after, _start(table))
        pairs = zip(table.arrays, table.mappings, strict=True)
        sizes = (array.nbytes for array, mapping in pairs if mapping is table.mappings[0])
        after = max(after, offsets(sizes, _start(table))[-1])  # Of one table, there may be two that differ.
    for table in tables[:1]:
        _clear(table.place.folder / SHARED, after, table.mappings[0].size)


def _start(table: TableFiles) -> int:
    return table.place.offset or 0


def _clear(path: Path, start: int, end: int) -> None:
    """Overwrite a part of a file with zeros. What a private mapping has there is never written."""
    with path.open("r+b", buffering=0) as file:
        for first in range(start, end, _BLOCK_BYTES):
            size = min(end - first, _BLOCK_BYTES)
            if os.pread(file.fileno(), size, first).count(0) < size:
                os.pwrite(file.fileno(), bytes(size), first)

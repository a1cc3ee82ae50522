"""What folders and files have that nobody uses: of tables that have moved, or of what a process was making when it
ended.
"""

import logging
import os
from collections.abc import Iterable, Mapping, Sequence, Set
from pathlib import Path

from deltasync.storage.made_files import (
    entries,
    foreign_to_models,
    remove_folder_of_tables,
    remove_made,
    remove_made_for_tables,
)
from deltasync.storage.table_files import SHARED, TableFiles, offsets

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 1 << 20
_TOLD = 20


def remove_unused(parent: Path, used: Iterable[TableFiles]) -> None:
    """Remove the folders in which no table is used, and what a shared file still has of others."""
    folders: dict[Path, list[TableFiles]] = {}
    for table in used:
        folders.setdefault(table.place.folder, []).append(table)
    for folder in entries(parent):
        if folder not in folders:
            remove_folder_of_tables(folder)  # Or at the next change.
    for tables in folders.values():
        _clear_between([table for table in tables if table.place.offset is not None])


def remove_left_behind(parent: Path, used: Iterable[TableFiles]) -> None:
    """Remove all that was made for tables, and that none uses. Before anybody makes another."""
    tables = list(used)
    remove_made_for_tables(parent, {mapping.name for table in tables for mapping in table.mappings})
    remove_unused(parent, tables)


def remove_unknown(models: Path, known: Mapping[str, Set[str]]) -> None:
    """Remove what is left of models, and of views, that are not known. Before anybody makes one.

    Args:
        models: the folder of all models.
        known: the consumers whose views are, by the model's name.
    """
    for model in entries(models):
        views, consumers = model / "views", known.get(model.name)
        if consumers is None:
            remove_made(model, models)
            continue
        for each in entries(model):
            if each not in (model / "tables", views):
                remove_made(each, models)
        for each in entries(views):
            if each.name not in consumers:
                remove_made(each, models)
    if left := foreign_to_models(models):
        logger.warning("left alone, since no service has made them: %s", ", ".join(map(str, left[:_TOLD])))


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

"""Whether arrays are in memory or in files, and in which."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from deltasync.core.delivery import Delivery
from deltasync.core.stamps import StampedTable
from deltasync.storage.mapping import Mapping
from deltasync.storage.table_files import ArraySpec, TableFiles, make_tables, open_tables
from deltasync.views.table import ViewTable, view_arrays


def mapping_of(array: Any) -> Mapping | None:
    """The mapping that an array is in, or cut out of; None if it is in memory."""
    while array is not None and not isinstance(array, Mapping):
        array = getattr(array, "base", None)
    return array


def in_a_file(array: Any) -> bool:
    """Whether an array is in a mapping, or cut out of one that is."""
    return mapping_of(array) is not None


def new_files(folder: Path, arrays: Sequence[ArraySpec]) -> TableFiles:
    """Files of one table, all zero, in a new folder below this one."""
    return make_tables(folder, [arrays])[0]


def new_view_table(source: StampedTable, delivery: Delivery, folder: Path) -> ViewTable:
    """A table of a view, in files of its own."""
    return ViewTable(source, delivery, new_files(folder, view_arrays(delivery)))


def reopened(table: ViewTable) -> ViewTable:
    """The table after a restart."""
    return ViewTable(table.source, table.delivery, files_on_disk(table))


def check_noted(files: TableFiles, arrays: Sequence[ArraySpec]) -> None:
    """Check that a flush would write every row of these arrays that the files have not: of private mappings."""
    (found,) = open_tables([(files.place, arrays)])
    pending = files.touched.pending()
    for number, (memory, disk, spec) in enumerate(zip(files.arrays, found.arrays, arrays, strict=True)):
        rows = memory.reshape(len(memory), -1).view(np.uint8), disk.reshape(len(disk), -1).view(np.uint8)
        differ = np.flatnonzero((rows[0] != rows[1]).any(axis=1))
        noted = pending[differ >> files.touched.shift] & 1 << files.first + number
        assert noted.all(), f"{spec.file}: rows {differ[noted == 0].tolist()} were written and are not noted"


def files_on_disk(table: ViewTable) -> TableFiles:
    """What the files have of a view's table, mapped once more."""
    return open_tables([(table.files.place, view_arrays(table.delivery))])[0]

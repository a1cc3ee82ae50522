"""Tables mapped from files: as fast as memory, larger than memory if need be, there again after a restart."""

from collections.abc import Callable
from functools import partial
from urllib.parse import quote

import numpy as np
import xxhash

from deltasync.core.stamps import StampedTable
from deltasync.core.tables import TableSpec
from deltasync.storage.table_files import ArraySpec, TableFiles, flush

_STAMP_TYPE = np.dtype(np.int64)


class MappedTable(StampedTable):
    """A stamped table whose arrays, which are `arrays_of` it, are mapped from files.

    Attributes:
        files: where they are mapped from. Replaced whole: any thread may read it.
    """

    def __init__(self, table: TableSpec, files: TableFiles) -> None:
        rows, stamps = files.arrays
        super().__init__(table, rows, stamps)
        self.files = files

    def moves(self, spec: TableSpec) -> bool:
        """Whether it needs other files to be what it is to be."""
        return spec.rows > self.spec.rows and self.files.place.offset is not None

    def extend(self, spec: TableSpec, files: TableFiles | None = None) -> Callable[[], None]:
        """Make room for what the table is to be, which may have more rows: in its own files, or else in `files`,
        which are all zero. Blocks; any thread.

        Returns:
            What makes the table that, with zeros in new rows: for the thread that changes it.

        Raises:
            StorageFailed: there is no room; the table is as it was.
        """
        if spec.rows > self.spec.rows:
            return partial(self._become, spec, files or self.files.extended(arrays_of(spec)))
        return partial(self._become, spec, self.files)

    def _become(self, spec: TableSpec, files: TableFiles) -> None:
        if files.place != self.files.place:
            files.copy(self.files)
        self.counts = self.counts.plus_unchanged(spec.rows - self.spec.rows)
        self.spec, self.files = spec, files
        self.rows, self.stamps = files.arrays

    def flush(self) -> None:
        """Wait until everything written before the call is on disk."""
        flush([self.files])


def arrays_of(table: TableSpec, folder: str = "") -> tuple[ArraySpec, ...]:
    """The arrays of a table; their files, if they have some of their own, are in a folder below the table's."""
    return (
        ArraySpec(folder + file_of(table, "rows"), table.dtype, (table.rows, table.dim)),
        ArraySpec(folder + file_of(table, "stamps"), _STAMP_TYPE, (table.rows,)),
    )


def file_of(table: TableSpec, kind: str) -> str:
    """The file of one of a table's arrays; its name is unique and short, however long the table's name is."""
    return f"{quote(table.name, safe='')[:100]}-{xxhash.xxh3_64_hexdigest(table.name.encode())}.{kind}"

"""Rows as files have them that no service uses: read, and never written."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.core.digests import RowDigests
from deltasync.core.id_sets import difference, union
from deltasync.core.progress import Progress
from deltasync.core.rows import Ids
from deltasync.core.tables import TableSpec
from deltasync.core.tags import tag_key, wrong_tags
from deltasync.storage.table_files import SHARED, ArraySpecs, Place, anything_after, offsets

_BYTES_AT_ONCE = 64 << 20
_NONE: Ids = np.zeros(0, np.int64)


@dataclass(frozen=True, eq=False)
class StoredTable:
    """A table in files.

    Attributes:
        spec: what it is, with as many rows as the files have.
        role: what its rows are, see `core.tags`.
        place: where its arrays are.
        arrays: rows, stamps, tags, digests; others may follow.
        digests: makes the digests [n] that rows [n, D] have.
        logged: ids [n] of rows that the log has, and that are written anew when a service starts.
        newest: no stamp is above this number.
    """

    spec: TableSpec
    role: str
    place: Place
    arrays: ArraySpecs
    digests: Callable[[NDArray[Any]], RowDigests]
    logged: Ids
    newest: int

    def problems(self) -> Iterator[str]:
        """What is wrong with its files: that they are missing, or of another size."""
        for path, size, exact in _sizes(self.place, self.arrays):
            found = path.stat().st_size if path.exists() else None
            if found is None:
                yield f"{path} is missing"
            elif found < size or (exact and found > size and anything_after(path, size)):
                yield f"{path} has {found} bytes, expected {size}"

    def read(self, some: slice) -> list[NDArray[Any]]:
        """What all of its arrays have of some rows, copied."""
        return [np.array(_mapped(*each)[some]) for each in _positions(self.place, self.arrays)]

    def damaged(self) -> tuple[Ids, Ids]:
        """The rows that do not fit their digests, and others whose stamps are not those that were stored."""
        rows, stamps, tags, digests = (_mapped(*each) for each in _positions(self.place, self.arrays)[:4])
        key, size = tag_key(self.role, self.spec), max(1, _BYTES_AT_ONCE // self.spec.row_bytes)
        damaged, untagged = _NONE, _NONE
        progress = Progress(f"table {self.spec.name!r}: looking at its rows", self.spec.rows)
        for first in range(0, self.spec.rows, size):
            some = slice(first, first + size)
            kept = np.ascontiguousarray(digests[some])
            wrong = wrong_tags(key, first, np.array(stamps[some]), kept, np.array(tags[some]))
            wrong = union(wrong, first + np.flatnonzero(np.abs(stamps[some]) > self.newest))
            fits = self.digests(np.array(rows[some])) == kept.sum(axis=1)
            unfit = first + np.flatnonzero(~fits & (np.array(stamps[some]) != 0))
            damaged, untagged = np.append(damaged, unfit), np.append(untagged, wrong)
            progress.at(min(first + size, self.spec.rows))
        damaged = difference(damaged, self.logged)
        return damaged, difference(difference(untagged, self.logged), damaged)


def files_of(place: Place, arrays: ArraySpecs) -> set[Path]:
    """The files that arrays are in."""
    return {path for path, *_ in _sizes(place, arrays)}


def _sizes(place: Place, arrays: ArraySpecs) -> list[tuple[Path, int, bool]]:
    """Each file, what it has to have, and whether no more than that."""
    own = [(place.folder / each.file, each.nbytes, True) for each in arrays if place.offset is None or each.alone]
    if place.offset is None:
        return own
    end = offsets((0 if each.alone else each.nbytes for each in arrays), place.offset)[-1]
    return [*own, (place.folder / SHARED, end, False)]


def _positions(place: Place, arrays: ArraySpecs) -> list[tuple[Path, int, np.dtype[Any], tuple[int, ...]]]:
    starts = offsets((0 if each.alone else each.nbytes for each in arrays), place.offset or 0)
    return [
        (place.folder / each.file, 0, each.dtype, each.shape)
        if place.offset is None or each.alone
        else (place.folder / SHARED, start, each.dtype, each.shape)
        for each, start in zip(arrays, starts, strict=False)
    ]


def _mapped(path: Path, start: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    return np.asarray(np.memmap(path, dtype, "r", start, shape))


def ids_of(batches: Mapping[str, list[Ids]], table: str) -> Ids:
    """The ids of a table in some batches, each once."""
    return np.unique(np.concatenate([_NONE, *batches.get(table, ())]))

"""The files of a mirror as a reader maps them: its folder, its two sides, and their tables."""

import math
import os
import stat
import weakref
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.base.errors import InvalidInput, NotFound, ServiceUnavailable, StorageFailed
from deltasync.base.words import listed
from deltasync.client.shared import layout
from deltasync.client.shared.layout import MappedFile
from deltasync.client.targets.keyed_table import KeyedRows, KeySlots, RowNumbers
from deltasync.client.targets.target import TornTarget
from deltasync.core.rows import Values
from deltasync.core.tables import TableSpec
from deltasync.kernels.instructions import fence

REMOVED = "the folder of its mirror was moved or removed: attach again when there is a new one"
_NO_VERSION = partial(ServiceUnavailable, "the mirror has no version yet")


class Folder:
    """The open folder of a mirror of `owner` or root. A mirror that replaces it has files of the same names."""

    def __init__(self, path: Path, owner: int) -> None:
        self.path = path.absolute()
        if stat.S_ISLNK(os.stat(path, follow_symlinks=False).st_mode):
            raise InvalidInput(f"{path} is a link: name the folder to which it leads")
        self.fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.fd)
        if (found := os.fstat(self.fd).st_uid) not in (owner, 0):
            raise InvalidInput(
                f"{path} belongs to user {found}, not to user {owner} or root: if you trust that user, pass "
                f"owner={found}"
            )
        self._inode = layout.inode_of_control(self.fd)
        self.control = MappedFile(layout.CONTROL, dir_fd=self.fd)

    @property
    def is_removed(self) -> bool:
        """Whether the folder or its file `control` was moved, removed or replaced."""
        return not layout.is_in_place(self.path, self.fd, self._inode)

    def check(self) -> None:
        """Raise ServiceUnavailable if it was removed. A file that was opened before belongs to this mirror."""
        if self.is_removed:
            raise ServiceUnavailable(REMOVED)

    def unusable(self, name: str, error: Exception) -> StorageFailed:
        """The error for one of its files that cannot be used."""
        path = self.path / name
        if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
            return StorageFailed(f"{path} cannot be used: {layout.with_remedy(error)}")
        return StorageFailed(
            f"{path} cannot be used ({error}): if it is damaged, stop the mirror, remove its folder, start the "
            "mirror, and attach again"
        )


class MappedSide:
    """One side, as far as this process has mapped its arrays."""

    def __init__(self, folder: Folder, number: int) -> None:
        self.number, self._folder = number, folder
        self._shown, self._descriptions = layout.side_of(folder.control, number)
        self._known = -1, Tables(folder)  # The tables at a sequence number.

    def begin(self) -> int | None:
        """The sequence number before reading; None while the mirror writes the side."""
        sequence = int(self._shown["sequence"][0])
        fence()
        if sequence % 2 and not self.version:
            raise _NO_VERSION()
        return None if sequence % 2 else sequence

    def is_changed_since(self, sequence: int) -> bool:
        """Whether the mirror has written the side since."""
        fence()
        return int(self._shown["sequence"][0]) != sequence

    def check(self, sequence: int, cause: Exception | None = None) -> None:
        """Raise TornTarget if the mirror has written the side since."""
        if self.is_changed_since(sequence):
            raise TornTarget(
                "the mirror wrote over the rows, because this reader used them for longer than its limit: discard "
                "the results, and read less at once or raise the limit (deltasync mirror --longest-pin)"
            ) from cause

    @property
    def version(self) -> int:
        """The version of its rows."""
        return int(self._shown["version"][0])

    def fields(self) -> dict[str, Any]:
        """The fields of `Reading`."""
        if not self.version:
            raise _NO_VERSION()
        try:
            return layout.reading_of(self._shown)
        except ValueError as error:
            raise self._folder.unusable(layout.CONTROL, error) from error

    def tables(self, sequence: int) -> "Tables":
        """Its tables at a sequence number. Most versions have the tables of the version before."""
        # No lock, because a fork could copy it while it is locked. Two threads may both do the work.
        at, known = self._known
        if at != sequence:
            if not self.version:
                raise _NO_VERSION()
            described = self._descriptions[: int(self._shown["tables"][0])].tobytes()
            if described != known.described:
                try:
                    known = Tables(self._folder, described, known)
                except ValueError as error:
                    raise self._folder.unusable(layout.CONTROL, error) from error
            self._known = sequence, known
        return known


class Tables:
    """The tables in some descriptions, mapped at their first use. Versions with equal descriptions share them."""

    def __init__(self, folder: Folder, described: bytes = b"", before: "Tables | None" = None) -> None:
        """Parse the descriptions, and keep the mapped files of the tables `before` that these also have."""
        self.folder, self.described = folder, described
        tables = np.frombuffer(described, layout.TABLE)
        self._specs: dict[str, TableSpec] = {(spec := layout.spec_of(each)).name: spec for each in tables}
        self._descriptions: dict[str, Any] = dict(zip(self._specs, tables, strict=True))
        files = {int(each[kind]) for each in tables for kind in layout.FILES}
        mapped = before.mapped.copy() if before else {}  # Other threads may add to it meanwhile.
        self.mapped: dict[int, MappedFile] = {file: memory for file, memory in mapped.items() if file in files}
        self._arrays, self._keyed = dict[str, Values](), dict[str, KeyedRows]()

    def array(self, name: str) -> Values:
        """The rows of a table."""
        if (rows := self._arrays.get(name)) is None:
            each = self._description(name)
            spec = self._specs[name]
            rows = self._arrays[name] = self._array(each["file"], spec.dtype, (spec.rows, spec.dim))
        return rows

    def keyed(self, name: str) -> KeyedRows:
        """A table for lookups by key."""
        if (keyed := self._keyed.get(name)) is None:
            each, rows = self._description(name), self.array(name)
            if slots := int(each["index_slots"]):
                keyed = KeyedRows(KeySlots(self._array(each["index"], np.int64, (slots + 1, 2))), rows)
            else:
                keyed = KeyedRows(RowNumbers(self._array(each["there"], np.bool_, (len(rows),))), rows)
            self._keyed[name] = keyed
        return keyed

    @cached_property
    def fields(self) -> dict[str, Any]:
        """The fields of `SharedReading` that `Reading` lacks."""
        names = self._descriptions
        return {
            "tables": {name: self.array(name) for name in names},
            "keyed": {name: self.keyed(name) for name in names},
            "specs": list(self._specs.values()),
        }

    def _description(self, name: str) -> Any:
        if name not in self._descriptions:
            raise NotFound(f"no table {name!r}", detail=f"; tables: {listed(self._descriptions) or 'none'}")
        return self._descriptions[name]

    def _array(self, file: Any, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        number, needed = int(file), math.prod(shape) * np.dtype(dtype).itemsize
        name = layout.file_name(number)
        try:
            if (mapped := self.mapped.get(number)) is None:
                mapped = MappedFile(name, dir_fd=self.folder.fd)
                self.folder.check()
                self.mapped[number] = mapped
            if mapped.size < max(1, needed):
                raise ValueError(f"it has {mapped.size} bytes, its table needs {needed}")
            return mapped.array(dtype, shape)
        except (OSError, ValueError) as error:
            self.folder.check()
            raise self.folder.unusable(name, error) from error

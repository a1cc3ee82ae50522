"""Reads tables in the shared memory of a mirror, from any number of processes."""

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from deltasync.base.clock import steady_ns
from deltasync.base.decision import Decision
from deltasync.base.errors import InvalidInput, LimitReached, NotFound, ServiceUnavailable
from deltasync.base.words import duration, listed
from deltasync.client.shared import layout
from deltasync.client.shared.memory import MappedFile as Mapped
from deltasync.client.shared.memory import lock_byte, side_of
from deltasync.client.targets.keyed_table import KeyedRows, KeySlots, checked_keys
from deltasync.client.targets.keyed_target import RowNumbers
from deltasync.client.targets.numpy_target import rows_at
from deltasync.client.targets.target import Reading, TornTarget
from deltasync.core.rows import Ids, Mask, Values
from deltasync.core.tables import TableSpec
from deltasync.kernels import keys as key_kernels
from deltasync.kernels.fences import fence

T = TypeVar("T")
# The mirror has ended if it has not shown that it is alive for this long.
_ALIVE_SECONDS = 5.0
# Attempts at a lookup until a reader gives up: the mirror then writes faster than it can copy.
_MOST_TRIES = 1000
_NO_VERSION = partial(ServiceUnavailable, "the mirror has no version yet")


@dataclass(frozen=True, kw_only=True)
class SharedReading(Reading):
    """A whole version in shared memory, without a copy.

    Attributes:
        tables: [rows, dim] array by name, read-only.
        keyed: the same tables for lookups by raw id, or by row number without a map of raw ids.
        specs: their definitions.
    """

    tables: Mapping[str, Values]
    keyed: Mapping[str, KeyedRows]
    specs: Sequence[TableSpec]


class SharedReader:
    """Reads the tables of a mirror. Any thread may use it, also in processes that are forked later.

    Reading needs no lock, so no reader delays the mirror, except with `reading`.
    """

    def __init__(self, name: str, *, directory: str | Path = layout.DIRECTORY) -> None:
        """Attach to a mirror, which need not run.

        Raises:
            NotFound: there is no mirror of that name.
            InvalidInput: the files are not of a mirror, or have another layout.
            ServiceUnavailable: the files may not be read.
        """
        self.name = name
        self._folder = layout.folder_of(name, Path(directory))
        try:
            self._control = Mapped(self._folder / layout.CONTROL)
        except FileNotFoundError as error:
            raise NotFound(
                f"no mirror {name!r} in {directory}: start one with `deltasync mirror`",
                detail=_others(Path(directory)),
            ) from error
        except OSError as error:
            raise ServiceUnavailable(f"mirror {name!r} cannot be read: {error.strerror}") from error
        if self._control.size != layout.CONTROL_BYTES:
            raise InvalidInput(f"{self._folder} is not of a mirror, or of another layout")
        self._header = self._control.array(layout.HEADER)
        if (found := self._header["magic"][0]) != layout.MAGIC or self._header["layout"][0] != layout.VERSION:
            what = f"layout {self._header['layout'][0]}" if found == layout.MAGIC else "other files"
            raise InvalidInput(f"{self._folder} has {what}, this version reads layout {layout.VERSION}")
        self._sides = [_Side(self._folder, self._control, number) for number in (0, 1)]
        self._pins = threading.local()
        for each in (key_kernels.find, fence):
            each.compile()  # Now, so that no lookup waits for the compiler.

    @property
    def model(self) -> str:
        """The name of the model; empty before the first release."""
        return str(self._header["model"][0].decode())

    @property
    def readiness(self) -> Decision:
        """Whether the replica behind the mirror is ready, and why. It is not once the mirror has stopped."""
        for _ in range(_MOST_TRIES):
            sequence = int(self._header["state_sequence"][0])
            fence()
            ready, reason = bool(self._header["ready"][0]), self._header["reason"][0].decode(errors="replace")
            fence()
            if sequence % 2 == 0 and sequence == int(self._header["state_sequence"][0]):
                break
        alive = int(self._header["alive_ns"][0])
        if (ago := (steady_ns() - alive) / 1e9) < 0:  # It wrote before the host was started.
            return Decision(False, "its mirror has stopped")
        if alive and ago > _ALIVE_SECONDS:
            return Decision(
                False, f"its mirror has stopped or hangs: its last sign of life was {duration(ago)} ago"
            )
        return Decision(ready, reason)

    def version(self) -> Reading:
        """The version that is served now, without its rows."""
        return self._try(lambda side: Reading(**side.reading()))

    def lookup(self, table: str, ids: Ids) -> tuple[Values, int]:
        """Copy rows.

        Args:
            table: the name of a table.
            ids: row numbers, int64 [n], in any order.

        Returns:
            The rows, [n, dim], all of one version, zeros beyond the end of the table; and the version.

        Raises:
            NotFound: there is no such table; the message lists the tables.
            InvalidInput: the row numbers have another type or shape, or one is negative.
            ServiceUnavailable: nothing was published yet, or the mirror writes too fast.
        """
        checked_keys(ids)
        if len(ids) and ids.min() < 0:
            raise InvalidInput(f"row {ids.min()} of table {table!r}: row numbers start at 0")
        return self._try(lambda side: (rows_at(side.array(table), ids), side.version))

    def lookup_keys(self, table: str, keys: Ids) -> tuple[Values, Mask, int]:
        """Copy rows by raw id, or by row number if the model has no map of raw ids for the table.

        Args:
            table: the name of a table.
            keys: int64 [n], in any order.

        Returns:
            The rows, [n, dim], all of one version, zeros for missing keys; a mask of the existing keys; and the
            version.

        Raises:
            NotFound: there is no such table; the message lists the tables.
            InvalidInput: the keys have another type or shape.
            ServiceUnavailable: nothing was published yet, or the mirror writes too fast.
        """
        checked_keys(keys)
        return self._try(lambda side: (*side.keyed(table).lookup(keys), side.version))

    @contextmanager
    def reading(self) -> Iterator[SharedReading]:
        """A whole version without a copy, for a longer calculation such as a forward pass.

        The mirror waits for the block before it writes these rows again, up to its limit. If it could not wait any
        longer, the block ends with an error: do not use results of it. Blocks of a thread cannot be nested.

        Raises:
            ServiceUnavailable: nothing was published yet, or this process may not write `readers`.
            LimitReached: too many threads read.
            TornTarget: the mirror did not wait any longer, and the rows may be of two versions.
        """
        pin = self._pin()
        try:
            while True:
                side = self._sides[int(self._header["served"][0])]
                pin.take(side.number)
                # Only a served side is whole, so look at its sequence number last.
                still_served = int(self._header["served"][0]) == side.number
                fence()
                if (sequence := side.begin()) is not None and still_served:
                    break
            yield SharedReading(**side.reading(), tables=side.arrays(), keyed=side.all_keyed(), specs=side.specs())
            if side.is_changed_since(sequence):
                raise TornTarget(
                    "the mirror wrote over the rows, because they were read for longer than its limit: do not use "
                    "them, and read less at once, or increase the limit of the mirror"
                )
        finally:
            pin.release()

    def _try(self, read: Callable[["_Side"], T]) -> T:
        for _ in range(_MOST_TRIES):
            side = self._sides[int(self._header["served"][0])]
            fence()
            if (sequence := side.begin()) is None:
                continue
            try:
                result = read(side)
            except (NotFound, ServiceUnavailable, OSError, ValueError, IndexError):
                if side.is_changed_since(sequence):
                    continue
                raise
            if not side.is_changed_since(sequence):
                return result
        raise ServiceUnavailable(f"mirror {self.name!r} writes faster than this process can read; try again")

    def _pin(self) -> "_Pin":
        pin = getattr(self._pins, "pin", None)
        if pin is None or pin.pid != os.getpid():  # A lock belongs to this thread, and not to a forked process.
            pin = self._pins.pin = _Pin(self._folder / layout.READERS)
        return pin


def _others(directory: Path) -> str:
    prefix = layout.folder_of("", directory).name
    names = [each.name.removeprefix(prefix) for each in directory.glob(f"{prefix}*")]
    return f"; mirrors there: {listed(names) or 'none'}"


class _Side:
    """One side, as far as this process has mapped its arrays."""

    def __init__(self, folder: Path, control: Mapped, number: int) -> None:
        self.number = number
        self._folder = folder
        self._shown, self._tables = side_of(control, number)
        self._mapped = dict[int, Mapped]()
        self._known: tuple[int, dict[str, Any]] = (-1, {})  # The tables at a sequence number, by name.

    def begin(self) -> int | None:
        """The sequence number before reading; None while the side is written.

        Raises:
            ServiceUnavailable: a first copy is arriving.
        """
        sequence = int(self._shown["sequence"][0])
        fence()
        if sequence % 2 and not self.version:
            raise _NO_VERSION()
        return None if sequence % 2 else sequence

    def is_changed_since(self, sequence: int) -> bool:
        """Whether the side was written since."""
        fence()
        return int(self._shown["sequence"][0]) != sequence

    @property
    def version(self) -> int:
        """The version of its rows."""
        return int(self._shown["version"][0])

    def reading(self) -> dict[str, Any]:
        """The fields of `Reading`."""
        if not self.version:
            raise _NO_VERSION()
        return layout.reading_of(self._shown)

    def array(self, name: str) -> Values:
        """The rows of a table."""
        each = self._table(name)
        return self._array(each["file"], each["dtype"].decode(), (int(each["rows"]), int(each["dim"])))

    def arrays(self) -> dict[str, Values]:
        """The rows of all tables."""
        return {name: self.array(name) for name in self._descriptions()}

    def specs(self) -> list[TableSpec]:
        """The definitions of all tables."""
        return [layout.spec_of(each) for each in self._descriptions().values()]

    def keyed(self, name: str) -> KeyedRows:
        """A table for lookups by key."""
        each, rows = self._table(name), self.array(name)
        if slots := int(each["index_slots"]):
            return KeyedRows(KeySlots(self._array(each["index"], np.int64, (slots, 2))), rows)
        return KeyedRows(RowNumbers(self._array(each["there"], np.bool_, (len(rows),))), rows)

    def all_keyed(self) -> dict[str, KeyedRows]:
        """All tables for lookups by key."""
        return {name: self.keyed(name) for name in self._descriptions()}

    def _table(self, name: str) -> Any:
        tables = self._descriptions()
        if name not in tables:
            raise NotFound(f"no table {name!r}", detail=f"; tables: {listed(tables) or 'none'}")
        return tables[name]

    def _descriptions(self) -> dict[str, Any]:
        # Without a lock, which a forked process could get locked. Two threads may both do the work.
        sequence, known = int(self._shown["sequence"][0]), self._known
        if known[0] != sequence:
            if not self.version:
                raise _NO_VERSION()
            tables = self._tables[: int(self._shown["tables"][0])].copy()
            known = self._known = sequence, {each["name"].decode(): each for each in tables}
            files = {int(each[kind]) for each in tables for kind in ("file", "there", "index")}
            self._mapped = {file: mapped for file, mapped in list(self._mapped.items()) if file in files}
        return known[1]

    def _array(self, file: Any, dtype: Any, shape: tuple[int, ...]) -> NDArray[Any]:
        number = int(file)
        if (mapped := self._mapped.get(number)) is None:
            mapped = self._mapped[number] = Mapped(self._folder / layout.file_name(number))
        return mapped.array(dtype, shape)


class _Pin:
    """The entry of this thread in the table of readers."""

    def __init__(self, path: Path) -> None:
        self.pid = os.getpid()
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            weakref.finalize(self, os.close, self._fd)
        except OSError as error:
            raise ServiceUnavailable(
                f"{path} cannot be written ({error.strerror}), which reading a whole version needs: use lookups, "
                "or mount it writable"
            ) from error
        for number in range(layout.MOST_READERS):
            if lock_byte(self._fd, number):
                break
        else:
            raise LimitReached(f"{layout.MOST_READERS} threads read whole versions of this mirror already")
        self._offset = number * layout.READER.itemsize
        before = os.pread(self._fd, layout.READER.itemsize, self._offset)
        self._entry = np.zeros(1, layout.READER)
        if len(before) == layout.READER.itemsize:  # Else somebody has made the file shorter.
            self._entry["pins"] = np.frombuffer(before, layout.READER)["pins"]
        self._entry["pid"] = self.pid

    def take(self, side: int) -> None:
        """Pin a side."""
        self._entry["pins"] += 1
        self._entry["since_unix_ns"] = time.time_ns()
        self._write(0)  # The mirror must not see the new pin with the number of an old one.
        self._write(side + 1)
        fence()

    def release(self) -> None:
        """Release the pinned side."""
        self._write(0)

    def _write(self, side: int) -> None:
        self._entry["side"] = side
        os.pwrite(self._fd, self._entry.tobytes(), self._offset)

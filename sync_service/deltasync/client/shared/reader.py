"""Read the tables of a mirror in shared memory, from any number of processes."""

import errno
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

import numpy as np

from deltasync.base.arguments import check_name
from deltasync.base.clock import steady_ns
from deltasync.base.decision import Decision
from deltasync.base.errors import Contradiction, InvalidInput, LimitReached, NotFound, ServiceUnavailable
from deltasync.base.words import duration, listed
from deltasync.client.shared import layout
from deltasync.client.shared.mapped_side import REMOVED, Folder, MappedSide, Tables
from deltasync.client.targets.keyed_table import KeyedRows, checked_keys
from deltasync.client.targets.numpy_target import rows_at
from deltasync.client.targets.target import Reading
from deltasync.core.rows import Ids, Mask, Values
from deltasync.core.tables import TableSpec
from deltasync.kernels import keys as key_kernels
from deltasync.kernels.instructions import fence

T = TypeVar("T")
# A mirror without a heartbeat for this long has stopped or hangs.
_ALIVE_SECONDS = 5.0
_MOST_TRIES = 1000


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedReading(Reading):
    """A whole version in shared memory, without a copy.

    Attributes:
        tables: [rows, dim] array by name, read-only. Later versions in the same memory have the same object.
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

    def __init__(self, name: str, *, directory: str | Path = layout.DIRECTORY, owner: int | None = None) -> None:
        """Attach to a mirror, which need not run.

        Args:
            name: its name.
            directory: the folder that contains the mirror's folder.
            owner: id of the user that runs the mirror; None = this user. Mirrors of root are always accepted.

        Raises:
            NotFound: there is no mirror of that name.
            InvalidInput: the name is not valid; or the folder is a link, belongs to another user, is not a
                mirror's, or has another layout.
            ServiceUnavailable: this process may not read the files.
        """
        self.name = check_name("mirror", name)
        path = layout.folder_of(name, Path(directory))
        try:
            self._folder = Folder(path, os.geteuid() if owner is None else owner)
        except FileNotFoundError as error:
            raise NotFound(
                f"no mirror {name!r} in {directory}: start one with `deltasync mirror`",
                detail=_others(Path(directory)),
            ) from error
        except InvalidInput:
            raise
        except OSError as error:
            raise ServiceUnavailable(f"mirror {name!r} cannot be read: {layout.with_remedy(error)}") from error
        except ValueError as error:  # An empty file cannot be mapped.
            raise InvalidInput(f"{path} is not a mirror's folder") from error
        control = self._folder.control
        if control.size != layout.CONTROL_BYTES:
            raise InvalidInput(f"{path} is not a mirror's folder, or has another layout")
        self._header = control.array(layout.HEADER)
        if (found := self._header["magic"][0]) != layout.MAGIC or self._header["layout"][0] != layout.VERSION:
            what = f"layout {self._header['layout'][0]}" if found == layout.MAGIC else "other files"
            raise InvalidInput(f"{path} has {what}, this version reads layout {layout.VERSION}")
        self._sides = [MappedSide(self._folder, number) for number in (0, 1)]
        self._pins = threading.local()
        for each in (key_kernels.first_slots, key_kernels.find, fence):
            each.compile()  # Now, so that no lookup waits for the compiler.

    @property
    def model(self) -> str:
        """The name of the model; empty before the first release."""
        return str(self._header["model"][0].decode(errors="replace"))

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "a SharedReader cannot be copied or sent to another process: make one there, "
            f"SharedReader({self.name!r})"
        )

    @property
    def readiness(self) -> Decision:
        """Whether the replica behind the mirror is ready, and why.

        Not ready once the mirror has stopped, or its folder was moved or removed. `SharedModule.readiness` also
        checks whether a torch module can use the tables.
        """
        if self.is_removed:
            return Decision(False, REMOVED)
        for _ in range(_MOST_TRIES):
            sequence = int(self._header["state_sequence"][0])
            fence()
            ready, reason = bool(self._header["ready"][0]), self._header["reason"][0].decode(errors="replace")
            fence()
            if sequence % 2 == 0 and sequence == int(self._header["state_sequence"][0]):
                break
        alive = int(self._header["alive_ns"][0])
        ago = (steady_ns() - alive) / 1e9
        if not alive or ago < 0:  # Negative: the host has restarted since.
            return Decision(False, "its mirror has stopped")
        if ago > _ALIVE_SECONDS:
            return Decision(False, f"its mirror has stopped or hangs: its last heartbeat was {duration(ago)} ago")
        return Decision(ready, reason)

    @property
    def is_removed(self) -> bool:
        """Whether the folder was moved, removed or replaced. No new versions arrive then: attach again."""
        return self._folder.is_removed

    def version(self) -> Reading:
        """The current version, without its rows."""
        return self._try(lambda side, _: Reading(**side.fields()))

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
            ServiceUnavailable: there is no version yet, the mirror writes too fast, or its folder was removed.
            StorageFailed: a file is missing or too short.
        """
        checked_keys(ids)
        if len(ids) and ids.min() < 0:
            raise InvalidInput(f"row {ids.min()} of table {table!r}: row numbers start at 0")
        return self._try(lambda side, tables: (rows_at(tables.array(table), ids), side.version))

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
            ServiceUnavailable: there is no version yet, the mirror writes too fast, or its folder was removed.
            StorageFailed: a file is missing or too short.
        """
        checked_keys(keys)
        return self._try(lambda side, tables: (*tables.keyed(table).lookup(keys), side.version))

    @contextmanager
    def reading(self) -> Iterator[SharedReading]:
        """A whole version without a copy, for a longer calculation such as a forward pass.

        The mirror waits for the block, up to its limit, before it writes over these rows. If the block takes
        longer, it ends with `TornTarget`, even if it raised another error: discard its results.

        Raises:
            Contradiction: this thread is already in such a block.
            ServiceUnavailable: there is no version yet, this process may not write `readers`, or the mirror's
                folder was removed.
            StorageFailed: a file is missing or too short.
            LimitReached: too many threads are in such blocks.
            TornTarget: the block took longer than the mirror's limit, so its rows may be of two versions.
        """
        pin = self._pin()
        if pin.is_taken:
            raise Contradiction(
                "this thread is already in a block of reading(), and can pin one version only: use that one"
            )
        try:
            side, sequence = self._pinned(pin)
            try:
                yield SharedReading(**side.fields(), **side.tables(sequence).fields)
            except Exception as error:
                side.check(sequence, error)  # Torn rows may be the reason for any error.
                raise
            side.check(sequence)
        finally:
            pin.release()

    def _pinned(self, pin: "Pin") -> tuple[MappedSide, int]:
        """Pin the served side; return it with its sequence number."""
        for _ in range(_MOST_TRIES):
            side = self._served
            pin.take(side.number)
            # Only a served side is whole, so look at its sequence number last.
            still_served = self._served is side
            fence()
            if (sequence := side.begin()) is not None and still_served:
                return side, sequence
        raise self._too_fast()

    def _try(self, read: Callable[[MappedSide, Tables], T]) -> T:
        for _ in range(_MOST_TRIES):
            side = self._served
            fence()
            if (sequence := side.begin()) is None:
                continue
            try:
                result = read(side, side.tables(sequence))
            except Exception:
                if not side.is_changed_since(sequence):
                    raise
            else:
                if not side.is_changed_since(sequence):
                    return result
        raise self._too_fast()

    @property
    def _served(self) -> MappedSide:
        return self._sides[int(self._header["served"][0]) & 1]

    def _too_fast(self) -> ServiceUnavailable:
        return ServiceUnavailable(
            f"mirror {self.name!r} writes faster than this process can read, or is writing its only version: try "
            "again"
        )

    def _pin(self) -> "Pin":
        pin = getattr(self._pins, "pin", None)
        if pin is None or pin.is_closed:
            pin = self._pins.pin = Pin(self._folder)
        return pin


def _others(directory: Path) -> str:
    prefix = layout.folder_of("", directory).name
    names = [each.name.removeprefix(prefix) for each in directory.glob(f"{prefix}*")]
    return f"; mirrors there: {listed(names) or 'none'}"


class Pin:
    """The entry of a thread in the file `readers`; while it `is_taken`, it pins a side."""

    def __init__(self, folder: Folder) -> None:
        self.is_taken = False
        try:
            self._fd = os.open(layout.READERS, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder.fd)
        except OSError as error:
            folder.check()
            if error.errno not in (errno.EACCES, errno.EROFS):
                raise folder.unusable(layout.READERS, error) from error
            raise ServiceUnavailable(
                f"{folder.path / layout.READERS} cannot be written ({error.strerror}), which reading a whole "
                "version needs: use lookups, or mount it writable"
            ) from error
        self.close = weakref.finalize(self, os.close, self._fd)
        _PINS.add(self)
        for number in range(layout.MOST_READERS):
            if layout.lock_byte(self._fd, number):
                break
        else:
            raise LimitReached(f"{layout.MOST_READERS} threads already read whole versions of this mirror")
        self._offset = number * layout.READER.itemsize
        self._entry = np.zeros(1, layout.READER)
        self._entry["pid"] = os.getpid()

    @property
    def is_closed(self) -> bool:
        """Whether it belongs to the parent of this process."""
        return not self.close.alive

    def take(self, side: int) -> None:
        """Pin a side."""
        self.is_taken = True
        self._write(side + 1)
        fence()

    def release(self) -> None:
        """Release the side, unless this process was forked in the meantime: the pin is its parent's."""
        self.is_taken = False
        if not self.is_closed:
            self._write(0)

    def _write(self, side: int) -> None:
        self._entry["side"] = side
        os.pwrite(self._fd, self._entry.tobytes(), self._offset)


_PINS = weakref.WeakSet[Pin]()


def _close_pins() -> None:
    for each in list(_PINS):
        each.close()


# A pin ends with its process. If a forked process kept the descriptor, the lock would go on.
os.register_at_fork(after_in_child=_close_pins)

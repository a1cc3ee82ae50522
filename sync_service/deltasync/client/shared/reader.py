"""Reads tables in the shared memory of a mirror, from any number of processes."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from deltasync.base.arguments import check_name
from deltasync.base.clock import steady_ns
from deltasync.base.decision import Decision
from deltasync.base.errors import Contradiction, InvalidInput, NotFound, ServiceUnavailable
from deltasync.base.words import duration, listed
from deltasync.client.shared import layout
from deltasync.client.shared.mapped_side import REMOVED, Folder, MappedSide, Tables
from deltasync.client.shared.memory import with_remedy
from deltasync.client.shared.pin import Pin
from deltasync.client.targets.keyed_table import KeyedRows, checked_keys
from deltasync.client.targets.numpy_target import rows_at
from deltasync.client.targets.target import Reading
from deltasync.core.rows import Ids, Mask, Values
from deltasync.core.tables import TableSpec
from deltasync.kernels import keys as key_kernels
from deltasync.kernels.fences import fence

T = TypeVar("T")
# The mirror has ended if it has not shown that it is alive for this long.
_ALIVE_SECONDS = 5.0
# Attempts until a reader gives up.
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
            directory: the folder in which it is.
            owner: id of the user that runs the mirror; None = this user. Mirrors of root are always read.

        Raises:
            NotFound: there is no mirror of that name.
            InvalidInput: the name is not valid; the folder is a link, belongs to another user, or is not that of a
                mirror; or it has another layout.
            ServiceUnavailable: the files may not be read.
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
            raise ServiceUnavailable(f"mirror {name!r} cannot be read: {with_remedy(error)}") from error
        except ValueError as error:  # An empty file cannot be mapped.
            raise InvalidInput(f"{path} is not of a mirror") from error
        control = self._folder.control
        if control.size != layout.CONTROL_BYTES:
            raise InvalidInput(f"{path} is not of a mirror, or of another layout")
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

        It is not ready once the mirror has stopped, or its folder was moved or removed. Whether a torch module can
        use the tables is part of `SharedModule.readiness`.
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
        if not alive or ago < 0:  # If negative, the host has started since.
            return Decision(False, "its mirror has stopped")
        if ago > _ALIVE_SECONDS:
            return Decision(
                False, f"its mirror has stopped or hangs: its last sign of life was {duration(ago)} ago"
            )
        return Decision(ready, reason)

    @property
    def is_removed(self) -> bool:
        """Whether the folder was moved, removed or replaced: attach again, because no new versions come."""
        return self._folder.is_removed

    def version(self) -> Reading:
        """The version that is served now, without its rows."""
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
            ServiceUnavailable: nothing was published yet, the mirror writes too fast, or its folder was removed.
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
            ServiceUnavailable: nothing was published yet, the mirror writes too fast, or its folder was removed.
            StorageFailed: a file is missing or too short.
        """
        checked_keys(keys)
        return self._try(lambda side, tables: (*tables.keyed(table).lookup(keys), side.version))

    @contextmanager
    def reading(self) -> Iterator[SharedReading]:
        """A whole version without a copy, for a longer calculation such as a forward pass.

        The mirror waits for the block before it writes these rows again, up to its limit. If it could not wait any
        longer, the block ends with `TornTarget`, whatever it raised itself: do not use its results.

        Raises:
            Contradiction: this thread is in such a block already.
            ServiceUnavailable: nothing was published yet, this process may not write `readers`, or the mirror's
                folder was removed.
            StorageFailed: a file is missing or too short.
            LimitReached: too many threads read.
            TornTarget: the mirror did not wait any longer, and the rows may be of two versions.
        """
        pin = self._pin()
        if pin.is_taken:
            raise Contradiction(
                "this thread is in a block of reading() already, and has one pin: use the version of that block"
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

    def _pinned(self, pin: Pin) -> tuple[MappedSide, int]:
        """Pin the served side; returns it with its sequence number."""
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
            f"mirror {self.name!r} writes faster than this process can read, or writes the only version that it "
            "has; try again"
        )

    def _pin(self) -> Pin:
        pin = getattr(self._pins, "pin", None)
        if pin is None or pin.is_closed:
            pin = self._pins.pin = Pin(self._folder)
        return pin


def _others(directory: Path) -> str:
    prefix = layout.folder_of("", directory).name
    names = [each.name.removeprefix(prefix) for each in directory.glob(f"{prefix}*")]
    return f"; mirrors there: {listed(names) or 'none'}"

"""The target that keeps tables in shared memory, for other processes of the host."""

import fcntl
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.base.arguments import check_name
from deltasync.base.decision import Decision
from deltasync.base.errors import Contradiction, InvalidInput, StorageFailed
from deltasync.base.words import counted
from deltasync.client.shared import layout
from deltasync.client.shared.memory import Mapping, is_locked, side_of
from deltasync.client.targets.keyed_table import KeyedRows, KeyIndex
from deltasync.client.targets.keyed_target import KeyedCopy, KeyedReading, NumberedTable, RowNumbers
from deltasync.client.targets.local import LocalTarget, Side
from deltasync.client.targets.target import Release, Written
from deltasync.core.table_form import ReplicaSpec
from deltasync.core.tables import TableSpec
from deltasync.kernels.fences import fence

# The mirror says this often that it is alive.
_ALIVE_SECONDS = 1.0
_LOOK_SECONDS = 0.002


class SharedTarget(LocalTarget["_SharedCopy", KeyedReading]):
    """Keeps tables in shared memory under a name: two sides, of which readers use one. See `layout`.

    A target of the same name and consumer continues from the rows in the memory, also after `kill -9`. Only one
    process at a time may write.
    """

    def __init__(
        self,
        name: str,
        consumer: str,
        *,
        directory: str | Path = layout.DIRECTORY,
        readable_by: str = "group",
        huge_pages: bool = False,
        longest_pin_seconds: float = 10.0,
    ) -> None:
        """Open or create the memory.

        Args:
            name: its name.
            consumer: the consumer whose replica fills it.
            directory: the folder in which it is.
            readable_by: who may read it besides this user: "owner" for nobody, "group", or "all".
            huge_pages: whether to ask the system for huge pages.
            longest_pin_seconds: how long to wait for readers of a whole version before writing over it.

        Raises:
            InvalidInput: an argument is wrong, or the folder has other files, another layout, or another consumer.
            Contradiction: another process writes it.
            StorageFailed: the files cannot be created or read.
        """
        check_name("name", name)
        modes = {"owner": 0o700, "group": 0o750, "all": 0o755}
        if readable_by not in modes:
            raise InvalidInput(f"readable_by: {readable_by!r}, expected one of {', '.join(modes)}")
        folder = layout.folder_of(name, Path(directory))
        try:
            self._memory = _Memory(folder, consumer, modes[readable_by], huge_pages, longest_pin_seconds)
            sides = [_SharedSide(number, self._memory) for number in (0, 1)]
        except OSError as error:
            raise StorageFailed(f"{folder} cannot be used: {error.strerror}") from error
        super().__init__("copies", sides)
        self._served = sides[self._memory.served]
        if self._served.reading.version:
            self._restore(sides[1 - self._memory.served], sides[self._memory.served])
        threading.Thread(target=self._memory.stay_alive, name="deltasync-shared", daemon=True).start()

    @property
    def takes_parts(self) -> bool:
        """Whether to write a first copy as it arrives."""
        return not self.position.number

    def note_readiness(self, decision: Decision) -> None:
        """Tell readers whether the replica is ready; for `SubscriberOptions.on_readiness`."""
        self._memory.note_readiness(decision)

    def apply(self, release: Release) -> Written | None:
        """Write a release; see `LocalTarget`.

        Raises:
            Contradiction: the memory has another model.
            StorageFailed: there is no room for its tables; nothing was written.
        """
        self._memory.check_model(release.model)
        if len(release.tables) > layout.MOST_TABLES:
            raise Contradiction(f"{len(release.tables)} tables, but a mirror has at most {layout.MOST_TABLES}")
        if long := [each.name for each in release.tables if len(each.name.encode()) >= layout.NAME_BYTES]:
            raise Contradiction(f"table {long[0]!r}: a mirror needs names of less than {layout.NAME_BYTES} bytes")
        try:
            return super().apply(release)
        except OSError as error:
            needed = 2 * sum(each.nbytes + each.rows for each in release.tables)
            raise StorageFailed(self._memory.no_room(needed, error)) from error

    def _serve(self, side: Side["_SharedCopy", KeyedReading]) -> None:
        super()._serve(side)
        self._memory.remove_all_but(set[int]().union(*(each.copy.files for each in self._sides)))
        if side.reading.version:  # Not while a first copy is arriving.
            self._memory.served = self._sides.index(side)

    def _restore(self, side: "_SharedSide", served: "_SharedSide") -> None:
        """Bring the other side, which may be torn or older, to the version of the served one."""
        if side.is_whole and side.reading.position == served.reading.position:
            return
        side.begin()
        side.copy.copy_from(served.copy)
        side.end(replace(served.reading, tables=side.copy.tables))

    def close(self) -> None:
        """Stop writing. The memory stays, and tells readers that its mirror has stopped."""
        self._memory.close()


class _Memory:
    """The files of a mirror, for the process that writes them."""

    def __init__(
        self, folder: Path, consumer: str, mode: int, huge_pages: bool, longest_pin_seconds: float
    ) -> None:
        self.folder = folder
        self._huge_pages = huge_pages
        self._longest_pin_seconds = longest_pin_seconds
        self._mode = mode & 0o644
        self._closed = threading.Event()
        self._state = threading.Lock()
        self._revoked = set[tuple[int, int]]()  # Pins that were overridden: the entry, and its number of the pin.
        old = os.umask(0)  # The modes of the files are those that the caller asked for.
        try:
            folder.mkdir(mode, exist_ok=True)
            self._lock()
            try:
                self._open(consumer, mode)
            except BaseException:
                os.close(self._folder_fd)
                raise
        finally:
            os.umask(old)

    def _open(self, consumer: str, mode: int) -> None:
        control, readers = self.folder / layout.CONTROL, self.folder / layout.READERS
        if not control.exists():
            self._make(readers, layout.READERS_BYTES, mode | (mode & 0o044) >> 1)  # Who may read it, may write.
            self._make(control, layout.CONTROL_BYTES, self._mode, consumer)
        self.control = Mapping(control, write=True)
        if self.control.size != layout.CONTROL_BYTES:
            raise InvalidInput(
                f"{control} is not of a mirror, or of another layout: use another name, or remove {self.folder}"
            )
        self.header = self.control.array(layout.HEADER)
        self._check(consumer)
        self._readers = Mapping(readers)  # For its descriptor only.
        self._note_alive()

    def _lock(self) -> None:
        self._folder_fd = os.open(self.folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._folder_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(self._folder_fd)
            raise Contradiction(
                f"another process writes {self.folder}: use another name, or stop that one"
            ) from error

    def _make(self, path: Path, size: int, mode: int, consumer: str | None = None) -> None:
        """Create a file of zeros, complete or not at all."""
        made = path.with_name(f"{path.name}.new")
        fd = os.open(made, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode & 0o666)
        try:
            os.posix_fallocate(fd, 0, size)  # Else a write into a full file system would kill the process.
            if consumer is not None:
                os.pwrite(fd, _new_header(consumer).tobytes(), 0)
        finally:
            os.close(fd)
        made.rename(path)

    def _check(self, consumer: str) -> None:
        header = self.header[0]
        remedy = f"use another name, or remove {self.folder}"
        if header["magic"] != layout.MAGIC:
            raise InvalidInput(f"{self.folder} is not of a mirror: {remedy}")
        if header["layout"] != layout.VERSION:
            raise InvalidInput(
                f"{self.folder} has layout {header['layout']}, this version writes {layout.VERSION}: {remedy}"
            )
        if header["consumer"].decode() != consumer:
            raise InvalidInput(
                f"{self.folder} is of consumer {header['consumer'].decode()!r}, not {consumer!r}: {remedy}"
            )

    def check_model(self, model: str) -> None:
        known = self.header["model"][0].decode()
        if known and known != model:
            raise Contradiction(
                f"{self.folder} has model {known!r}, the consumer's is {model!r}: use another name"
            )
        self.header["model"][0] = model.encode()

    @property
    def served(self) -> int:
        return int(self.header["served"][0])

    @served.setter
    def served(self, side: int) -> None:
        fence()
        self.header["served"][0] = side
        fence()

    # Arrays, each in a file.

    def allocate(self, shape: tuple[int, int], dtype: Any) -> tuple[int, NDArray[Any]]:
        """A new array of zeros, and the number of its file.

        Raises:
            OSError: there is no room.
        """
        number, size = int(self.header["next_file"][0]), max(1, int(np.prod(shape)) * np.dtype(dtype).itemsize)
        self.header["next_file"][0] += 1
        path = self.folder / layout.file_name(number)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, self._mode)
        try:
            os.fchmod(fd, self._mode)
            # Otherwise a process that writes into a full file system is killed.
            os.posix_fallocate(fd, 0, size)
        except BaseException:
            path.unlink()
            raise
        finally:
            os.close(fd)
        return number, self.open(number, shape, dtype)

    def open(self, number: int, shape: tuple[int, int], dtype: Any) -> NDArray[Any]:
        """The array in a file, to write to."""
        mapping = Mapping(self.folder / layout.file_name(number), write=True)
        if self._huge_pages:
            mapping.use_huge_pages()
        return mapping.array(dtype, shape)

    def remove_all_but(self, numbers: set[int]) -> None:
        """Remove the files of arrays that no side uses."""
        for each in self._arrays():
            if int(each.name, 16) not in numbers:
                each.unlink(missing_ok=True)

    def _arrays(self) -> list[Path]:
        others = (layout.CONTROL, layout.READERS)
        return [each for each in self.folder.iterdir() if each.name not in others and each.suffix != ".new"]

    def no_room(self, needed: int, error: OSError) -> str:
        free = shutil.disk_usage(self.folder).free
        return (
            f"{self.folder} has no room for the tables, which need {counted(needed, 'byte')} there with both "
            f"sides, and {counted(free, 'byte')} are free ({error.strerror}): give the container more shared "
            "memory (docker run --shm-size, a Kubernetes emptyDir with medium Memory), or use another directory"
        )

    # Readers.

    def wait_for_readers(self, side: int) -> None:
        """Wait until nobody reads a side any more. A reader that takes longer than the limit loses its pin."""
        ends = time.monotonic() + self._longest_pin_seconds
        while pins := [each for each in self._pins(side) if each not in self._revoked]:
            if time.monotonic() >= ends:
                self._revoked.update(pins)
                return
            time.sleep(_LOOK_SECONDS)

    def _pins(self, side: int) -> list[tuple[int, int]]:
        """The pins of a side: entries whose threads are alive, and their numbers of the pin."""
        found = os.pread(self._readers.fd, layout.READERS_BYTES, 0)
        entries = np.frombuffer(found, layout.READER, len(found) // layout.READER.itemsize)
        pinning = np.flatnonzero(entries["side"] == side + 1).tolist()
        return [(each, int(entries["pins"][each])) for each in pinning if is_locked(self._readers.fd, each)]

    # The state.

    def note_readiness(self, decision: Decision) -> None:
        with self._state:
            self.header["state_sequence"][0] |= 1  # It is odd already if a mirror was killed here.
            fence()
            self.header["ready"][0] = decision.yes
            self.header["reason"][0] = decision.reason.encode()[: layout.HEADER["reason"].itemsize - 1]
            fence()
            self.header["state_sequence"][0] += 1

    def stay_alive(self) -> None:
        """Say regularly that the mirror is alive, until it is closed."""
        while not self._closed.wait(_ALIVE_SECONDS):
            self._note_alive()

    def _note_alive(self) -> None:
        self.header["alive_unix_ns"][0] = time.time_ns()

    def close(self) -> None:
        self._closed.set()
        self.note_readiness(Decision(False, "its mirror has stopped"))
        self.header["alive_unix_ns"][0] = 0
        os.close(self._folder_fd)


def _new_header(consumer: str) -> NDArray[Any]:
    header = np.zeros(1, layout.HEADER)
    header["magic"], header["layout"], header["consumer"] = layout.MAGIC, layout.VERSION, consumer.encode()
    header["header_bytes"], header["side_bytes"] = layout.HEADER_BYTES, layout.SIDE_BYTES
    header["most_tables"], header["most_readers"] = layout.MOST_TABLES, layout.MOST_READERS
    header["next_file"] = 1
    header["reason"] = b"its mirror has just started"
    return header


class _SharedCopy(KeyedCopy):
    """One side's tables, in files."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__(self._allocated)
        self._memory = memory
        self._files = dict[int, int]()  # By the address of the array.
        self.specs: Sequence[TableSpec] = ()

    def _allocated(self, shape: tuple[int, int], dtype: Any) -> NDArray[Any]:
        number, array = self._memory.allocate(shape, dtype)
        self._files[_address(array)] = number
        return array

    def stage(self, release: Release) -> Callable[[], Written]:
        """See `KeyedCopy`."""
        write, specs = super().stage(release), release.tables

        def written() -> Written:
            self.specs = specs
            return write()

        return written

    def copy_from(self, other: "_SharedCopy") -> None:
        """Take over the rows of another copy."""
        self.by_number, self.indices = {}, {}
        for spec in other.specs:
            theirs = other.by_number[spec.name]
            ours = self._with_room(spec, None)
            ours.rows[:], ours.there[:] = theirs.rows[: spec.rows], theirs.there[: spec.rows]
            self.by_number[spec.name] = ours
            if (index := other.indices.get(spec.name)) is not None:
                slots = self._allocated(index.slots.shape, np.int64)
                slots[:] = index.slots
                self.indices[spec.name] = KeyIndex.of(slots, self._allocated)
        self._show(other.specs)

    def load(self, tables: NDArray[Any]) -> None:
        """Use the arrays of a description."""
        specs = [layout.spec_of(each) for each in tables]
        for each, spec in zip(tables, specs, strict=True):
            rows = self._opened(each["file"], (spec.rows, spec.dim), spec.dtype)
            there = self._opened(each["there"], (spec.rows, 1), np.bool_)[:, 0]
            self.by_number[spec.name] = NumberedTable(rows, there)
            if each["index_slots"]:
                slots = self._opened(each["index"], (int(each["index_slots"]), 2), np.int64)
                self.indices[spec.name] = KeyIndex.of(slots, self._allocated)
        self._show(specs)

    def _opened(self, file: Any, shape: tuple[int, int], dtype: Any) -> NDArray[Any]:
        array = self._memory.open(int(file), shape, dtype)
        self._files[_address(array)] = int(file)
        return array

    def _show(self, specs: Sequence[TableSpec]) -> None:
        self.specs = specs
        self.tables.clear()
        for name, table in self.by_number.items():
            self.tables[name] = KeyedRows(self.indices.get(name, RowNumbers(table.there)), table.rows)

    def describe(self) -> NDArray[Any]:
        """The description of its tables."""
        described = np.zeros(len(self.specs), layout.TABLE)
        for each, spec in zip(described, self.specs, strict=True):
            table, index = self.by_number[spec.name], self.indices.get(spec.name)
            each["name"], each["of"], each["kind"] = spec.name.encode(), spec.of.encode(), spec.kind.number
            each["dtype"], each["dim"], each["rows"] = spec.dtype.str.encode(), spec.dim, spec.rows
            each["row_bytes"] = table.rows.strides[0]
            each["file"], each["there"] = self._file_of(table.rows), self._file_of(table.there)
            if index is not None:
                each["index"], each["index_slots"] = self._file_of(index.slots), len(index.slots)
            if isinstance(spec, ReplicaSpec):
                each["value_type"], each["table_dim"] = spec.value_type.number, spec.table_dim
        return described

    def _file_of(self, array: NDArray[Any]) -> int:
        return self._files[_address(array)]

    def forget_others(self) -> None:
        """Forget the arrays that no table uses any more."""
        arrays = [each for table in self.by_number.values() for each in (table.rows, table.there)]
        arrays += [each.slots for each in self.indices.values()]
        self._files = {_address(each): self._file_of(each) for each in arrays}

    @property
    def files(self) -> set[int]:
        """The files of its arrays, with those of a release that is being prepared."""
        return set(self._files.values())


class _SharedSide(Side[_SharedCopy, KeyedReading]):
    """One side of the memory."""

    def __init__(self, number: int, memory: _Memory) -> None:
        self._number, self._memory = number, memory
        self._shown, self._tables = side_of(memory.control, number)
        copy, shown = _SharedCopy(memory), self._shown[0]
        reading = KeyedReading(tables=copy.tables)
        if self.is_whole and shown["version"]:
            copy.load(self._tables[: int(shown["tables"])])
            reading = replace(reading, **layout.reading_of(self._shown))
        super().__init__(copy, reading)

    @property
    def is_whole(self) -> bool:
        """Whether it was not being written when its last mirror ended."""
        return int(self._shown["sequence"][0]) % 2 == 0

    def write(self, write: Callable[[], Written | None], release: Release) -> Written | None:
        """Write a prepared release, after the readers of this side have left."""
        self.begin()
        written = super().write(write, release)
        if not release.more:
            self.end(self.reading)
        return written

    def begin(self) -> None:
        """Wait for the readers of this side, and say that it is being written."""
        self._memory.wait_for_readers(self._number)
        if self.is_whole:
            self._shown["sequence"][0] += 1
        fence()

    def end(self, reading: KeyedReading) -> None:
        """Describe the tables and the version, and say that the side is whole."""
        self.reading = reading
        described, shown = self.copy.describe(), self._shown
        self._tables[: len(described)] = described
        shown["tables"], shown["version"] = len(described), reading.version
        shown["number"], shown["seal"] = reading.position.number, reading.position.seal
        shown["history"], shown["kept"] = reading.position.history.encode(), reading.kept.encode()
        shown["step"], shown["step_end_unix_ns"] = reading.step or 0, reading.step_end_unix_ns or 0
        shown["event_time_unix_ns"] = reading.event_time_unix_ns or 0
        fence()
        shown["sequence"] += 1
        self.copy.forget_others()


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address

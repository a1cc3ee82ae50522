"""Keep tables in shared memory, for other processes of the host."""

import errno
import fcntl
import math
import os
import re
import shutil
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.base.arguments import check_name
from deltasync.base.clock import steady_ns
from deltasync.base.decision import Decision
from deltasync.base.errors import Contradiction, InvalidInput, StorageFailed
from deltasync.base.words import counted
from deltasync.client.shared import layout
from deltasync.client.shared.layout import MappedFile
from deltasync.client.targets.keyed_table import KeyedRows, KeyIndex, Places, RowNumbers
from deltasync.client.targets.keyed_target import KeyedCopy, KeyedReading, NumberedTable
from deltasync.client.targets.local import LocalTarget, Side
from deltasync.client.targets.target import Release, Written
from deltasync.core.rows import Ids, Values
from deltasync.core.table_form import ReplicaSpec
from deltasync.core.table_memory import RAM, NoTableMemory, memory_room
from deltasync.core.tables import TableSpec
from deltasync.kernels.instructions import fence

# Modes of the folder, of `readers`, and of all other files. Users who may read rows may also pin a version.
_MODES = {"owner": (0o700, 0o600, 0o600), "group": (0o750, 0o660, 0o640), "all": (0o755, 0o666, 0o644)}
_HEARTBEAT_SECONDS = 1.0
_POLL_SECONDS = 0.002  # How often the mirror checks whether readers have released a side.


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
            name: the mirror's name.
            consumer: the consumer whose replica fills it.
            directory: the folder for the mirror's folder.
            readable_by: readers besides this user: "owner" for none, "group", or "all". Readers that are attached
                already stay.
            huge_pages: ask the file system for huge pages.
            longest_pin_seconds: how long to wait for readers of a whole version before writing over it.

        Raises:
            InvalidInput: an argument is wrong, or the folder belongs to another user, has other or damaged files,
                another layout, or another consumer.
            Contradiction: another process writes to it.
            StorageFailed: the files cannot be created or read.
        """
        check_name("mirror", name)
        check_name("consumer", consumer)
        if readable_by not in _MODES:
            raise InvalidInput(f"readable_by: {readable_by!r}, expected one of {', '.join(_MODES)}")
        folder, needed = layout.folder_of(name, Path(directory)), layout.CONTROL_BYTES + layout.READERS_BYTES
        self._memory = _Memory(folder, readable_by, huge_pages, longest_pin_seconds)
        try:
            self._memory.open(consumer)
            sides = [_SharedSide(number, self._memory) for number in (0, 1)]
            needed += _bytes_of(next((side.copy.specs for side in sides if side.reading.version), ()))
            self._start(sides)
        except BaseException as error:
            self._memory.end(remove=self._memory.is_new)
            if isinstance(error, OSError):
                raise _storage_failed(folder, needed, error) from error
            raise
        threading.Thread(target=self._memory.stay_alive, name="deltasync-shared", daemon=True).start()

    def _start(self, sides: "Sequence[_SharedSide]") -> None:
        """Serve the whole version in the memory, and copy it to the other side, which may be torn or older."""
        served = sides[self._memory.served]
        if not served.reading.version:  # The mirror was killed before it served the first whole side.
            served = next((side for side in sides if side.reading.version), served)
        super().__init__("copies", sides)
        self._serve(served)
        (other,) = (side for side in sides if side is not served)
        if served.reading.version and other.reading.position != served.reading.position:
            other.begin()
            other.copy.copy_from(served.copy)
            other.end(replace(served.reading, tables=other.copy.tables))
        self._remove_unused()

    @property
    def takes_parts(self) -> bool:
        """Whether to write a first copy as it arrives: only while readers have no version."""
        return not self.newest().version

    def note_readiness(self, decision: Decision) -> None:
        """Show readers whether the replica is ready; for `SubscriberOptions.on_readiness`."""
        self._memory.note_readiness(decision)

    def apply(self, release: Release) -> Written | None:
        """Write a release; see `LocalTarget`.

        Raises:
            Contradiction: the memory has another model, or the target is closed.
            StorageFailed: there is no room for the tables, or the folder is gone; nothing was written.
        """
        self._memory.check_open()
        self._memory.check_in_place()
        self._memory.check_model(release.model)
        if len(release.tables) > layout.MOST_TABLES:
            raise Contradiction(
                f"{len(release.tables)} tables, and a mirror has at most {layout.MOST_TABLES}: follow fewer tables"
            )
        names = [name for each in release.tables for name in (each.name, each.of)]
        if long := [name for name in names if len(name.encode()) >= layout.NAME_BYTES]:
            raise Contradiction(f"table {long[0]!r}: a mirror needs names of less than {layout.NAME_BYTES} bytes")
        try:
            try:
                return super().apply(release)
            finally:
                self._remove_unused()  # This fails, too, without a free descriptor; the next release repeats it.
        except (OSError, NoTableMemory) as error:
            raise _storage_failed(self._memory.folder, _bytes_of(release.tables), error) from error

    def read(self, table: TableSpec, ids: Ids) -> Values | None:
        """Read rows; see `LocalTarget`. Subscribers verify rows all the time, so this notices a lost folder."""
        self._memory.check_in_place()
        return super().read(table, ids)

    def _serve(self, side: Side["_SharedCopy", KeyedReading]) -> None:
        if not side.unfinished:  # Not while a first copy is arriving.
            super()._serve(side)
            self._memory.served = self._sides.index(side)

    def _remove_unused(self) -> None:
        """Remove the files that no table uses any more."""
        for copy in self._copies:
            copy.forget_unused()
        self._memory.remove_all_but(set[int]().union(*(copy.files for copy in self._copies)))

    def close(self) -> None:
        """Stop writing. Readers keep the memory and see that the mirror has stopped.

        A folder without a version is removed.
        """
        self._memory.close(remove=not self.newest().version)


def _bytes_of(tables: Sequence[TableSpec]) -> int:
    """The size of both sides of tables, without indices of raw ids."""
    return 2 * sum(each.nbytes + each.rows for each in tables)


def _storage_failed(folder: Path, needed: int, error: OSError | NoTableMemory) -> StorageFailed:
    tables = f"the tables, which need {counted(needed, 'byte')} with both sides, and more for raw ids"
    if isinstance(error, NoTableMemory):
        total = room.total if (room := memory_room()) else 0
        return StorageFailed(
            f"{folder} has no memory for {tables}; the machine or the control group has {counted(total, 'byte')}: "
            "raise the mirror's memory limit (docker run --memory, resources.limits.memory in Kubernetes)"
        )
    if error.errno != errno.ENOSPC:
        return StorageFailed(f"{folder} cannot be used: {layout.with_remedy(error)}")
    total = shutil.disk_usage(folder.parent).total
    return StorageFailed(
        f"{folder} has no room for {tables}; its file system has {counted(total, 'byte')}: give the container "
        "more shared memory (docker run --shm-size, a Kubernetes emptyDir with medium Memory), or use another "
        "directory"
    )


class _Memory:
    """The files of a mirror in `folder`, for the process that writes them. `is_new`: it created the folder."""

    def __init__(self, folder: Path, readable_by: str, huge_pages: bool, longest_pin_seconds: float) -> None:
        self.folder, self.is_new = folder.absolute(), False
        self._folder_mode, self._readers_mode, self._mode = _MODES[readable_by]
        self._huge_pages = huge_pages
        self._longest_pin_seconds = longest_pin_seconds
        self._unlock: weakref.finalize[..., Any] | None = None
        self._closed = threading.Event()
        self._state = threading.Lock()
        # Entries and process ids of readers that have kept their pin longer than the limit.
        self._overridden = set[tuple[int, int]]()
        _MEMORIES.add(self)

    def open(self, consumer: str) -> None:
        """Open or create the files, as their only writer."""
        with suppress(FileExistsError):
            self.folder.mkdir(0o700)
            self.is_new = True
        try:
            self._fd = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except NotADirectoryError as error:
            raise InvalidInput(f"{self.folder} is a file or a link: use another name, or remove it") from error
        weakref.finalize(self, os.close, self._fd)
        if os.fstat(self._fd).st_uid != os.geteuid():
            raise InvalidInput(f"{self.folder} belongs to another user: use another name or directory")
        self._check_others()
        self._lock()
        os.fchmod(self._fd, self._folder_mode)
        self._make(layout.READERS, layout.READERS_BYTES, self._readers_mode)
        header = np.zeros(1, layout.HEADER)
        header["magic"], header["layout"], header["consumer"] = layout.MAGIC, layout.VERSION, consumer.encode()
        header["next_file"] = 1
        self._make(layout.CONTROL, layout.CONTROL_BYTES, self._mode, header.tobytes())
        try:
            self.control = MappedFile(layout.CONTROL, write=True, dir_fd=self._fd)
            if self.control.size != layout.CONTROL_BYTES:
                raise ValueError
        except ValueError:
            raise InvalidInput(
                f"{self.folder} is not a mirror's folder, or has another layout: use another name, or remove it"
            ) from None
        self._inode = layout.inode_of_control(self._fd)
        self.check_in_place()
        self.header = self.control.array(layout.HEADER)
        self._check(consumer)
        for each in self.numbers():
            os.chmod(layout.file_name(each), self._mode, dir_fd=self._fd)
        self._readers = os.open(layout.READERS, os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._fd)
        weakref.finalize(self, os.close, self._readers)
        # Before the heartbeat, which would make the previous mirror's readiness valid again.
        self.note_readiness(Decision(False, "its mirror has just started"))
        self._note_alive()

    def _check_others(self) -> None:
        """Check that a folder without `control` has no foreign files."""
        names = set(os.listdir(self._fd))
        if layout.CONTROL not in names and (others := sorted(names - _FILES)):
            raise InvalidInput(
                f"{self.folder} has other files, such as {others[0]!r}: use another name, or remove the folder"
            )

    def _lock(self) -> None:
        # Readers cannot open this file, so none can keep a mirror from starting.
        fd = os.open(layout.WRITER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
        self._unlock = weakref.finalize(self, os.close, fd)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self.unlock()
            raise Contradiction(
                f"another process writes to {self.folder}: stop it, or use another name"
            ) from error

    def unlock(self) -> None:
        """Release the writer's lock. If this process was forked, its parent still holds it."""
        if self._unlock:
            self._unlock()

    def end(self, *, remove: bool) -> None:
        """Release the writer's lock. With `remove`, first remove the folder if this process has the lock."""
        if remove and self._unlock and self._unlock.alive:
            arrays = {layout.file_name(each) for each in self.numbers()} if hasattr(self, "header") else set()
            for each in _FILES | arrays:
                with suppress(FileNotFoundError):
                    os.unlink(each, dir_fd=self._fd)
            with suppress(OSError):  # It may have other files.
                if layout.is_in_place(self.folder, self._fd):
                    self.folder.rmdir()
        self.unlock()

    def _make(self, name: str, size: int, mode: int, content: bytes = b"") -> None:
        """Create a file, complete or not at all, filled with zeros; or give an earlier one its mode."""
        with suppress(FileNotFoundError):
            os.chmod(name, mode, dir_fd=self._fd)
            return
        with suppress(FileNotFoundError):
            os.unlink(_made(name), dir_fd=self._fd)
        fd = os.open(_made(name), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
        try:
            os.fchmod(fd, mode)
            os.posix_fallocate(fd, 0, size)  # Else a write into a full file system would kill the process.
            os.pwrite(fd, content, 0)
        finally:
            os.close(fd)
        os.rename(_made(name), name, src_dir_fd=self._fd, dst_dir_fd=self._fd)

    def _check(self, consumer: str) -> None:
        header = self.header[0]
        remedy = f"use another name, or remove {self.folder}"
        if header["magic"] != layout.MAGIC:
            raise InvalidInput(f"{self.folder} is not a mirror's folder: {remedy}")
        if header["layout"] != layout.VERSION:
            raise InvalidInput(
                f"{self.folder} has layout {header['layout']}, this version writes {layout.VERSION}: {remedy}"
            )
        if header["consumer"] != consumer.encode():
            raise InvalidInput(
                f"{self.folder} follows consumer {header['consumer'].decode(errors='replace')!r}, not "
                f"{consumer!r}: {remedy}"
            )
        if self.served > 1:
            raise InvalidInput(f"{self.folder} is damaged (it serves side {self.served} of 0 and 1): {remedy}")

    def check_open(self) -> None:
        """Raise Contradiction if it is closed: another process may be writing."""
        if self._closed.is_set():
            raise Contradiction(f"the target of {self.folder} is closed: create another one")

    def check_model(self, model: str) -> None:
        if model:
            check_name("model", model)
        known = self.header["model"][0].decode(errors="replace")
        if known and known != model:
            raise Contradiction(
                f"{self.folder} has model {known!r}, the consumer's is {model!r}: use another mirror name"
            )
        self.header["model"][0] = model.encode()

    def check_in_place(self) -> None:
        """Raise StorageFailed if the folder was moved or removed: readers that attach would not find it."""
        if not layout.is_in_place(self.folder, self._fd, self._inode):
            raise StorageFailed(
                f"{self.folder} was moved or removed while its mirror runs: start the mirror again"
            )

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
        """A new array of zeros, and the number of its file. Without room: an OSError or NoTableMemory."""
        number, size = int(self.header["next_file"][0]), max(1, math.prod(shape) * np.dtype(dtype).itemsize)
        RAM.check(size, "an array")  # The system would kill the process.
        self.header["next_file"][0] += 1
        name = layout.file_name(number)
        fd = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=self._fd)
        try:
            os.fchmod(fd, self._mode)
            # Otherwise a process that writes into a full file system is killed.
            if self._huge_pages:
                os.ftruncate(fd, size)
            else:
                os.posix_fallocate(fd, 0, size)
        finally:
            os.close(fd)
        mapped = MappedFile(name, write=True, dir_fd=self._fd)
        if self._huge_pages:
            mapped.fill_with_huge_pages()
        return number, mapped.array(dtype, shape)

    def array(self, number: int, shape: tuple[int, int], dtype: Any) -> NDArray[Any]:
        """The array in a file, writable."""
        name = layout.file_name(number)
        try:
            return MappedFile(name, write=True, dir_fd=self._fd).array(dtype, shape)
        except (FileNotFoundError, ValueError) as error:
            raise self.damaged(name, error) from error

    def damaged(self, name: str, error: Exception) -> InvalidInput:
        """The error for a file that is missing or damaged."""
        return InvalidInput(
            f"{self.folder / name} is missing or damaged ({error}): remove the folder, and the mirror starts with "
            "a full copy"
        )

    def remove_all_but(self, numbers: set[int]) -> None:
        """Remove the files of arrays that no side uses."""
        for each in self.numbers():
            if each not in numbers:
                os.unlink(layout.file_name(each), dir_fd=self._fd)

    def numbers(self) -> set[int]:
        """The numbers of the arrays' files. The folder may have other files, too."""
        names = [each for each in os.listdir(self._fd) if re.fullmatch("[1-9a-f][0-9a-f]*", each)]
        return {number for each in names if (number := int(each, 16)) < int(self.header["next_file"][0])}

    # Readers.

    def wait_for_readers(self, side: int) -> None:
        """Wait until no reader pins a side. A reader that exceeds the limit loses its pin."""
        ends = time.monotonic() + self._longest_pin_seconds
        while pins := self._pins(side):
            if time.monotonic() >= ends:
                self._overridden |= pins
                return
            time.sleep(_POLL_SECONDS)

    def _pins(self, side: int) -> set[tuple[int, int]]:
        """The entries of living threads that pin a side, with the ids of their processes.

        An entry that has lost its pin does not count until the mirror has seen it without a pin. Otherwise a
        reader that pins again and again could delay every release by the limit.
        """
        found = os.pread(self._readers, layout.READERS_BYTES, 0)
        readers = np.frombuffer(found, layout.READER, len(found) // layout.READER.itemsize)
        entries = np.flatnonzero(readers["side"]).tolist()
        pinned = {(each, int(readers["pid"][each])) for each in entries if layout.is_locked(self._readers, each)}
        self._overridden &= pinned
        return {each for each in pinned - self._overridden if readers["side"][each[0]] == side + 1}

    # The state.

    def note_readiness(self, decision: Decision) -> None:
        with self._state:
            if not self._closed.is_set():
                self._write_readiness(decision)

    def _write_readiness(self, decision: Decision) -> None:
        self.header["state_sequence"][0] |= 1  # It is odd already if a mirror was killed here.
        fence()
        self.header["ready"][0] = decision.yes
        self.header["reason"][0] = decision.reason.encode()[: layout.HEADER["reason"].itemsize - 1]
        fence()
        self.header["state_sequence"][0] += 1

    def stay_alive(self) -> None:
        """Write heartbeats until the mirror is closed."""
        while not self._closed.wait(_HEARTBEAT_SECONDS):
            self._note_alive()

    def _note_alive(self) -> None:
        with self._state:
            if not self._closed.is_set():
                self.header["alive_ns"][0] = steady_ns()

    def close(self, *, remove: bool) -> None:
        with self._state:
            if self._closed.is_set():
                return
            self._closed.set()
            self._write_readiness(Decision(False, "its mirror has stopped"))
            self.header["alive_ns"][0] = 0
        self.end(remove=remove)


_MEMORIES = weakref.WeakSet[_Memory]()


def _unlock_all() -> None:
    for each in list(_MEMORIES):
        each.unlock()


# A mirror's lock ends with its process, even if a forked process outlives it.
os.register_at_fork(after_in_child=_unlock_all)


def _made(name: str) -> str:
    """The name of a file before it is complete."""
    return f"{name}.new"


# The files of a mirror, apart from arrays.
_FILES = {layout.CONTROL, layout.WRITER, layout.READERS, _made(layout.CONTROL), _made(layout.READERS)}


class _SharedCopy(KeyedCopy):
    """One side's tables, in files."""

    def __init__(self, memory: _Memory) -> None:
        super().__init__(self._allocated, in_place=True)
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
        """Copy all rows of another copy, into the same arrays where they fit, so that no third copy is needed."""
        theirs = other.arrays()
        kept = {
            use: array
            for use, array in self.arrays().items()
            if use in theirs and (array.shape, array.dtype) == (theirs[use].shape, theirs[use].dtype)
        }
        self._use((), {})
        self._files = {_address(each): self._file_of(each) for each in kept.values()}
        self._memory.remove_all_but(self.files | other.files)
        for use, array in theirs.items():
            if use not in kept:
                kept[use] = self._allocated(array.shape, array.dtype)
            kept[use][:] = array
        self._use(other.specs, kept)

    def load(self, tables: NDArray[Any], *, is_whole: bool) -> None:
        """Use the arrays in a description. Of a torn side, use the remaining ones, only to write into."""
        left = self._memory.numbers() | {0}
        described = [each for each in tables if is_whole or {int(each[file]) for file in layout.FILES} <= left]
        try:
            specs = [layout.spec_of(each) for each in described]
        except ValueError as error:
            raise self._memory.damaged(layout.CONTROL, error) from error
        arrays = dict[tuple[str, str], NDArray[Any]]()
        for each, spec in zip(described, specs, strict=True):
            arrays[spec.name, "rows"] = self._opened(each["file"], (spec.rows, spec.dim), spec.dtype)
            arrays[spec.name, "there"] = self._opened(each["there"], (spec.rows, 1), np.bool_)
            if each["index_slots"]:
                shape = int(each["index_slots"]) + 1, 2
                arrays[spec.name, "index"] = self._opened(each["index"], shape, np.int64)
        self._use(specs, arrays)

    def _opened(self, file: Any, shape: tuple[int, int], dtype: Any) -> NDArray[Any]:
        array = self._memory.array(int(file), shape, dtype)
        self._files[_address(array)] = int(file)
        return array

    def arrays(self) -> dict[tuple[str, str], NDArray[Any]]:
        """All arrays, two-dimensional, by table and use: "rows", "there" or "index"."""
        arrays = dict[tuple[str, str], NDArray[Any]]()
        for name, table in self.by_number.items():
            arrays[name, "rows"], arrays[name, "there"] = table.rows, table.there[:, None]
        arrays.update({(name, "index"): index.array for name, index in self.indices.items()})
        return arrays

    def _use(self, specs: Sequence[TableSpec], arrays: Mapping[tuple[str, str], NDArray[Any]]) -> None:
        self.specs = specs
        self.tables.clear()
        self.by_number, self.indices = {}, {}
        for name in [spec.name for spec in specs]:
            table = NumberedTable(arrays[name, "rows"], arrays[name, "there"][:, 0])
            self.by_number[name] = table
            places: Places = RowNumbers(table.there)
            if (array := arrays.get((name, "index"))) is not None:
                places = self.indices[name] = KeyIndex.of(array, self._allocated)
            self.tables[name] = KeyedRows(places, table.rows)

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
                each["index"], each["index_slots"] = self._file_of(index.array), len(index.slots)
            if isinstance(spec, ReplicaSpec):
                each["value_type"], each["table_dim"] = spec.value_type.number, spec.table_dim
        return described

    def _file_of(self, array: NDArray[Any]) -> int:
        return self._files[_address(array)]

    def forget_unused(self) -> None:
        """Drop the entries of arrays that no table uses any more."""
        self._files = {_address(each): self._file_of(each) for each in self.arrays().values()}

    @property
    def files(self) -> set[int]:
        """The files of its arrays, including those of a release that is being prepared."""
        return set(self._files.values())


class _SharedSide(Side[_SharedCopy, KeyedReading]):
    """One side of the memory."""

    def __init__(self, number: int, memory: _Memory) -> None:
        self._number, self._memory = number, memory
        self._shown, self._tables = layout.side_of(memory.control, number)
        copy, shown = _SharedCopy(memory), self._shown[0]
        reading = KeyedReading(tables=copy.tables)
        copy.load(self._tables[: int(shown["tables"])], is_whole=self._is_whole)
        if self._is_whole and shown["version"]:
            try:
                reading = replace(reading, **layout.reading_of(self._shown))
            except ValueError as error:
                raise memory.damaged(layout.CONTROL, error) from error
        super().__init__(copy, reading)
        self.unfinished = "" if self._is_whole else "part of a release"

    @property
    def _is_whole(self) -> bool:
        """Whether no mirror is writing it, or was killed while writing it."""
        return int(self._shown["sequence"][0]) % 2 == 0

    def write(self, write: Callable[[], Written | None], release: Release) -> Written | None:
        """Write a prepared release once readers have released this side."""
        self.begin()
        written = super().write(write, release)
        if not release.more:
            self.end(self.reading)
        return written

    def begin(self) -> None:
        """Wait for readers of this side, and mark it as being written."""
        self._memory.wait_for_readers(self._number)
        if self._is_whole:
            self._shown["sequence"][0] += 1
        fence()

    def end(self, reading: KeyedReading) -> None:
        """Describe the tables and the version, and mark the side as whole."""
        self.reading = reading
        described, shown = self.copy.describe(), self._shown
        if described.tobytes() != self._tables[: int(shown["tables"][0])].tobytes():
            shown["tables"] = 0  # If the mirror is killed here, the next one does not use a torn description.
            fence()
            self._tables[: len(described)] = described
            fence()
            shown["tables"] = len(described)
        shown["version"] = reading.version
        shown["number"], shown["seal"] = reading.position.number, reading.position.seal
        shown["history"], shown["kept"] = reading.position.history.encode(), reading.kept.encode()
        shown["step"], shown["step_end_unix_ns"] = reading.step or 0, reading.step_end_unix_ns or 0
        shown["event_time_unix_ns"] = reading.event_time_unix_ns or 0
        fence()
        shown["sequence"] += 1
        self.unfinished = ""


def _address(array: NDArray[Any]) -> int:
    address: int = array.__array_interface__["data"][0]
    return address

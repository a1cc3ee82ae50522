"""A place for checkpoint files: a folder, or object storage at a URL that fsspec supports."""

import contextlib
import hashlib
import io
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from deltasync.base.errors import InvalidInput, StorageFailed
from deltasync.base.files import advice, flush, make_folder
from deltasync.base.threads import begin_in_thread
from deltasync.checkpoints.chunks import CheckpointDamaged

T = TypeVar("T")
UNFINISHED = ".unfinished"
# Enough for the largest file at 0.5 MB/s.
DEADLINE_SECONDS = 60.0
_PIECE_BYTES = 1 << 20
# Names under which fsspec file systems list the time at which an object was written.
_TIMES = ("LastModified", "last_modified", "mtime", "updated", "modified", "created")
_MD5 = re.compile("[0-9a-f]{32}")
_ALTERED = (
    "the storage, or a proxy before it, alters what it gets: if a proxy leaves the aws-chunked framing in, set "
    "AWS_REQUEST_CHECKSUM_CALCULATION=when_required for the service, or use the storage without the proxy"
)


class PlaceFailed(StorageFailed):
    """A place of checkpoints cannot be read or written at present; retrying may help."""


@dataclass(frozen=True)
class StoredFile:
    """A file: name, size, and time of writing in seconds by the place's own clock if it has one."""

    name: str
    bytes: int
    modified: float | None


class Place:
    """Files below one URL. Any thread may use it; every method blocks.

    Methods raise `PlaceFailed` where it cannot be read or written now, and `CheckpointDamaged` for a missing file.

    A call that is not answered within the deadline fails, and its thread goes on waiting. Until that call is
    answered, all others fail at once, so that no more threads wait.

    Attributes:
        url: the URL.
        damaged: names of files that are damaged or missing, as far as this process noticed.
    """

    def __init__(
        self,
        url: str,
        settings: Mapping[str, Any] | None = None,
        *,
        deadline_seconds: float | None = DEADLINE_SECONDS,
    ) -> None:
        """Use a folder, or object storage with these settings of fsspec's file system.

        One call is answered within `deadline_seconds`, or fails.
        """
        self.url, self.damaged = url, set[str]()
        self._deadline = deadline_seconds
        self._late = dict[Future[Any], float]()  # Calls beyond their deadline, with the time at which they began.
        self._has_checksums = True  # Whether the ETags of the storage are MD5 sums, as far as this process knows.
        self._in_use, self._lock = Counter[str](), threading.Lock()
        self._folder: Path | None = Path(url)
        if "://" in url:
            try:
                import fsspec  # Services without a URL do not need it.

                # A cached one may have the endpoint of an earlier place, from a thread of the same id.
                settings = {"skip_instance_cache": True, **(settings or {})}
                self._files, self._root = fsspec.core.url_to_fs(url, **settings)
            except (ImportError, ValueError) as error:
                raise InvalidInput(f"checkpoints {url!r}: {error}: for s3:// install 'deltasync[s3]'") from error
            local = isinstance(self._files, fsspec.implementations.local.LocalFileSystem)
            self._folder = Path(self._root) if local else None

    def put(self, name: str, content: bytes | memoryview) -> None:
        """Write a file atomically and durably: after a crash it is complete or absent.

        Then compare its size, and its checksum where the storage has one.
        """
        with self._failures(name, "written"):
            self._answered(partial(self._put, name, content))
        self.damaged.discard(name)

    def _put(self, name: str, content: bytes | memoryview) -> None:
        if self._folder:
            _put_file(self._folder / name, content)
            size, remedy = (self._folder / name).stat().st_size, advice(0)
            same = size == len(content)
        else:
            self._files.pipe_file(self._path(name), content := bytes(content))
            self._files.invalidate_cache()
            entry = self._files.info(self._path(name))
            size, remedy = int(entry["size"]), _ALTERED
            same = size == len(content) and self._is_same(name, entry, content)
        if not same:
            self.damaged.add(name)
            with contextlib.suppress(Exception):  # A later process would take a file of the right size for a copy.
                self._remove(name)
            found = f"{size} bytes, {len(content)}" if size != len(content) else "other bytes than"
            raise PlaceFailed(f"checkpoints: {self._where(name)} has {found} were written: {remedy}")

    def _is_same(self, name: str, entry: Mapping[str, Any], content: bytes) -> bool:
        """Compare a checksum, if there is one. ETags of encrypted objects may be something else than MD5 sums."""
        etag = str(entry.get("ETag") or "").strip('"').lower()
        if not self._has_checksums or not _MD5.fullmatch(etag):
            return True
        if etag != hashlib.md5(content, usedforsecurity=False).hexdigest():
            if self._files.cat_file(self._path(name)) != content:
                return False
            self._has_checksums = False
        return True

    def get(self, name: str) -> bytes:
        """Read a file."""
        with self._failures(name, "read"):
            read = (self._folder / name).read_bytes if self._folder else partial(self._read_object, name)
            return self._answered(read)

    def _read_object(self, name: str) -> bytes:
        content: bytes = self._files.cat_file(self._path(name))
        return content

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        """Open a file for reading. Raises the errors of `get`."""
        if self._folder is None:
            yield io.BytesIO(self.get(name))
            return
        with self._failures(name, "read"), (self._folder / name).open("rb", buffering=0) as file:
            yield file

    def names(self, folder: str) -> list[StoredFile]:
        """The files and folders in a folder, sorted by name."""
        with self._failures(folder, "listed"):
            prefix = f"{folder}/" if folder else ""
            try:
                entries = [
                    StoredFile(prefix + name, size, modified)
                    for name, size, modified in self._answered(lambda: list(self._listed(folder)))
                ]
            except (FileNotFoundError, NotADirectoryError):
                return []
            return sorted(entries, key=lambda each: each.name)

    def remove(self, name: str) -> None:
        """Remove a file if it exists."""
        with self._failures(name, "removed"), contextlib.suppress(FileNotFoundError):
            self._answered(partial(self._remove, name))

    def _remove(self, name: str) -> None:
        if self._folder:
            (self._folder / name).unlink()
            flush((self._folder / name).parent)
        else:
            self._files.rm_file(self._path(name))

    def remove_folder(self, name: str) -> None:
        """Remove a folder if it exists and is empty. Object storage has no folders."""
        if self._folder:
            with contextlib.suppress(OSError):
                (self._folder / name).rmdir()

    @contextlib.contextmanager
    def using(self, names: Iterable[str]) -> Iterator[None]:
        """Prevent this process from removing files inside the block; `names` are file names or checkpoint ids."""
        some = list(names)
        with self._lock:
            self._in_use.update(some)
        try:
            yield
        finally:
            with self._lock:
                self._in_use.subtract(some)
                self._in_use += Counter()  # Drops names with a count of 0.

    def uses(self, name: str) -> bool:
        """Whether a file name or checkpoint id is in use."""
        return name in self._in_use

    @property
    def trouble(self) -> str:
        """For how long it has not answered; empty while it answers in time."""
        with self._lock:
            begun = min(self._late.values(), default=None)
        return f"{self.url} has not answered for {time.monotonic() - begun:.0f} s" if begun is not None else ""

    def _answered(self, call: Callable[[], T]) -> T:
        """Make a call, and wait for the answer until the deadline."""
        if self._deadline is None:
            return call()
        if not self._late:
            begun, answer = time.monotonic(), begin_in_thread(call)
            if wait([answer], self._deadline).done:
                return answer.result()
            with self._lock:
                self._late[answer] = begun
            answer.add_done_callback(self._note_answer)
        text = self.trouble or f"{self.url} answers late"  # It may have answered just now.
        raise PlaceFailed(
            f"checkpoints: {text}: check that it is reachable, and what is between it and the service"
        )

    def _note_answer(self, answer: "Future[Any]") -> None:
        with self._lock:
            self._late.pop(answer, None)

    def _where(self, name: str) -> str:
        return str(self._folder / name) if self._folder else f"{self.url.rstrip('/')}/{name}"

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"

    def _listed(self, folder: str) -> Iterator[tuple[str, int, float | None]]:
        if self._folder:
            for path in list((self._folder / folder).iterdir()):
                with contextlib.suppress(FileNotFoundError):  # It was removed or renamed.
                    yield path.name, (stat := path.stat()).st_size, stat.st_mtime
            return
        self._files.invalidate_cache()
        for each in self._files.ls(self._path(folder), detail=True):
            yield each["name"].rstrip("/").rpartition("/")[2], each["size"] or 0, _modified(each)

    @contextlib.contextmanager
    def _failures(self, name: str, done: str) -> Iterator[None]:
        """Turn the errors of a file system into one with the path or URL and a remedy."""
        where = self._where(name)
        try:
            yield
        except PlaceFailed:
            raise
        except Exception as error:
            if isinstance(error, FileNotFoundError) and done == "read":
                raise CheckpointDamaged(f"checkpoints: {where} is missing") from error
            if not self._folder:
                text = f"checkpoints: {where} cannot be {done} ({error!r}): check that the URL is reachable, "
                raise PlaceFailed(f"{text}has room and permits it") from error
            if not isinstance(error, OSError):
                raise
            # Only errors of the operating system have a number and a text of their own.
            reason, remedy = error.strerror or repr(error), advice(error.errno or 0)
            raise PlaceFailed(f"checkpoints: {where} cannot be {done}: {reason}: {remedy}") from error


def _put_file(path: Path, content: bytes | memoryview) -> None:
    make_folder(path.parent)
    made = path.with_name(path.name + UNFINISHED)
    try:
        # Each piece is synced when written, so that a cut on the same disk waits for one piece, not for the file.
        file = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DSYNC, 0o666)
        try:
            left = memoryview(content)
            while left:
                left = left[os.write(file, left[:_PIECE_BYTES]) :]
            os.fsync(file)
        finally:
            os.close(file)
        made.rename(path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    flush(path.parent)


def _modified(entry: Mapping[str, Any]) -> float | None:
    """When an object was written, if its file system reports it."""
    value = next((entry[name] for name in _TIMES if entry.get(name) is not None), None)
    if isinstance(value, str):
        with contextlib.suppress(ValueError):
            value = datetime.fromisoformat(value)
    if isinstance(value, datetime):
        return value.timestamp()
    return float(value) if isinstance(value, int | float) else None

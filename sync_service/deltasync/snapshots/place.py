"""Where snapshots are: a folder, or object storage, by the URL that fsspec knows it by."""

import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec

from deltasync.core.errors import InvalidInput, StorageFailed
from deltasync.snapshots.manifest import SnapshotDamaged


@dataclass(frozen=True)
class Stored:
    """An object: its name, its bytes."""

    name: str
    bytes: int


class SnapshotPlace:
    """Objects below one URL. Every method blocks; any thread.

    Attributes:
        url: that one.
        read: told of what was read: an object's name, from which byte, how many.
    """

    def __init__(self, url: str, settings: Mapping[str, Any] | None = None) -> None:
        """`settings` are those of the file system, as fsspec names them: endpoint_url and the like.

        Raises:
            InvalidInput: there is no file system for such a URL.
        """
        try:
            self._files, self._root = fsspec.core.url_to_fs(url, **(settings or {}))
        except (ImportError, ValueError) as error:
            text = f"snapshots {url!r}: {error}: for s3:// install 'deltasync[s3]'"
            raise InvalidInput(text) from error
        self.url = url
        self.read: Callable[[str, int, int], None] = lambda *_: None
        self._local = isinstance(self._files, fsspec.implementations.local.LocalFileSystem)

    def put(self, name: str, content: bytes) -> None:
        """Have an object, at once and whole, or not at all.

        Raises:
            StorageFailed: it could not be written.
        """
        with _telling(self.url, f"write {name}"):
            if self._local:
                _put_file(Path(self._path(name)), content)
            else:
                self._files.pipe_file(self._path(name), content)

    def get(self, name: str, start: int = 0, end: int | None = None) -> bytes:
        """What an object has, or a part of that.

        Raises:
            SnapshotDamaged: it is not there.
            StorageFailed: it could not be read.
        """
        with _telling(self.url, f"read {name}"):
            found: bytes = self._files.cat_file(self._path(name), start=start or None, end=end)
            self.read(name, start, len(found))
            return found

    def names(self, folder: str) -> list[Stored]:
        """The objects in a folder, sorted by name.

        Raises:
            StorageFailed: they could not be listed.
        """
        with _telling(self.url, f"list {folder}"):
            self._files.invalidate_cache()
            try:
                found = self._files.ls(self._path(folder), detail=True)
            except FileNotFoundError:
                return []
            prefix = f"{folder}/" if folder else ""
            stored = [Stored(prefix + Path(each["name"]).name, each["size"] or 0) for each in found]
            return sorted((each for each in stored if not each.name.endswith(_UNFINISHED)), key=lambda s: s.name)

    def remove(self, name: str) -> None:
        """Have an object no more; one that is gone is fine.

        Raises:
            StorageFailed: it could not be removed.
        """
        with _telling(self.url, f"remove {name}"):
            try:
                self._files.rm_file(self._path(name))
            except FileNotFoundError:
                return

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


_UNFINISHED = ".unfinished"


def _put_file(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = path.with_name(f"{path.name}.{uuid.uuid4().hex}{_UNFINISHED}")
    try:
        with made.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        made.rename(path)
    except BaseException:
        made.unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _telling:  # noqa: N801  # a context manager
    """Turns whatever a file system raises into one error that says what could not be done."""

    def __init__(self, url: str, what: str) -> None:
        self._url, self._what = url, what

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, FileNotFoundError):
            raise SnapshotDamaged(f"snapshots {self._url}: cannot {self._what}: {error!r}") from error
        if isinstance(error, Exception):
            text = f"snapshots {self._url}: cannot {self._what}: {error!r}: see to its room, and who may use it"
            raise StorageFailed(text) from error

"""A backup: snapshots of all models in a folder, which says itself when it is complete.

snapshots/...  those of the models, see `snapshots.manifest`
backup.json    written last: which snapshots these are; backup.json.new until then, from the first on
"""

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Set
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import xxhash

from deltasync.core.errors import InvalidInput, StorageFailed
from deltasync.snapshots.manifest import Manifest, Piece
from deltasync.snapshots.place import SnapshotPlace
from deltasync.storage.data_directory import BACKUP_MARKER, UNFINISHED_BACKUP
from deltasync.storage.files import flush_folder
from deltasync.storage.volume import refused

FORMAT, SNAPSHOTS = 1, "snapshots"
# What to do where something in a backup is damaged or missing.
ANOTHER = "use another backup, or take one of the service if that still runs"


@dataclass(frozen=True)
class Backup:
    """What a backup has.

    Attributes:
        manifests: the name of each model's snapshot.
        others: small records of what belongs to no model that was published.
        files: how many files it is.
        bytes: of all files.
        made_unix_ns: when it was complete, nanoseconds since 1970.
    """

    manifests: Mapping[str, str]
    others: Piece
    files: int
    bytes: int
    made_unix_ns: int


class BackupFolder:
    """A folder that a backup is made in. Blocks; any thread.

    Attributes:
        place: where its snapshots are.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.place = SnapshotPlace(str(directory / SNAPSHOTS))

    def begin(self) -> None:
        """Have nothing in it, but what says that it is not complete.

        Raises:
            InvalidInput: it has something else than what was left of an incomplete one.
            StorageFailed: it cannot be written, or another backup is being made there.
        """
        with storing(self._directory):
            self._directory.mkdir(parents=True, exist_ok=True)
            self._marker = (self._directory / UNFINISHED_BACKUP).open("a")
            try:
                _lock(self._marker, self._directory)
                check_for_backup(self._directory)
            except BaseException:
                self._marker.close()
                raise
            self._remove_snapshots()
            (self._directory / SNAPSHOTS).mkdir()
            flush_folder(self._directory)

    def complete(self, manifests: Mapping[str, Manifest], others: Piece, made_unix_ns: int) -> Backup:
        """Say that it is complete.

        Raises:
            StorageFailed: it cannot be written.
        """
        with storing(self._directory):
            sizes = [path.stat().st_size for path in (self._directory / SNAPSHOTS).rglob("*") if path.is_file()]
            names = {model: manifest.name for model, manifest in manifests.items()}
            backup = Backup(names, others, len(sizes), sum(sizes), made_unix_ns)
            sync_folders(self._directory)
            content = asdict(backup)
            self._marker.truncate(0)
            json.dump({"format": FORMAT, "digest": digest_of(content), "content": content}, self._marker, indent=1)
            self._marker.flush()
            os.fsync(self._marker.fileno())
            (self._directory / UNFINISHED_BACKUP).rename(self._directory / BACKUP_MARKER)
            sync_folders(self._directory)
            self._marker.close()
        return backup

    def abandon(self) -> None:
        """Have an empty folder: it may be on the service's own volume, and that be full."""
        (self._directory / BACKUP_MARKER).unlink(missing_ok=True)
        self._remove_snapshots()
        (self._directory / UNFINISHED_BACKUP).unlink(missing_ok=True)
        self._marker.close()

    def _remove_snapshots(self) -> None:
        shutil.rmtree(self._directory / SNAPSHOTS, ignore_errors=True)


def check_for_backup(directory: Path) -> None:
    """Check that a folder can take a backup, see `check_empty`: one that is not complete is replaced."""
    check_empty(directory, UNFINISHED_BACKUP, {SNAPSHOTS})


def check_empty(directory: Path, marker: str, parts: Set[str], besides: Set[str] = frozenset()) -> None:
    """Check that a folder can be filled: it is not there, is empty, or has nothing but what a process has left
    that was killed as it filled it: a `marker`, made before all of the `parts`. It may have some more `besides`.

    Raises:
        InvalidInput: it has something else, is a file, or cannot be read.
    """
    try:
        found = {each.name for each in directory.iterdir()} - besides if directory.exists() else set[str]()
    except OSError as error:
        raise InvalidInput(f"{directory} cannot be used: {error.strerror}") from error
    if found and (marker not in found or found - parts - {marker}):
        raise InvalidInput(f"{directory} has something already: name a new or an empty folder")


def read_marker(directory: Path) -> Backup:
    """What the marker of a complete backup says.

    Raises:
        StorageFailed: it is not complete, is damaged, or a later version has made it.
    """
    path = directory / BACKUP_MARKER
    if not directory.exists():
        raise StorageFailed(f"{directory}: there is no such folder")
    try:
        stored = path.read_bytes()
    except FileNotFoundError as error:
        raise StorageFailed(
            f"{directory} is no complete backup: it has no {BACKUP_MARKER}: it was broken off, or is still being "
            "made: take another one, which replaces it"
        ) from error
    except OSError as error:
        raise refused(f"{path} cannot be read", path, error) from error
    try:
        found = json.loads(stored)
        if found["format"] > FORMAT:
            text = f"{path} is of format {found['format']}, this version reads {FORMAT}: update deltasync"
            raise StorageFailed(text)
        if found["digest"] != digest_of(found["content"]):
            raise ValueError("it has another digest than is written there")
        content = found["content"]
        return Backup(**{**content, "others": Piece(**content["others"])})
    except (KeyError, TypeError, ValueError) as error:
        raise StorageFailed(f"{path} is damaged ({error!r}): {ANOTHER}") from error


def digest_of(content: Any) -> str:
    """The digest of what a marker says."""
    return xxhash.xxh3_128_hexdigest(json.dumps(content, sort_keys=True).encode())


def sync_folders(directory: Path) -> None:
    """Flush the entries of a folder and of all below it."""
    for folder in (directory, *(path for path in directory.rglob("*") if path.is_dir())):
        flush_folder(folder)


@contextmanager
def storing(directory: Path) -> Iterator[None]:
    """Turn errors of the system inside of the block into one that names the folder.

    Raises:
        StorageFailed: there was one.
    """
    try:
        yield
    except OSError as error:
        place = Path(error.filename or directory)
        raise refused(f"{directory} is not complete: {place}", place, error) from error


def _lock(marker: TextIO, directory: Path) -> None:
    """Hold a marker while its backup is being made. Where a file system has no locks, nothing is held."""
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise StorageFailed(f"{directory}: another backup is being made there: wait for its end") from error
    except OSError:
        return
    if not _is_at(marker, directory / UNFINISHED_BACKUP):  # That one has ended just now.
        raise StorageFailed(f"{directory}: another backup was being made there: try again")


def _is_at(file: TextIO, path: Path) -> bool:
    return path.exists() and os.path.samestat(os.fstat(file.fileno()), path.stat())

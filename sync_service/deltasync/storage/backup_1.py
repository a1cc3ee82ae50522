"""A backup of format 1: files of a data directory as they were, with the digest of each."""

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from deltasync.core.errors import StorageFailed
from deltasync.core.progress import Progress
from deltasync.storage.files import reserve
from deltasync.storage.log_format import check_log
from deltasync.storage.log_store import LogStore
from deltasync.storage.model_records import recorded_files, recorded_models
from deltasync.storage.records import reading, unpack_json
from deltasync.storage.table_files import SHARED, ArraySpecs, Place, offsets

_BLOCK_BYTES = 4 << 20


@dataclass(frozen=True)
class _File:
    """A file of a backup: its path below the folder, its size and the digest of what it has."""

    path: str
    bytes: int
    digest: str


@dataclass(frozen=True)
class Backup1:
    """A backup of format 1.

    Attributes:
        directory: where it is.
        files: all of its files.
        views: the id of the history of each view whose files it has, by consumer.
    """

    directory: Path
    files: tuple[_File, ...]
    views: Mapping[str, str]

    @classmethod
    def of(cls, directory: Path, content: Mapping[str, Any]) -> "Backup1":
        """The one whose marker says this."""
        files = tuple(_File(path, each["bytes"], each["digest"]) for path, each in content["files"].items())
        return cls(directory, files, content["views"])

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(each.bytes for each in self.files)

    def copy_into(self, data_dir: Path, log: Path, progress: Progress) -> None:
        """Copy its files into a data directory, those of the log into the folder `log`. Blocks.

        Raises:
            StorageFailed: a file is missing or damaged.
            OSError: one cannot be written.
        """
        for each in self.files:
            path = Path(each.path)
            target = log / path.relative_to("log") if path.is_relative_to("log") else data_dir / path
            if not (self.directory / path).exists():
                raise self._damaged(each, "is not there")
            if (found := _copy(self.directory / path, each.path, target, progress)) != each:
                same = found.bytes == each.bytes
                what = "other bytes than it had" if same else f"{found.bytes} of {each.bytes} bytes"
                raise self._damaged(each, f"has {what}")

    def complete(self, log: LogStore, data_dir: Path) -> None:
        """Complete what was copied: tables have their room, and views whose files are not there are forgotten.

        Raises:
            StorageFailed: the log is damaged.
        """
        check_log(log, data_dir / "models")
        for name, record in recorded_models(log).items():
            with reading(f"record model/{name}"):
                _fill_in(recorded_files(data_dir / "models" / name, record))
        for name, packed in log.items("view/").items():
            with reading(f"record view/{name}"):
                is_there = unpack_json(packed)["history"] == self.views.get(name)
            if not is_there:
                log.put(f"view/{name}", None).result()
                log.put(f"release/{name}", None).result()

    def _damaged(self, listed: _File, what: str) -> StorageFailed:
        return StorageFailed(f"{self.directory / listed.path} is damaged: it {what}: take another backup")


def _copy(source: Path, name: str, target: Path, progress: Progress) -> _File:
    target.parent.mkdir(parents=True, exist_ok=True)
    digest, size = xxhash.xxh3_128(), 0
    with target.open("xb") as file:
        for block in _blocks(source):
            file.write(block)
            digest.update(block)
            size += len(block)
            progress.add(len(block))
        file.flush()
        os.fsync(file.fileno())
    return _File(name, size, digest.hexdigest())


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        while block := file.read(_BLOCK_BYTES):
            yield block


def _fill_in(tables: Iterable[tuple[Place, ArraySpecs]]) -> None:
    """Make the files of tables, with zeros, that were not there when files were copied, or were shorter: of tables
    that came, or grew, after that, the log has all rows. All get the room that they are to have: on a disk that is
    full later, writing to a mapped file would end the process.
    """
    sizes = dict[Path, int]()
    for place, arrays in tables:
        for each in arrays:
            path = place.folder / each.file
            made_anew = each.derived and (place.folder / arrays[0].file).exists()
            if (place.offset is None or each.alone) and not (made_anew and not path.exists()):
                sizes[path] = each.nbytes
        if place.offset is not None:
            end = offsets((0 if each.alone else each.nbytes for each in arrays), place.offset)[-1]
            shared = place.folder / SHARED
            sizes[shared] = max(end, sizes.get(shared, 0))
    for path, size in sizes.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as file:
            reserve(file, size, str(path), path)
            os.fsync(file.fileno())

"""A new data directory of a backup, or of the newest snapshots. It begins a new epoch of every history, while the
chains of seals go on.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltasync.core.errors import StorageFailed
from deltasync.core.position import next_epoch
from deltasync.core.progress import Progress
from deltasync.service.backup_folder import (
    ANOTHER,
    SNAPSHOTS,
    check_empty,
    read_marker,
    storing,
    sync_folders,
)
from deltasync.service.snapshot_restore import make_files, write_log
from deltasync.snapshots.manifest import Manifest, Piece, SnapshotDamaged, unpack_manifest
from deltasync.snapshots.packing import read_piece, unpack_small
from deltasync.snapshots.place import SnapshotPlace
from deltasync.snapshots.reading import models_of, snapshots_of
from deltasync.storage.data_directory import (
    BACKUP_MARKER,
    RESTORE,
    UNFINISHED_BACKUP,
    UNFINISHED_LOG,
    lock_folder,
)
from deltasync.storage.files import flush_folder, for_owner_only
from deltasync.storage.lmdb_store import LmdbStore
from deltasync.storage.log_format import check_log
from deltasync.storage.log_store import LogOptions, LogStore
from deltasync.storage.model_records import recorded_models
from deltasync.storage.records import pack_json, reading, unpack_json

_LOG, _MODELS = "log", "models"
_NOTHING = Piece("", 0, 0, "")
_BEFORE = "remove {name} there, and restore the snapshot before it; or restore a backup"


@dataclass(frozen=True)
class Restored:
    """What a data directory was made of: models with their versions, and how many bytes."""

    models: Mapping[str, int]
    bytes: int


@dataclass(frozen=True)
class _Copies:
    """Snapshots of models, of a backup or not, and small records of what belongs to none of them."""

    place: SnapshotPlace
    manifests: list[Manifest]
    others: Piece
    is_backup: bool

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.manifests) + self.others.bytes

    def put_into(self, data_dir: Path, log: LogStore, progress: Progress) -> None:
        read = set[tuple[str, int]]()

        def note(name: str, start: int, size: int) -> None:
            read.add((name, start))
            progress.add(size)

        self.place.read = note
        for manifest in self.manifests:
            with _advising(ANOTHER if self.is_backup else _BEFORE.format(name=manifest.name)):
                write_log(self.place, manifest, log)
                make_files(self.place, manifest, log, data_dir / _MODELS / manifest.model)
                for piece in manifest.pieces:
                    if (piece.object, piece.start) not in read:  # What nothing was made of may be damaged, too.
                        read_piece(self.place, piece)
        if self.others.bytes:
            with _advising(ANOTHER):
                log.put_all(dict(unpack_small(read_piece(self.place, self.others)))).result()


@for_owner_only()
def restore(source: str | Path, data_dir: Path) -> Restored:
    """Make a data directory.

    Args:
        source: a backup's folder; or a folder or URL that has snapshots: of each model the newest is taken.
        data_dir: a folder to be made, an empty one, or what a restore has left that was killed. After an error it
            is empty.

    Raises:
        InvalidInput: the folder has something already, or there is no file system for such a URL.
        StorageFailed: there is no backup and no snapshot, it is not complete or damaged, the folder is in use, or
            cannot be written.
    """
    found = _found(source)
    _check(data_dir)
    with lock_folder(data_dir, "wait for its end, or name another folder"):
        _check(data_dir)
        try:
            with storing(data_dir):
                models = _restore(found, data_dir)
        except BaseException:
            for each in (_MODELS, _LOG, UNFINISHED_LOG):
                shutil.rmtree(data_dir / each, ignore_errors=True)
            (data_dir / "lock").unlink(missing_ok=True)
            raise
    return Restored(models, found.bytes)


def _found(source: str | Path) -> _Copies:
    directory, is_url = Path(source), "://" in str(source)
    if is_url or (directory.exists() and not _is_backup(directory)):
        place = SnapshotPlace(str(source))
        if models := models_of(place):
            return _Copies(place, [_newest(place, each) for each in models], _NOTHING, is_backup=False)
        if is_url:
            raise StorageFailed(f"{source} has no snapshot of any model: name what the service has as --snapshots")
    backup, place = read_marker(directory), SnapshotPlace(str(directory / SNAPSHOTS))
    with _advising(ANOTHER):
        manifests = [unpack_manifest(each, place.get(each)) for each in backup.manifests.values()]
    return _Copies(place, manifests, backup.others, is_backup=True)


def _is_backup(directory: Path) -> bool:
    return any((directory / each).exists() for each in (BACKUP_MARKER, UNFINISHED_BACKUP))


def _newest(place: SnapshotPlace, model: str) -> Manifest:
    found = snapshots_of(place, model)
    if not found.manifests:
        raise StorageFailed(f"no snapshot of model {model!r} can be used: {'; '.join(found.problems)}: {RESTORE}")
    return found.manifests[0]


@contextmanager
def _advising(remedy: str) -> Iterator[None]:
    """Add to an error about damage what to do."""
    try:
        yield
    except SnapshotDamaged as error:
        raise StorageFailed(f"{error}: {remedy}") from error


def _check(data_dir: Path) -> None:
    """Check that a folder can be filled: what a restore has left there that was killed is replaced."""
    check_empty(data_dir, UNFINISHED_LOG, {_MODELS}, besides={"lock"})


def _restore(found: _Copies, data_dir: Path) -> dict[str, int]:
    _begin(data_dir)
    progress = Progress(f"restoring {data_dir}", found.bytes, "bytes")
    log = LmdbStore(LogOptions(directory=data_dir / UNFINISHED_LOG))
    try:
        check_log(log, data_dir / _MODELS)
        found.put_into(data_dir, log, progress)
        models = begin_epoch(log)
    finally:
        log.close()
    (data_dir / UNFINISHED_LOG / "lock.mdb").unlink(missing_ok=True)
    sync_folders(data_dir)
    (data_dir / UNFINISHED_LOG).rename(data_dir / _LOG)
    sync_folders(data_dir)
    return models


def _begin(data_dir: Path) -> None:
    """Mark the folder: until its log has its own name, no service starts on it. Remove what is left there."""
    log = data_dir / UNFINISHED_LOG
    log.mkdir(exist_ok=True)
    flush_folder(data_dir)
    shutil.rmtree(data_dir / _MODELS, ignore_errors=True)
    for each in log.iterdir():
        each.unlink()
    (data_dir / _MODELS).mkdir()


def begin_epoch(log: LogStore) -> dict[str, int]:
    """Give every history the id of a new epoch; returns the newest version of each model."""
    epochs, models = dict[str, str](), dict[str, int]()
    for name in recorded_models(log):
        _change(log, f"model/{name}", epochs, "history")
        models[name] = max((record.number for record in log.read(f"seals/{name}")), default=0)
    for name in log.items("view/"):
        _change(log, f"view/{name}", epochs, "history", "model_history")
    for name in log.items("offset/"):
        _change(log, f"offset/{name}", epochs, "history", make=False)
    return models


def _change(log: LogStore, name: str, epochs: dict[str, str], *fields: str, make: bool = True) -> None:
    """Replace the histories that a small record names in these fields by those of the new epoch."""
    with reading(f"record {name}"):
        record: dict[str, Any] = unpack_json(log.items(name)[""])
        for field in fields:
            before = record[field]
            if make:
                epochs.setdefault(before, next_epoch(before))
            record[field] = epochs.get(before, before)
    log.put(name, pack_json(record)).result()

"""A new data directory of a backup. It begins a new epoch of every history, while the chains of seals go on."""

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from deltasync.core.errors import StorageFailed
from deltasync.core.position import next_epoch
from deltasync.core.progress import Progress
from deltasync.storage.backup import (
    LOG,
    MODELS,
    Backup,
    BackupFile,
    check_empty,
    copy_file,
    read_backup,
    storing,
    sync_folders,
)
from deltasync.storage.data_directory import UNFINISHED_LOG, lock_folder
from deltasync.storage.files import flush_folder, reserve
from deltasync.storage.lmdb_store import LmdbStore
from deltasync.storage.log_format import check_log
from deltasync.storage.log_store import LogOptions, LogStore
from deltasync.storage.model_records import recorded_files, recorded_models
from deltasync.storage.records import pack_json, reading, unpack_json
from deltasync.storage.table_files import SHARED, ArraySpecs, Place, offsets


def restore(directory: Path, data_dir: Path) -> Backup:
    """Make a data directory of a backup.

    Args:
        directory: the backup.
        data_dir: a folder to be made, an empty one, or what a restore has left that was killed. After an error it
            is empty.

    Raises:
        InvalidInput: it has something already.
        StorageFailed: the backup is not complete or damaged, the folder is in use, or cannot be written.
    """
    backup = read_backup(directory)
    _check(data_dir)
    with lock_folder(data_dir, "wait for its end, or name another folder"):
        _check(data_dir)
        try:
            with storing(data_dir):
                _restore(directory, backup, data_dir)
        except BaseException:
            for each in (MODELS, LOG, UNFINISHED_LOG):
                shutil.rmtree(data_dir / each, ignore_errors=True)
            (data_dir / "lock").unlink(missing_ok=True)
            raise
    return backup


def _check(data_dir: Path) -> None:
    """Check that a folder can be filled: what a restore has left there that was killed is replaced."""
    check_empty(data_dir, UNFINISHED_LOG, {MODELS}, besides={"lock"})


def _restore(directory: Path, backup: Backup, data_dir: Path) -> None:
    progress = Progress(f"restoring {directory}", backup.bytes, "bytes")
    _begin(data_dir)
    for each in backup.files:
        path = Path(each.path)
        target = UNFINISHED_LOG / path.relative_to(LOG) if path.is_relative_to(LOG) else path
        if not (directory / path).exists():
            raise _damaged(directory, each, "is not there")
        found = copy_file(directory, path, data_dir / target, progress, check=lambda: None)
        if found != each:
            raise _damaged(directory, each, _difference(each, found))
    log = LmdbStore(LogOptions(directory=data_dir / UNFINISHED_LOG))
    try:
        check_log(log, data_dir / MODELS)
        for name, record in recorded_models(log).items():
            with reading(f"record model/{name}"):
                _fill_in(recorded_files(data_dir / MODELS / name, record))
        _begin_epoch(log, backup.views)
    finally:
        log.close()
    (data_dir / UNFINISHED_LOG / "lock.mdb").unlink(missing_ok=True)
    sync_folders(data_dir)
    (data_dir / UNFINISHED_LOG).rename(data_dir / LOG)
    sync_folders(data_dir)


def _begin(data_dir: Path) -> None:
    """Mark the folder: until its log has its own name, no service starts on it. Remove what is left there."""
    log = data_dir / UNFINISHED_LOG
    log.mkdir(exist_ok=True)
    flush_folder(data_dir)
    shutil.rmtree(data_dir / MODELS, ignore_errors=True)
    for each in log.iterdir():
        each.unlink()
    (data_dir / MODELS).mkdir()


def _damaged(directory: Path, listed: BackupFile, what: str) -> StorageFailed:
    return StorageFailed(f"{directory / listed.path} is damaged: it {what}: take another backup")


def _difference(listed: BackupFile, found: BackupFile) -> str:
    same = found.bytes == listed.bytes
    return "has other bytes than it had" if same else f"has {found.bytes} of {listed.bytes} bytes"


def _begin_epoch(log: LogStore, views: Mapping[str, str]) -> None:
    """Give every history the id of a new epoch. Views whose files are not there are forgotten."""
    epochs = dict[str, str]()
    for name in recorded_models(log):
        _change(log, f"model/{name}", epochs, "history")
    for name, packed in log.items("view/").items():
        with reading(f"record view/{name}"):
            complete = unpack_json(packed)["history"] == views.get(name)
        if complete:
            _change(log, f"view/{name}", epochs, "history", "model_history")
        else:
            log.put(f"view/{name}", None).result()
            log.put(f"release/{name}", None).result()
    for name in log.items("offset/"):
        _change(log, f"offset/{name}", epochs, "history", make=False)


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

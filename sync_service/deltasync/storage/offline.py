"""A backup of a data directory that no service uses."""

import contextlib
from pathlib import Path

from deltasync.core.errors import InvalidInput
from deltasync.storage.backup import LOG, MODELS, Backup, check_for_backup, make_backup
from deltasync.storage.data_directory import ASK_IT, lock_data_directory
from deltasync.storage.lmdb_store import LmdbStore
from deltasync.storage.log_format import check_log
from deltasync.storage.log_store import LogOptions, LogStore
from deltasync.storage.records import reading, unpack_json


def back_up_offline(data_dir: Path, directory: Path) -> Backup:
    """Copy a data directory that no service uses; none can meanwhile.

    Raises:
        InvalidInput: it is none, or the folder has something.
        StorageFailed: a service uses it, its log is damaged, or something could not be read or written.
    """
    if not (data_dir / LOG).is_dir():
        raise InvalidInput(f"{data_dir} is no data directory: it has no folder {LOG}")
    check_for_backup(directory)
    with lock_data_directory(data_dir, ASK_IT), contextlib.closing(_opened(data_dir)) as log:
        return make_backup(data_dir, log, _views(log), directory)


def _opened(data_dir: Path) -> LmdbStore:
    log = LmdbStore(LogOptions(directory=data_dir / LOG))
    try:
        check_log(log, data_dir / MODELS)
    except BaseException:
        log.close()
        raise
    return log


def _views(log: LogStore) -> dict[str, str]:
    """The histories of all views, by consumer."""
    found = {}
    for name, record in log.items("view/").items():
        with reading(f"record view/{name}"):
            found[name] = unpack_json(record)["history"]
    return found

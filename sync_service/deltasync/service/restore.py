"""A new data directory from a backup, or from a place that has checkpoints.

It begins a new epoch of every history, while the chains of seals go on. The log is written under another name, and
gets its own last: until then no service starts on the directory.
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deltasync.base.errors import InvalidInput, StorageFailed
from deltasync.base.files import flush_folder
from deltasync.checkpoints.chunks import CheckpointDamaged
from deltasync.checkpoints.manifest import Manifest, unpack_manifest
from deltasync.checkpoints.place import Place
from deltasync.checkpoints.store import CheckpointStore, NotCopied, models_of
from deltasync.core.position import next_epoch
from deltasync.log.data_directory import CHECKPOINTS, RESTORE, UNFINISHED_LOG, for_owner_only, lock_folder
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions, LogStore
from deltasync.log.records import check_log, pack_json, reading, unpack_json
from deltasync.log.volume import refused
from deltasync.service.backup import ANOTHER, BackupPlace

_LOG = "log"
_BEFORE = "remove {name} there, and restore the checkpoint before it; or restore a backup"


@dataclass(frozen=True)
class Restored:
    """The models in a new data directory with their versions, and how many bytes were read."""

    models: Mapping[str, int]
    bytes: int


@dataclass(frozen=True)
class _Source:
    """Checkpoints of models, and small records that belong to none of them."""

    place: Place
    manifests: list[Manifest]
    others: Mapping[str, bytes]
    is_backup: bool

    def remedy(self, manifest: Manifest) -> str:
        return ANOTHER if self.is_backup else _BEFORE.format(name=manifest.name)


@for_owner_only()
def restore(url: str | Path, data_dir: Path) -> Restored:
    """Make a data directory.

    Args:
        url: a backup; or a folder or URL that has checkpoints, of which the newest of each model is taken.
        data_dir: a new or an empty folder, or what a restore has left that was killed. After an error it is empty.

    Raises:
        InvalidInput: the folder has something already, or there is no file system for such a URL.
        StorageFailed: the place has no backup and no checkpoint, or an incomplete or damaged one; or the folder is
            in use, or cannot be written.
    """
    found = _source(str(url))
    _check_target(data_dir)
    with lock_folder(data_dir, "wait for its end, or name another folder"):
        _check_target(data_dir)
        try:
            with _writing(data_dir):
                _restore(found, data_dir)
        except BaseException:
            for each in (CHECKPOINTS, _LOG, UNFINISHED_LOG):
                shutil.rmtree(data_dir / each, ignore_errors=True)
            (data_dir / "lock").unlink(missing_ok=True)
            raise
    return Restored(
        {each.model: each.version for each in found.manifests}, sum(each.bytes for each in found.manifests)
    )


def _source(url: str) -> _Source:
    backup = BackupPlace(url)
    if marker := backup.read():
        manifests = []
        for name in marker.manifests.values():
            with _advising(ANOTHER):
                manifests.append(unpack_manifest(name, backup.checkpoints.get(name)))
        others = {name: value.encode("latin-1") for name, value in marker.others.items()}
        return _Source(backup.checkpoints, manifests, others, is_backup=True)
    place = Place(url)
    if models := models_of(place):
        return _Source(place, [_newest(place, each) for each in models], {}, is_backup=False)
    raise StorageFailed(f"{url} has neither a backup nor a checkpoint of any model: name what --checkpoints names")


def _newest(place: Place, model: str) -> Manifest:
    found = CheckpointStore(model, place).manifests()
    if not found.manifests or found.unreachable:
        why = "; ".join([*found.problems, *found.unreachable])
        raise StorageFailed(f"no checkpoint of model {model!r} can be used: {why}: {RESTORE}")
    return found.manifests[0]


@contextmanager
def _advising(remedy: str) -> Iterator[None]:
    """Add what to do to an error about damage."""
    try:
        yield
    except NotCopied as error:
        advice = f": {remedy}" if isinstance(error.__cause__, CheckpointDamaged) else ""
        raise StorageFailed(f"{error.__cause__}{advice}") from error
    except CheckpointDamaged as error:
        raise StorageFailed(f"{error}: {remedy}") from error


@contextmanager
def _writing(data_dir: Path) -> Iterator[None]:
    """Turn errors of the system into one that names the folder."""
    try:
        yield
    except OSError as error:
        place = Path(error.filename or data_dir)
        raise refused(f"{data_dir} is not complete: {place}", place, error) from error


def _check_target(data_dir: Path) -> None:
    """Check that a folder can be filled: what a restore has left there that was killed is replaced.

    Raises:
        InvalidInput: it has something else, is a file, or cannot be read.
    """
    try:
        found = {each.name for each in data_dir.iterdir()} - {"lock"} if data_dir.exists() else set[str]()
    except OSError as error:
        raise InvalidInput(f"{data_dir} cannot be used: {error.strerror}") from error
    if found and (UNFINISHED_LOG not in found or found - {UNFINISHED_LOG, CHECKPOINTS}):
        raise InvalidInput(f"{data_dir} has something already: name a new or an empty folder")


def _restore(found: _Source, data_dir: Path) -> None:
    unfinished = data_dir / UNFINISHED_LOG
    unfinished.mkdir(exist_ok=True)  # First: until the log has its own name, no service starts on the folder.
    flush_folder(data_dir)
    shutil.rmtree(data_dir / CHECKPOINTS, ignore_errors=True)
    for each in unfinished.iterdir():
        each.unlink()
    place = Place(str(data_dir / CHECKPOINTS))
    log = LmdbStore(LogOptions(directory=unfinished))
    try:
        check_log(log, data_dir / CHECKPOINTS)
        for manifest in found.manifests:
            with _advising(found.remedy(manifest)):
                _restore_model(found.place, manifest, place, log)
        log.put_all(found.others).result()
    finally:
        log.close()
    (unfinished / "lock.mdb").unlink(missing_ok=True)
    flush_folder(unfinished)
    unfinished.rename(data_dir / _LOG)
    flush_folder(data_dir)


def _restore_model(source: Place, manifest: Manifest, place: Place, log: LogStore) -> None:
    """Write what the log has of a model up to its checkpoint, and copy that."""
    store, model = CheckpointStore(manifest.model, source), manifest.model
    last = {f"seals/{model}": manifest.version} | {
        f"heads/{owner}": state["head"]["number"] for owner, state in manifest.states.items() if state.get("head")
    }
    writes = [
        log.append(stream, number, part, index, payload)
        for stream, number, part, index, payload in store.records(manifest)
        if number <= last.get(stream, 0)  # Some are newer than the checkpoint.
    ]
    small, epochs = _of_next_epoch(manifest)
    for write in (*writes, log.put_all(small | {f"cut/{model}": b"%d" % manifest.version})):
        write.result()
    histories = {owner: epochs.get(each, each) for owner, each in manifest.histories.items()}
    store.copy(replace(manifest, histories=histories, small=small), place)


def _of_next_epoch(manifest: Manifest) -> tuple[dict[str, bytes], Mapping[str, str]]:
    """The small records of a checkpoint, with new histories; and these, by the ones before."""
    epochs, small = dict[str, str](), dict(manifest.small)

    def change(name: str, *fields: str, known: bool = False) -> None:
        with reading(f"record {name} of checkpoint {manifest.name}"):
            record: dict[str, Any] = unpack_json(small[name])
            for each in fields:
                before = record[each]
                record[each] = (
                    epochs.get(before, before) if known else epochs.setdefault(before, next_epoch(before))
                )
            if name == f"model/{manifest.model}":  # Its tables may be newer than the record.
                described = {each["name"]: each for each in record["tables"]}
                keys = [(each.key.name, each.record) for each in manifest.tables if not each.key.owner]
                record["tables"] = [described.get(table, dict(of_table)) for table, of_table in keys]
                born = {each.key.name: each.key.born for each in manifest.tables if not each.key.owner}
                record["removed"] |= {table: version for table, version in born.items() if version}
        small[name] = pack_json(record)

    change(f"model/{manifest.model}", "history")
    for each in sorted(small):
        if each.startswith("view/"):
            change(each, "history", "model_history")
    for each in sorted(small):
        if each.startswith("offset/"):
            change(each, "history", known=True)
    return small, epochs

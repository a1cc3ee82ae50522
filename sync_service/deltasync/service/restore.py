"""`deltasync restore`: makes a data directory from a backup or from checkpoints.

Every history gets a new epoch; the chains of seals continue. The log is written under a temporary name and renamed
last. Until then, no service starts on the directory.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from deltasync.base.errors import InvalidInput, StorageFailed
from deltasync.base.files import flush
from deltasync.checkpoints.chunks import CheckpointDamaged
from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.manifest import Manifest, unpack_manifest
from deltasync.checkpoints.store import CheckpointStore, NotCopied, models_of
from deltasync.core.position import next_epoch
from deltasync.log.data_directory import CHECKPOINTS, RESTORE, UNFINISHED_LOG, for_owner_only, lock_folder, writing
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions, LogStore
from deltasync.log.records import check_log, pack_json, reading, unpack_json
from deltasync.service.backup import Backup, BackupPlace, copy_followed

_LOG = "log"
_ANOTHER = "use another backup, or make a new one if the service still runs"
_BEFORE = "remove {name} there and restore again from the checkpoint before it, or restore a backup"


@dataclass(frozen=True)
class RestoreResult(Backup):
    """What was restored; `lacking` are consumers that follow a version which could not be restored, in words."""

    lacking: Sequence[str]


@dataclass(frozen=True)
class _Source:
    """Checkpoints of models, and small records that belong to no model."""

    place: Place
    manifests: list[Manifest]
    others: Mapping[str, bytes]
    remedy: str  # For damage; with the `name` of the manifest.


@for_owner_only()
def restore(url: str | Path, data_dir: Path) -> RestoreResult:
    """Make a data directory from a backup or from checkpoints."""
    source = _source(str(url))
    _check_target(data_dir)
    with lock_folder(data_dir, "wait until it ends, or choose another folder"):
        _check_target(data_dir)
        try:
            with writing(f"{data_dir} is incomplete", data_dir):
                lacking = _restore(source, data_dir)
        except BaseException:
            for each in (CHECKPOINTS, _LOG, UNFINISHED_LOG):
                shutil.rmtree(data_dir / each, ignore_errors=True)
            (data_dir / "lock").unlink(missing_ok=True)
            raise
    models = {each.model: each.version for each in source.manifests}
    return RestoreResult(models, sum(each.bytes for each in source.manifests), lacking)


def _source(url: str) -> _Source:
    backup = BackupPlace(url)
    with _advising(_ANOTHER):
        if found := backup.read():
            names, others = found
            manifests = [unpack_manifest(name, backup.checkpoints.get(name)) for name in names]
            return _Source(backup.checkpoints, manifests, others, _ANOTHER)
    place = Place(url)
    if models := models_of(place):
        return _Source(place, [_newest(place, each) for each in models], {}, _BEFORE)
    raise StorageFailed(f"{url} has neither a backup nor a checkpoint: use a backup, or the URL of --checkpoints")


def _newest(place: Place, model: str) -> Manifest:
    listing = CheckpointStore(model, place).manifests()
    if not listing.manifests or listing.unreachable:
        why = "; ".join([*listing.problems, *listing.unreachable])
        raise StorageFailed(f"no usable checkpoint of model {model!r}: {why}: {RESTORE}")
    return listing.manifests[0]


@contextmanager
def _advising(remedy: str) -> Iterator[None]:
    """Add the remedy to an error about damage."""
    try:
        yield
    except NotCopied as error:
        advice = f": {remedy}" if isinstance(error.__cause__, CheckpointDamaged) else ""
        raise StorageFailed(f"{error.__cause__}{advice}") from error
    except CheckpointDamaged as error:
        raise StorageFailed(f"{error}: {remedy}") from error


def _check_target(data_dir: Path) -> None:
    """Check that a folder is empty, or contains only the files of a killed restore."""
    try:
        names = {each.name for each in data_dir.iterdir()} - {"lock"} if data_dir.exists() else set[str]()
    except OSError as error:
        raise InvalidInput(f"{data_dir} cannot be used: {error.strerror}") from error
    if names and (UNFINISHED_LOG not in names or names - {UNFINISHED_LOG, CHECKPOINTS}):
        raise InvalidInput(f"{data_dir} is not empty: choose a new or an empty folder")


def _restore(source: _Source, data_dir: Path) -> list[str]:
    unfinished = data_dir / UNFINISHED_LOG
    unfinished.mkdir(exist_ok=True)  # First: this name keeps a service from starting on the folder.
    flush(data_dir)
    shutil.rmtree(data_dir / CHECKPOINTS, ignore_errors=True)
    for each in unfinished.iterdir():
        each.unlink()
    place = Place(str(data_dir / CHECKPOINTS))
    log, lacking = LmdbStore(LogOptions(directory=unfinished)), list[str]()
    try:
        check_log(log)
        for manifest in source.manifests:
            with _advising(source.remedy.format(name=manifest.name)):
                store = CheckpointStore(manifest.model, source.place)
                _restore_model(store, manifest, place, log)
                for consumer, version in copy_followed(store, manifest, place):
                    text = f"consumer {consumer!r} needs {version}, which {source.place.url} lacks"
                    if source.remedy == _ANOTHER:  # A backup has them all.
                        raise CheckpointDamaged(text)
                    way_out = f"let it follow another version (deltasync consumers follow {consumer} --live)"
                    lacking.append(f"{text}: {way_out}")
        log.put_all(source.others).result()
    finally:
        log.close()
    (unfinished / "lock.mdb").unlink(missing_ok=True)
    flush(unfinished)
    unfinished.rename(data_dir / _LOG)
    flush(data_dir)
    return lacking


def _restore_model(store: CheckpointStore, manifest: Manifest, place: Place, log: LogStore) -> None:
    """Write the log records of a model up to its checkpoint, and copy the checkpoint."""
    model = manifest.model
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
    """The small records of a checkpoint with new histories, and the new histories by the old ones."""
    epochs, small = dict[str, str](), dict(manifest.small)

    def change(name: str, *fields: str, only_renamed: bool = False) -> None:
        with reading(f"record {name} of checkpoint {manifest.name}"):
            record: dict[str, Any] = unpack_json(small[name])
            for each in fields:
                before = record[each]
                record[each] = (
                    epochs.get(before, before) if only_renamed else epochs.setdefault(before, next_epoch(before))
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
            change(each, "history", only_renamed=True)
    return small, epochs

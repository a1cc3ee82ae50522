"""Read a version of a model from its checkpoints, without a service: all rows into one file, or some rows."""

import contextlib
import logging
import os
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deltasync.base.errors import InvalidInput, NotFound, StorageFailed
from deltasync.base.files import flush
from deltasync.base.words import listed
from deltasync.checkpoints.chunks import CheckpointDamaged
from deltasync.checkpoints.file_storage import UNFINISHED, Place
from deltasync.checkpoints.kept_version import find_kept, is_number
from deltasync.checkpoints.manifest import Manifest, TableEntry
from deltasync.checkpoints.store import CheckpointStore, models_of
from deltasync.core.changes import Stamps
from deltasync.core.export_metadata import ExportMetadata
from deltasync.core.position import Position
from deltasync.core.rows import Values, row_ids
from deltasync.core.stamped_table import StampedTable
from deltasync.core.table_form import spec_of_record
from deltasync.core.tables import TableSpec

logger = logging.getLogger(__name__)

_RESERVED = "__metadata__"
_MODEL = ""  # The owner of the model's own tables.


def find_version(url: str, model: str, reference: str = "") -> tuple[CheckpointStore, Manifest]:
    """Find a checkpoint by name or number of a kept version, or by number; without a reference, the newest."""
    place = Place(url)
    if model not in (models := models_of(place)):
        raise NotFound(f"{url} has no checkpoint of model {model!r}; models there: {listed(models) or 'none'}")
    store = CheckpointStore(model, place)
    kept = store.kept() if reference else []
    with contextlib.suppress(NotFound):
        return store, store.manifest_of(find_kept(kept, model, reference).id)
    found = store.manifests()
    for problem in (*found.problems, *found.unreachable):
        logger.warning("skipped a checkpoint: %s", problem)
    for each in found.manifests:
        if not reference or is_number(reference, each.version):
            return store, each
    if not reference:
        problems = "; ".join([*found.problems, *found.unreachable])
        raise StorageFailed(f"{url}: no checkpoint can be read: {problems}")
    names = listed(each.name or str(each.version) for each in kept)
    others = ", ".join(dict.fromkeys(str(each.version) for each in found.manifests))
    raise NotFound(
        f"{url} has no version {reference!r} of model {model!r}; kept versions: {names or 'none'}; versions with "
        f"a checkpoint, newest first: {others or 'none'}"
    )


def export(store: CheckpointStore, manifest: Manifest, path: Path) -> ExportMetadata:
    """Write all tables of a version to a file, which is complete or not there. It replaces an existing file.

    Rows that are deleted or were never published are zeros. All tables are in memory at once, with 16 bytes more
    for each row.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    head = manifest.states[_MODEL]["head"]
    exported = ExportMetadata(
        model=manifest.model,
        position=Position(manifest.history, manifest.version, manifest.seal),
        step=head["step"],
        event_time_unix_ns=head.get("event_time_unix_ns"),
        tables=[spec_of_record(each.record) for each in _entries(manifest)],
    )
    if _RESERVED in {each.name for each in exported.tables}:
        raise InvalidInput(
            f"table {_RESERVED!r}: safetensors files have their metadata under this name, and nobody could read "
            "the file: rename the table in the trainer, or read its rows with `deltasync show`"
        )
    made = path.with_name(path.name + UNFINISHED)
    tables = {each.name: StampedTable(each) for each in exported.tables}
    store.load(
        manifest, [None if each.key.owner else tables[each.key.name] for each in manifest.tables], note_use=False
    )
    tensors = {name: _shaped(table) for name, table in tables.items()}
    try:
        try:
            save_file(tensors, made, exported.metadata)
            _to_disk(made)
            made.replace(path)
        finally:
            made.unlink(missing_ok=True)
        flush(path.parent)
    except (OSError, SafetensorError) as error:
        raise StorageFailed(f"{path} cannot be written: {error}: choose another folder, or make room") from error
    return exported


def _entries(manifest: Manifest) -> list[TableEntry]:
    return [each for each in manifest.tables if each.key.owner == _MODEL]


def _shaped(table: StampedTable) -> Values:
    shape = table.spec.shape
    return table.rows if shape is None else table.rows.reshape(shape)


def _to_disk(path: Path) -> None:
    """Flush a file, and give it the permissions of a new one: the library makes it private."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(0o666 & ~umask)
    with path.open("rb") as file:
        os.fsync(file.fileno())


def read_rows(
    store: CheckpointStore, manifest: Manifest, table: str, ids: ArrayLike
) -> tuple[TableSpec, Stamps, NDArray[np.generic]]:
    """Read some rows of a version: `ids` ([n]) in any order, each once. Only these are in memory.

    Return the table; the version in which each row last changed ([n], negative if it was deleted then, 0 if it was
    never published); and the values ([n, dim]).
    """
    specs = {each.key.name: spec_of_record(each.record) for each in _entries(manifest)}
    if (spec := specs.get(table)) is None:
        where = f"version {manifest.version} of model {manifest.model!r}"
        raise NotFound(f"{where} has no table {table!r}; tables: {listed(specs)}")
    numbers = row_ids(table, ids)
    if len(numbers) and not 0 <= numbers.min() <= numbers.max() < spec.rows:
        raise InvalidInput(f"table {table!r} has rows 0 to {spec.rows - 1}: no row {numbers.max()}")
    stamps, values = np.zeros(len(numbers), np.int64), np.zeros((len(numbers), spec.dim), spec.dtype)
    for entry, chunk in store.rows_of(manifest, _MODEL):
        if entry.key.name != table:
            continue
        try:
            rows = chunk.rows(spec)
        except InvalidInput as error:
            raise CheckpointDamaged(f"{manifest.name}: {error}") from error
        _, ours, theirs = np.intersect1d(numbers, rows.ids, return_indices=True)
        stamps[ours] = chunk.stamps[theirs]
        values[ours] = 0 if rows.deleted else rows.values[theirs]
    return spec, stamps, values

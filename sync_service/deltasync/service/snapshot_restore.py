"""A model's files, and if need be its log, from a snapshot."""

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from deltasync.core.table_records import delivery_of_record, spec_of_record
from deltasync.core.tables import TableSpec
from deltasync.service.snapshot_records import newest_release
from deltasync.snapshots.manifest import Manifest, Piece, SnapshotDamaged, SnapshotTable, SnapshotView
from deltasync.snapshots.packing import LogRecord, read_piece, table_blocks, unpack_records, unpack_small
from deltasync.snapshots.place import SnapshotPlace
from deltasync.storage.log_format import write_again
from deltasync.storage.log_store import LAST_NUMBER, LogStore
from deltasync.storage.mapped_table import MappedArrays, TableLayout
from deltasync.storage.model_records import TABLES_FOLDER, recorded_growth, table_record
from deltasync.storage.records import pack_json, reading, unpack_json
from deltasync.storage.table_files import TableFiles, flush, make_tables
from deltasync.views.records import view_name
from deltasync.views.table import view_arrays

_STREAMS = ("cuts", "seals", "layouts")


def seals_of(place: SnapshotPlace, manifest: Manifest) -> dict[int, int]:
    """The checksums of the seals that a snapshot has, by version.

    Raises:
        StorageFailed: a piece is missing or damaged.
    """
    with reading(f"seals of snapshot {manifest.name}"):
        return {
            number: unpack_json(payload)["checksum"]
            for piece in manifest.seals
            for _, number, _, _, payload in unpack_records(read_piece(place, piece))
        }


def write_log(place: SnapshotPlace, manifest: Manifest, log: LogStore) -> None:
    """Have a log that has what a snapshot says, and nothing else of its model. Blocks.

    Raises:
        StorageFailed: a piece is missing or damaged, or the log could not be written.
    """
    small = unpack_small(read_piece(place, manifest.small))
    records = list(
        _records(place, [*manifest.seals, *manifest.records])
    )  # All is read before anything is dropped.
    for stream in {stream for stream, *_ in records} | {f"{kind}/{manifest.model}" for kind in _STREAMS}:
        log.truncate(stream, LAST_NUMBER)
    writes = [log.append(stream, number, part, at, payload) for stream, number, part, at, payload in records]
    for write in (*writes, log.put_all(small), write_again(log)):
        write.result()


def write_missing(place: SnapshotPlace, manifest: Manifest, log: LogStore, cut: int) -> None:
    """Have in a log the rows of cuts that a snapshot has, and that were dropped from it, up to version `cut`."""
    wanted = {f"cuts/{manifest.model}", f"layouts/{manifest.model}"}
    for stream, number, part, index, payload in _records(place, manifest.records):
        if stream in wanted and (number <= cut or stream.startswith("layouts/")):
            log.append(stream, number, part, index, payload).result()


def make_files(place: SnapshotPlace, manifest: Manifest, log: LogStore, directory: Path) -> None:
    """Have the files of a snapshot in a model's folder, from which it comes back with its log. Blocks.

    Raises:
        StorageFailed: a piece is missing or damaged, there is no room, or the log could not be written.
    """
    shutil.rmtree(directory, ignore_errors=True)
    small = log.items("")
    with reading(f"record model/{manifest.model}"):
        record = unpack_json(small[f"model/{manifest.model}"])
        tables = _tables(place, manifest, record, directory / TABLES_FOLDER)
    _put(log, f"model/{manifest.model}", record | {"flushed": manifest.first, "tables": tables})
    for consumer in [name.removeprefix("consumer/") for name in small if name.startswith("consumer/")]:
        recorded, view = small.get(view_name(consumer)), manifest.views.get(consumer)
        if recorded is None:
            continue
        if view and _goes_on(unpack_json(recorded), view, newest_release(small, consumer)):
            found = _view(place, view, record, directory / "views" / consumer)
            _put(log, view_name(consumer), dict(view.record) | {"tables": found})
        else:  # What its replicas hold nobody knows.
            log.put(view_name(consumer), None).result()


def _goes_on(recorded: Mapping[str, Any], view: SnapshotView, newest: int) -> bool:
    """Whether a log has what came after a view of a snapshot."""
    same = recorded["history"] == view.record["history"]
    return bool(same and recorded["flushed"] <= view.first <= newest)


def _tables(
    place: SnapshotPlace, manifest: Manifest, record: Mapping[str, Any], folder: Path
) -> list[dict[str, Any]]:
    stored = {each.record["name"]: each for each in manifest.tables}
    removed, grown = record.get("removed", {}), recorded_growth(record)
    specs = [spec_of_record(each) for each in record["tables"]]
    layouts = [_layout(spec, stored.get(spec.name), removed.get(spec.name, 0) > manifest.first) for spec in specs]
    made = make_tables(folder, [layout.arrays() for layout, _ in layouts]) if layouts else []
    for (_, table), files in zip(layouts, made, strict=True):
        if table:
            _fill(place, table, files)
    flush(made)
    pairs = zip(specs, layouts, made, strict=True)
    return [table_record(spec, MappedArrays(layout, files), grown) for spec, (layout, _), files in pairs]


def _layout(
    spec: TableSpec, table: SnapshotTable | None, is_other: bool
) -> tuple[TableLayout, SnapshotTable | None]:
    """The layout of a table, and what a snapshot has of it; nothing where that has another of its name."""
    if table is None or is_other or (spec.dim, spec.dtype.str) != (table.record["dim"], table.record["dtype"]):
        return TableLayout.of(spec), None
    return TableLayout.of(spec, table.record["columns"]), table


def _view(
    place: SnapshotPlace, view: SnapshotView, model: Mapping[str, Any], folder: Path
) -> list[dict[str, Any]]:
    specs = {each["name"]: spec_of_record(each) for each in model["tables"]}
    arrays = [view_arrays(delivery_of_record(each.record, specs[each.record["table"]])) for each in view.tables]
    made = make_tables(folder, arrays) if arrays else []
    for table, files in zip(view.tables, made, strict=True):
        _fill(place, table, files)
    flush(made)
    return [_placed(table.record, files) for table, files in zip(view.tables, made, strict=True)]


def _placed(record: Mapping[str, Any], files: TableFiles) -> dict[str, Any]:
    offset = {} if files.place.offset is None else {"offset": files.place.offset}
    kept = {name: value for name, value in record.items() if name != "offset"}
    return kept | {"folder": files.place.folder.name} | offset


def _fill(place: SnapshotPlace, table: SnapshotTable, files: TableFiles) -> None:
    """Write what a snapshot has of a table into its files."""
    _check_arrays(table, files)
    for first, arrays in table_blocks(place, table):
        for array, rows in zip(files.arrays, arrays, strict=True):
            array[first : first + len(rows)] = rows
    files.touch(None, (1 << len(files.arrays)) - 1)


def _check_arrays(table: SnapshotTable, files: TableFiles) -> None:
    wanted = [(array.dtype, array.shape[1:]) for array in files.arrays]
    if [(np.dtype(dtype), tuple(shape)) for dtype, shape in table.arrays] != wanted or len(
        files.arrays[0]
    ) < table.rows:
        raise SnapshotDamaged(
            f"a snapshot's table {table.record.get('name', '')!r} has other arrays than it is to have"
        )


def _records(place: SnapshotPlace, pieces: Iterable[Piece]) -> Iterator[LogRecord]:
    for piece in pieces:
        yield from unpack_records(read_piece(place, piece))


def _put(log: LogStore, name: str, record: Mapping[str, Any]) -> None:
    log.put(name, pack_json(record)).result()

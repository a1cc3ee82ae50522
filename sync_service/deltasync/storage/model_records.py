"""What is written down of models: their tables, and where the arrays of these were when they were last flushed."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from deltasync.core.table_records import spec_of_record, spec_record
from deltasync.core.tables import TableSpec
from deltasync.storage.log_store import LogStore
from deltasync.storage.mapped_table import MappedArrays, TableLayout
from deltasync.storage.records import reading, unpack_json
from deltasync.storage.table_files import ArraySpecs, Place

TABLES_FOLDER = "tables"  # In the model's.
_GROWN, _COLUMNS = "grown_from", "columns"
# Where a table's arrays are, and how many of its rows, where it has moved to a larger place since the last flush.
_FOLDER, _OFFSET, _ROWS = "folder", "offset", "flushed_rows"


def recorded_models(log: LogStore) -> dict[str, Mapping[str, Any]]:
    """What is written down of each model, by its name.

    Raises:
        StorageFailed: a record is damaged.
    """
    models = {}
    for name, record in log.items("model/").items():
        with reading(f"record model/{name}"):
            models[name] = unpack_json(record)
    return models


def table_record(spec: TableSpec, mapped: MappedArrays, grown_from: Mapping[str, int]) -> dict[str, Any]:
    """The record of a table; `grown_from` is how many rows tables had before they grew."""
    grown = {_GROWN: grown_from[spec.name]} if spec.name in grown_from else {}
    return spec_record(spec) | _place_record(spec, mapped) | grown


def _place_record(spec: TableSpec, mapped: MappedArrays) -> dict[str, Any]:
    place, layout = mapped.files.place, mapped.layout
    record: dict[str, Any] = {_FOLDER: place.folder.name}
    record |= {_COLUMNS: list(layout.columns)} if len(layout.columns) > 2 else {}
    if place.offset is not None:
        record |= {_OFFSET: place.offset} | ({_ROWS: layout.spec.rows} if layout.spec.rows < spec.rows else {})
    return record


def recorded_growth(record: Mapping[str, Any]) -> dict[str, int]:
    """How many rows tables of a model had before they last grew, by name, as the model's record says."""
    return {each["name"]: each[_GROWN] for each in record["tables"] if _GROWN in each}


def flushed_layout(record: Mapping[str, Any]) -> TableLayout:
    """What arrays a table had when it was last flushed, as its record says."""
    spec = spec_of_record(record)
    return TableLayout.of(replace(spec, rows=record.get(_ROWS, spec.rows)), record.get(_COLUMNS, ()))


def recorded_place(folder: Path, record: Mapping[str, Any]) -> Place:
    """Where a table is in a folder of tables, as its record says."""
    return Place(folder / record[_FOLDER], record.get(_OFFSET))


def recorded_files(directory: Path, record: Mapping[str, Any]) -> list[tuple[Place, ArraySpecs]]:
    """Where the arrays are that a model's tables had when they were last flushed, as its record says; `directory`
    is the model's.
    """
    folder = directory / TABLES_FOLDER
    return [(recorded_place(folder, each), flushed_layout(each).arrays()) for each in record["tables"]]

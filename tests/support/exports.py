"""Files like those of `deltasync export`, made from a model in this process."""

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from torch import nn

from deltasync.core.export_metadata import ExportMetadata
from deltasync.core.position import Position
from deltasync.core.rows import Values
from deltasync.core.tables import TableSpec
from deltasync.trainer.tracking import Tracker, TrackerOptions, TrackingMode
from deltasync.trainer.tracking.tracked_model import published_tables


def rows_of(model: nn.Module) -> dict[str, Values]:
    """All rows of each table of an unsharded model."""
    options = TrackerOptions(
        consumers=["export"], mode=TrackingMode.EMBEDDING_LAST, dense=True, id_maps=True, replicas=True
    )
    tracker = Tracker(model, options)
    tracker.resync("export")
    rows = {
        table.name: np.zeros((table.rows, table.dim), table.dtype) for table in published_tables(model, dense=True)
    }
    for batch in tracker.get_delta("export").rows:
        rows[batch.table.name][batch.ids] = batch.values
    tracker.close()
    return rows


def write_export(path: Path, model: nn.Module, *more: TableSpec, step: int = 7) -> Path:
    """Write version 3 of a model; `more` are further tables, of zeros."""
    rows = rows_of(model) | {table.name: np.zeros((table.rows, table.dim), table.dtype) for table in more}
    tables = [*published_tables(model, dense=True), *more]
    exported = ExportMetadata(
        model="clicks", position=Position("history", 3, 2**63 + 5), step=step, event_time_unix_ns=99, tables=tables
    )
    shaped = {
        table.name: rows[table.name] if table.shape is None else rows[table.name].reshape(table.shape)
        for table in tables
    }
    save_file(shaped, path, exported.metadata)
    return path

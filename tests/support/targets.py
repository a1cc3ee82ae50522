"""Reads the rows of a target back."""

from deltasync.client.targets.target import ReadableTarget
from deltasync.core.rows import Ids, Values
from deltasync.core.tables import TableSpec


def read_rows(target: ReadableTarget, table: TableSpec, ids: Ids) -> Values:
    """Rows of a table that the target keeps."""
    rows = target.read(table, ids)
    assert rows is not None
    return rows

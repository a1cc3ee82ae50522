"""What is written down of tables, in the log and in checkpoints."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from deltasync.core.delivery import Delivery
from deltasync.core.mode import Mode
from deltasync.core.tables import TableKind, TableSpec
from deltasync.core.value_types import ValueType


def spec_record(spec: TableSpec) -> dict[str, Any]:
    """The record of what a table is."""
    return {
        "name": spec.name,
        "rows": spec.rows,
        "dim": spec.dim,
        "dtype": spec.dtype.str,
        "kind": spec.kind.value,
        "of": spec.of,
        "sizes": None if spec.sizes is None else list(spec.sizes),
        "aliases": list(spec.aliases),
    }


def spec_of_record(record: Mapping[str, Any]) -> TableSpec:
    """What the table is that a record describes."""
    kind = TableKind(record["kind"])
    dtype = np.dtype(record["dtype"])
    sizes, aliases = record["sizes"], tuple(record["aliases"])
    return TableSpec(
        record["name"],
        record["rows"],
        record["dim"],
        dtype,
        kind,
        record["of"],
        None if sizes is None else tuple(sizes),
        aliases,
    )


def delivery_of_record(record: Mapping[str, Any], spec: TableSpec) -> Delivery:
    """What was written down that replicas are sent of a table, which is `spec`, or was before it has grown."""
    spec = replace(spec, rows=record["rows"])
    value_type = ValueType(record["value_type"]) if record["value_type"] else None
    return Delivery(spec, value_type, Mode(record["mode"]))

"""What the service holds beside its tables, for tables of several sizes and after many cuts."""

import time
from typing import Any

import numpy as np
from rich.console import Console

from deltasync.client import Part, Publisher, PublisherOptions, RowBatch, Shard, TableSpec
from tests.bench.children import Children
from tests.bench.process import resident_bytes

SIZES, DIM, CUTS = (250_000, 500_000, 1_000_000), 64, 40
_BESIDE_BYTES = 8 + 8 + 4  # Of a row beside its values: stamp, digest and norm.


def run(console: Console) -> dict[str, Any]:
    """Measure, print and return the figures. Bytes are resident ones, file mappings included."""
    lines = [_measure(rows) for rows in SIZES]
    console.print(f"memory: service after a full push and {CUTS} cuts of a tenth of the rows, dim {DIM} fp32")
    console.print("        rows             tables    resident    the rest")
    for line in lines:
        console.print(
            f"  {line['rows']:>10,}  {line['table_bytes'] / 1e6:>12.1f} MB  "
            f"{line['resident_bytes'] / 1e6:>8.1f} MB  {line['rest_bytes'] / 1e6:>7.1f} MB"
        )
    return {"sizes": lines, "rest_bytes_max": max(line["rest_bytes"] for line in lines)}


def _measure(rows: int) -> dict[str, int]:
    table = TableSpec("bench", rows, DIM)
    with Children() as children:
        service = children.service("--consumer", "bench=bench", "--flush-bytes", str(64 << 20))
        replica = children.peer("replica", service.grpc)
        replica.read()
        options = PublisherOptions(
            service=service.grpc, model="bench", run="bench", run_started_unix_ns=time.time_ns()
        )
        with Publisher(options, [table], [Shard.whole(table)]) as publisher:
            for step in range(CUTS + 1):
                version = publisher.publish(_part(table, step)).result().number
            replica.ask(str(version))
        resident = resident_bytes(service.pid)
    held = table.nbytes + _BESIDE_BYTES * rows
    return {
        "rows": rows,
        "table_bytes": held,
        "resident_bytes": resident,
        "rest_bytes": resident - held,
    }


def _part(table: TableSpec, step: int) -> Part:
    ids = np.arange(table.rows) if step == 0 else np.arange(step % 10, table.rows, 10)
    rows = RowBatch.of_table(table, ids, np.full((len(ids), table.dim), step, np.float32))
    return Part(step=step, step_end_unix_ns=time.time_ns(), rows=[rows], full=step == 0)

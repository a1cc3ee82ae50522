"""A worker of `python -m tests.bench shared`, which answers each line on its standard input with a line.

    python -m tests.bench.shared_worker FOLDER TABLE ROWS DIM

copy                make a private copy of the table
attach              attach to the mirror in FOLDER, and read every row
memory              the memory of this process in bytes, with its part of the mirror
look WHERE SECONDS  look up rows in the `copy` or the `mirror`: the seconds that each lookup took
"""

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from tests.bench.process import own_bytes

from deltasync.base.process import keep_freed_memory
from deltasync.client import NumpyTarget, Position, Release, RowBatch, TableSpec
from deltasync.client.shared.reader import SharedReader
from deltasync.client.targets.numpy_target import rows_at
from deltasync.core.rows import Ids
from deltasync.kernels.compiled import warm

NAME = "bench"
IDS = 5_000
"""Rows of a lookup."""
_BATCHES = 64


class Worker:
    """The tables and lookups of this process."""

    def __init__(self, folder: Path, table: TableSpec) -> None:
        self._folder, self._table = folder, table
        self._target = NumpyTarget()
        generator = np.random.default_rng(os.getpid())
        self._batches = [generator.integers(0, table.rows, IDS) for _ in range(_BATCHES)]

    def copy(self) -> None:
        rows = RowBatch.of_table(
            self._table, np.arange(self._table.rows), np.ones((self._table.rows, self._table.dim), np.float32)
        )
        self._target.apply(Release(Position(NAME, 1), 1, 0, True, [self._table], [rows], version=1))

    def attach(self) -> None:
        self._reader = SharedReader(NAME, directory=self._folder)
        for some in np.array_split(np.arange(self._table.rows), max(1, self._table.rows // IDS)):
            self._reader.lookup(self._table.name, some)

    def look(self, where: str, seconds: float) -> list[float]:
        look: Callable[[Ids], object] = {"copy": self._in_copy, "mirror": self._in_mirror}[where]
        took, ends = list[float](), time.perf_counter() + seconds
        batches = itertools.cycle(self._batches)
        while (started := time.perf_counter()) < ends:
            look(next(batches))
            took.append(time.perf_counter() - started)
        return took

    def _in_copy(self, ids: Ids) -> None:
        with self._target.reading() as now:
            rows_at(now.tables[self._table.name], ids)  # Faster than NumPy's `take`.

    def _in_mirror(self, ids: Ids) -> None:
        self._reader.lookup(self._table.name, ids)


def main(folder: str, name: str, rows: str, dim: str) -> None:
    keep_freed_memory()
    warm()
    worker = Worker(Path(folder), TableSpec(name, int(rows), int(dim)))
    for line in sys.stdin:
        command, *arguments = line.split()
        answer: object = None
        if command == "look":
            answer = worker.look(arguments[0], float(arguments[1]))
        elif command == "memory":
            answer = own_bytes(os.getpid())
        else:
            {"copy": worker.copy, "attach": worker.attach}[command]()
        sys.stdout.write(json.dumps(answer) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])

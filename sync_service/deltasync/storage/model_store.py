"""Where a model is kept: files of its tables in a folder, and its part of the log.

Its streams: `cuts/MODEL` has rows, by version, rank and index; `seals/MODEL` has what makes a version visible;
`layouts/MODEL` has what ranks hold. Rows of a version without a seal are of a cut that was never finished. A seal
says how many ranks its run had: what an abandoned cut of a larger run has left is passed over.
"""

import contextlib
import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from deltasync.core.errors import StorageFailed
from deltasync.core.rows import Ids, RowBatch
from deltasync.core.seal import Seal
from deltasync.core.tables import Shard, TableSpec
from deltasync.storage.data_directory import RESTORE
from deltasync.storage.layouts import Layouts, LayoutUse
from deltasync.storage.log_store import LogStore
from deltasync.storage.mapped_table import MappedTable, remove_files
from deltasync.storage.records import (
    name_of,
    pack_json,
    pack_rows,
    reading,
    seal_of_record,
    seal_record,
    spec_of_record,
    spec_record,
    unpack_json,
    unpack_rows,
)

# Seals are kept this long after their rows, so that lag in seconds is known for old offsets too; fewer of them in
# a log that is full although it has no rows that could be dropped.
KEPT_SEALS = 100_000

_GROWN, _COLUMNS = "grown_from", "columns"


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


class ModelStore:
    """The files and records of one model. What returns no future blocks; any thread.

    Attributes:
        history: the id made when the model's log was created.
        tables: the tables, in the order they were added; a table's index is its slot. Replaced when one is added.
        grown_from: how many rows were published of a table when it grew, by its name.
        flushed: the version up to which the tables' files need no record of the log.
    """

    def __init__(self, log: LogStore, model: str, directory: Path) -> None:
        self._log = log
        self._model = model
        self._cuts, self._seals = f"cuts/{model}", f"seals/{model}"
        self._layouts = Layouts(log, model)
        self._folder = directory / "tables"
        self._flushing = threading.Lock()
        self._describing = threading.Lock()  # So that a flush and a new table do not write over each other.
        self.history = uuid.uuid4().hex
        self.tables: list[MappedTable] = []
        self.grown_from: dict[str, int] = {}
        self._specs: dict[str, TableSpec] = {}  # As they are written down.
        self._columns: dict[str, Sequence[int]] = {}  # Likewise: where segments of a table's columns end.
        self.flushed = 0
        self._kept_seals = KEPT_SEALS
        self._described_flushed = 0  # The one that is written down, which is ahead until the log is cut.

    def recover(self, record: Mapping[str, Any]) -> None:
        """Come back as of the last flush.

        Raises:
            StorageFailed: a file is missing, or of another size, or a record is damaged.
        """
        with reading(f"record model/{self._model}"):
            self.history, self.flushed = record["history"], record["flushed"]
            specs = [spec_of_record(each) for each in record["tables"]]
            self.grown_from = {each["name"]: each[_GROWN] for each in record["tables"] if _GROWN in each}
            self._columns = {each["name"]: each[_COLUMNS] for each in record["tables"] if _COLUMNS in each}
        self._specs = {spec.name: spec for spec in specs}
        self._described_flushed = self.flushed
        columns = [each.get(_COLUMNS, ()) for each in record["tables"]]
        self.tables = [
            MappedTable(spec, self._folder, new=False, columns=edges)
            for spec, edges in zip(specs, columns, strict=True)
        ]
        self._layouts.recover()

    def change(self, specs: Sequence[TableSpec], published: Mapping[str, int]) -> list[Callable[[], None]]:
        """Make tables, all zero, and make room in those that are there already for what they are to be.

        What is written down last is which tables there are: until then, a crash leaves them as they were.

        Args:
            specs: what tables are to be.
            published: how many rows were published of those that are there, by name.

        Returns:
            What makes those that are there what they are to be: for the thread that changes them.

        Raises:
            StorageFailed: there is no room; nothing was changed.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        tables = {table.spec.name: table for table in self.tables}
        grown = {each.name: published.get(each.name, 0) for each in specs if self._grows(each)}
        with ExitStack() as undo:
            steps = [tables[each.name].extend(each) for each in specs if each.name in tables]
            new = [self._made(each, undo) for each in specs if each.name not in tables]
            self._describe(specs, new, grown)
            undo.pop_all()
        return steps

    def _grows(self, spec: TableSpec) -> bool:
        return spec.name in self._specs and spec.rows > self._specs[spec.name].rows

    def _made(self, spec: TableSpec, undo: ExitStack) -> MappedTable:
        undo.callback(remove_files, spec, self._folder)
        return MappedTable(spec, self._folder, new=True)

    def flush(self, version: int) -> bool:
        """Put the tables, which are at `version` or later, on disk, and drop the log up to there.

        Returns:
            Whether there was anything to flush.

        Raises:
            StorageFailed: the log could not be written; nothing was lost.
        """
        with self._flushing:
            if version <= self.flushed:
                if self._log.refusing:
                    self._kept_seals = max(1, self._kept_seals // 2)
                    self._drop_old_seals(self.flushed)
                return False
            tables, columns = list(self.tables), {table.spec.name: table.columns for table in self.tables}
            for table in tables:
                table.flush()
            self._describe(flushed=version, columns=columns)
            for table in tables:
                if table.columns == columns[table.spec.name]:
                    table.remove_stale()
            self._log.truncate(self._cuts, version).result()
            self._drop_old_seals(version)
            for forgotten in self._layouts.forget(version):
                forgotten.result()
            self.flushed = version
            return True

    def _drop_old_seals(self, version: int) -> None:
        self._log.truncate(self._seals, max(0, version - self._kept_seals)).result()

    def seals(self) -> list[Seal]:
        """The seals that are kept, oldest first.

        Raises:
            StorageFailed: one is damaged.
        """
        seals = []
        for record in self._log.read(self._seals):
            with reading(name_of(self._seals, record.number)):
                seals.append(seal_of_record(unpack_json(record.payload)))
        return seals

    def drop_unsealed(self, sealed: int) -> None:
        """Forget the rows of cuts after version `sealed`, which were never finished."""
        self._log.drop(self._cuts, sealed + 1).result()

    # Cuts, from their first part to their seal.

    def drop_part(self, version: int, rank: int) -> Future[None]:
        """Forget what was appended of a rank's part of a cut that is not sealed yet."""
        return self._log.drop(self._cuts, version, rank)

    def use_layout(self, layout: bytes, shards: Sequence[Shard], version: int) -> LayoutUse:
        """Have a layout, packed, with these shards in it, for rows of a version that is not sealed yet."""
        return self._layouts.use(layout, shards, version)

    def append(self, version: int, rank: int, index: int, slot: int, rows: RowBatch, layout: int) -> Future[None]:
        """Append record `index` of a rank's part: rows of the shard in `slot` of its layout."""
        return self._log.append(self._cuts, version, rank, index, *pack_rows(slot, rows, layout))

    def seal(self, seal: Seal) -> Future[None]:
        """Make a cut visible: it is part of the history from here on."""
        return self._log.append(self._seals, seal.version, 0, 0, pack_json(seal_record(seal)))

    def rows(self, seal: Seal) -> Iterator[RowBatch]:
        """The rows of a sealed cut as the log has them.

        Raises:
            StorageFailed: a record is damaged, or missing.
        """
        count = 0
        for record in self._log.read(self._cuts, seal.version, seal.version):
            if record.part < seal.world_size:
                with reading(name_of(self._cuts, record.number, record.part, record.index)):
                    rows = unpack_rows(record.payload, self._layouts.shards)
                count += len(rows)
                yield rows
        if count != seal.rows:
            raise StorageFailed(
                f"the log has {count} rows of version {seal.version} of model {self._model!r}, expected "
                f"{seal.rows}: {RESTORE}"
            )

    def logged(self, wanted: Mapping[str, Ids], seals: Iterable[Seal]) -> list[RowBatch]:
        """What the log has of some rows, ids by the table's name, in the order of these cuts; as far as it can be
        read.
        """
        found = []
        for seal in seals:
            with contextlib.suppress(StorageFailed):
                found += [some for rows in self.rows(seal) if len(some := _among(rows, wanted))]
        return found

    def _describe(
        self,
        specs: Sequence[TableSpec] = (),
        new: Sequence[MappedTable] = (),
        grown_from: Mapping[str, int] = MappingProxyType({}),
        flushed: int = 0,
        columns: Mapping[str, Sequence[int]] = MappingProxyType({}),
    ) -> None:
        """Write down which tables there are, and only then have them."""
        with self._describing:
            every = self._specs | {spec.name: spec for spec in specs}
            grown, edges = {**self.grown_from, **grown_from}, {**self._columns, **columns}
            flushed = max(flushed, self._described_flushed)
            record = {
                "history": self.history,
                "flushed": flushed,
                "tables": [_table_record(spec, grown, edges.get(spec.name, ())) for spec in every.values()],
            }
            self._log.put(f"model/{self._model}", pack_json(record)).result()
            self.tables, self._specs, self.grown_from = [*self.tables, *new], every, grown
            self._columns = edges
            self._described_flushed = flushed


def _table_record(spec: TableSpec, grown_from: Mapping[str, int], columns: Sequence[int]) -> dict[str, Any]:
    record = spec_record(spec) | ({_GROWN: grown_from[spec.name]} if spec.name in grown_from else {})
    return record | ({_COLUMNS: list(columns)} if len(columns) > 2 else {})


def _among(rows: RowBatch, wanted: Mapping[str, Ids]) -> RowBatch:
    """Those of some rows that are wanted."""
    where = np.flatnonzero(np.isin(rows.ids, wanted.get(rows.table.name, rows.ids[:0])))
    return RowBatch(rows.shard, rows.ids[where], rows.values[where], deleted=rows.deleted)

"""Where a model is kept: files of its tables in a folder, and its part of the log."""

import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from deltasync.core.rows import RowBatch
from deltasync.core.seal import Seal
from deltasync.core.tables import Shard, TableSpec
from deltasync.storage.log import Buffer, Log
from deltasync.storage.mapped_table import MappedTable, remove_files
from deltasync.storage.records import spec_of_record, spec_record, unpack_rows
from deltasync.v1 import publish_pb2
from deltasync.wire.messages import shards_from_open, table_from_message

# Seals are kept this long after their rows, so that lag in seconds is known for old offsets too.
KEPT_SEALS = 100_000


class ModelStore:
    """The files and records of one model. What returns no future blocks; any thread.

    Attributes:
        history: the id made when the model's log was created.
        tables: the tables, in the order they were added; a table's index is its slot. Replaced when one is added.
        flushed: the version up to which the tables' files need no record of the log.
    """

    def __init__(self, log: Log, model: str, directory: Path) -> None:
        self._log = log
        self._model = model
        self._folder = directory / "tables"
        self._flushing = threading.Lock()
        self._describing = threading.Lock()  # So that a flush and a new table do not write over each other.
        self.history = uuid.uuid4().hex
        self.tables: list[MappedTable] = []
        self.flushed = 0

    def recover(self, record: Mapping[str, Any]) -> None:
        """Come back as of the last flush.

        Raises:
            StorageFailed: a file is missing, or of another size.
        """
        self.history, self.flushed = record["history"], record["flushed"]
        specs = [spec_of_record(each) for each in record["tables"]]
        self.tables = [MappedTable(spec, self._folder, new=False) for spec in specs]

    def add(self, specs: Sequence[TableSpec]) -> None:
        """Make tables, all zero.

        Raises:
            StorageFailed: there is no room; nothing was added.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        new: list[MappedTable] = []
        with ExitStack() as undo:
            for spec in specs:
                undo.callback(remove_files, spec, self._folder)
                new.append(MappedTable(spec, self._folder, new=True))
            self._describe(new, self.flushed)
            undo.pop_all()

    def flush(self, version: int) -> None:
        """Put the tables, which are at `version` or later, on disk, and drop the log up to there.

        Raises:
            StorageFailed: the log could not be written; nothing was lost.
        """
        with self._flushing:
            if version <= self.flushed:
                return
            for table in list(self.tables):
                table.flush()
            self._describe([], version)
            self._log.truncate(self._model, version, KEPT_SEALS).result()
            self.flushed = version

    def seals(self) -> list[Seal]:
        """The seals that are kept, oldest first."""
        return self._log.seals(self._model)

    def drop_unsealed(self, sealed: int) -> None:
        """Forget the rows of cuts after version `sealed`, which were never finished."""
        self._log.drop_unsealed(self._model, sealed).result()

    # Cuts, from their first part to their seal.

    def append(self, version: int, rank: int, number: int, *payload: Buffer) -> Future[None]:
        """Append record `number`, in pieces, of a rank's part of a cut that is not sealed yet."""
        return self._log.append(self._model, version, rank, number, *payload)

    def drop_part(self, version: int, rank: int) -> Future[None]:
        """Forget what was appended of a rank's part of a cut that is not sealed yet."""
        return self._log.drop_part(self._model, version, rank)

    def seal(self, seal: Seal) -> Future[None]:
        """Make a cut visible: it is part of the history from here on."""
        return self._log.seal(self._model, seal)

    def rows(self, version: int) -> Iterator[RowBatch]:
        """The rows of a cut as the log has them: for each rank what it opened with, then its rows.

        Raises:
            StorageFailed: a record is damaged.
        """
        shards: list[Shard] = []
        for _, number, record in self._log.records(self._model, version):
            if number == 0:
                header = publish_pb2.PublishOpen.FromString(bytes(record))
                shards = shards_from_open(header, [table_from_message(table) for table in header.tables])
            else:
                yield unpack_rows(record, shards)

    def _describe(self, new: Sequence[MappedTable], flushed: int) -> None:
        """Write down which tables there are, and only then have them."""
        with self._describing:
            tables = [*self.tables, *new]
            record = {
                "history": self.history,
                "flushed": flushed,
                "tables": [spec_record(table.spec) for table in tables],
            }
            self._log.put_meta(f"model/{self._model}", record).result()
            self.tables = tables

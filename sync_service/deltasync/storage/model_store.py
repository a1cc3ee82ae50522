"""Where a model is kept: files of its tables in a folder, and its part of the log.

Its streams: `cuts/MODEL` has rows, by version, rank and index; `seals/MODEL` has what makes a version visible;
`layouts/MODEL` has what ranks hold. Rows of a version without a seal are of a cut that was never finished. A seal
says how many ranks its run had: what an abandoned cut of a larger run has left is passed over.
"""

import contextlib
import shutil
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path
from types import MappingProxyType
from typing import Any

from deltasync.core.errors import StorageFailed
from deltasync.core.progress import Progress
from deltasync.core.rows import RowBatch
from deltasync.core.seal import Seal
from deltasync.core.table_records import spec_of_record
from deltasync.core.tables import Shard, TableSpec
from deltasync.core.words import counted
from deltasync.storage.data_directory import RESTORE
from deltasync.storage.layouts import Layouts, LayoutUse
from deltasync.storage.log_store import LogFull, LogStore
from deltasync.storage.mapped_table import MappedArrays, MappedTable, TableLayout
from deltasync.storage.model_records import (
    TABLES_FOLDER,
    flushed_layout,
    recorded_growth,
    recorded_place,
    table_record,
)
from deltasync.storage.pin import Pin
from deltasync.storage.records import (
    name_of,
    pack_json,
    pack_rows,
    reading,
    seal_of_record,
    seal_record,
    unpack_json,
    unpack_rows,
)
from deltasync.storage.table_files import TableFiles, flush, make_tables, open_tables
from deltasync.storage.table_room import ROOM
from deltasync.storage.unused_files import remove_left_behind, remove_unused
from deltasync.storage.volume import VolumeFailed

# Seals are kept this long after their rows, so that lag in seconds is known for old offsets too; fewer of them in
# a log that is full although it has no rows that could be dropped.
KEPT_SEALS = 100_000


class ModelStore:
    """The files and records of one model. What returns no future blocks; any thread.

    Attributes:
        history: the id made when the model's log was created.
        tables: the tables, in the order they were added; a table's index is its slot. Replaced when one is added.
        grown_from: how many rows were published of a table when it grew, by its name.
        flushed: the version up to which the tables' files need no record of the log.
        removed: the version up to which there was no table of a name, or another one that was removed then.
        table_bytes: of all that their files have.
        changes: how often tables were made, changed or removed.
        written: whether anything was written.
        pin: keeps in the log what a snapshot is to have.
        queue: what all have submitted to the log that is not on disk yet.
    """

    def __init__(self, log: LogStore, model: str, directory: Path) -> None:
        self._log, self.queue = log, log.queue
        self._model = model
        self._cuts, self._seals = f"cuts/{model}", f"seals/{model}"
        self._layouts = Layouts(log, model)
        self._folder = directory / TABLES_FOLDER
        self._flushing, self._retired, self.pin = threading.Lock(), False, Pin()
        self._describing = threading.Lock()  # So that a flush and a new table do not write over each other.
        self.history = uuid.uuid4().hex
        self.tables: list[MappedTable] = []
        self.grown_from: dict[str, int] = {}
        self.removed: dict[str, int] = {}
        # As they are written down: the arrays are those of the last flush, which may have fewer rows.
        self._specs: dict[str, TableSpec] = {}
        self._flushed: dict[str, MappedArrays] = {}
        self.flushed = self.table_bytes = self.changes = 0
        self.written, self._kept_seals = False, KEPT_SEALS
        self._described_flushed = 0  # The one that is written down, which is ahead until the log is cut.

    def recover(self, record: Mapping[str, Any]) -> None:
        """Come back as of the last flush.

        Raises:
            StorageFailed: a file is missing, or of another size, a record is damaged, or there is no room.
        """
        with reading(f"record model/{self._model}"):
            self.history, self.flushed = record["history"], record["flushed"]
            tables = record["tables"]
            self._specs = {each["name"]: spec_of_record(each) for each in tables}
            layouts = [flushed_layout(each) for each in tables]
            places = [recorded_place(self._folder, each) for each in tables]
            self.grown_from = recorded_growth(record)
            self.removed = record.get("removed", {})
        self._described_flushed = self.flushed
        pairs = [(place, layout.arrays()) for place, layout in zip(places, layouts, strict=True)]
        progress = Progress(f"model {self._model!r}: opening tables", sum(each.spec.rows for each in layouts))
        files = open_tables(pairs)
        for layout, each in zip(layouts, files, strict=True):
            self.tables.append(self._table(layout, each))
            progress.add(layout.spec.rows)
        self._flushed = {table.spec.name: table.mapped for table in self.tables}
        remove_left_behind(self._folder, files)
        self._move_again()
        self.table_bytes = sum(table.mapped.layout.nbytes for table in self.tables)
        self._layouts.recover()

    def remove_unused(self) -> None:
        """Remove what the files have of tables that have moved, or are no more. While nothing is changed."""
        with self._flushing:
            mapped = [*self._flushed.values(), *(table.mapped for table in self.tables)]
            remove_unused(self._folder, [each.files for each in mapped])

    def remove(self, name: str, version: int) -> MappedTable:
        """Write down that a table is no more, of which the log has no rows: the next start does without it. Until
        `remove_unused` the files have it, and whoever has asked takes it out of `tables`.

        Raises:
            StorageFailed: the log could not be written; nothing was changed.
        """
        (table,) = (each for each in self.tables if each.spec.name == name)
        self._describe(removed={name: version})
        self.table_bytes -= table.mapped.layout.nbytes
        self.changes += 1
        return table

    def _move_again(self) -> None:
        """Give the tables that had moved, and were not flushed since, their room again."""
        moved = [table for table in self.tables if table.moves(self._specs[table.spec.name])]
        layouts = [table.layout_as(self._specs[table.spec.name]) for table in moved]
        made = self._made(layouts)
        for table, layout in zip(moved, layouts, strict=True):
            table.extend(layout, made[layout.spec.name])()

    def change(
        self, specs: Sequence[TableSpec], published: Mapping[str, int], version: int = 0
    ) -> list[Callable[[], None]]:
        """Make tables, all zero, and make room in those that are there already for what they are to be. Of a name
        of which nothing was published, the one that is there gives way to another.

        What is written down last is which tables there are: until then, a crash leaves them as they were.

        Args:
            specs: what tables are to be.
            published: how many rows were published of those that are there, by name.
            version: the newest one, of which none has rows of those that are made.

        Returns:
            What makes those that are there what they are to be: for the thread that changes them.

        Raises:
            StorageFailed: there is no room; nothing was changed.
        """
        added, stale = self.added_bytes(specs, published), self._stale(specs, published)
        replaced = sum(table.mapped.layout.nbytes for table in self.tables if table.spec.name in stale)
        with ROOM.taking(f"tables of model {self._model!r}", self._folder, added), ExitStack() as stack:
            if stale:  # A flush that has begun would write down where they were.
                stack.enter_context(self._flushing)
            steps = self._changed(specs, stale, published, version)
        self.table_bytes += added - replaced
        self.changes += 1
        return steps

    def _changed(
        self, specs: Sequence[TableSpec], stale: Set[str], published: Mapping[str, int], version: int
    ) -> list[Callable[[], None]]:
        known = {table.spec.name: table for table in self.tables if table.spec.name not in stale}
        grown = {each.name: published.get(each.name, 0) for each in specs if self._grows(each)}
        new = [TableLayout.of(each) for each in specs if each.name not in known]
        again = {each.spec.name: version for each in new if each.spec.name in self.removed}
        changed = [(known[each.name], known[each.name].layout_as(each)) for each in specs if each.name in known]
        made = self._made([*new, *(layout for table, layout in changed if table.moves(layout.spec))])
        try:
            steps = [table.extend(layout, made.get(layout.spec.name)) for table, layout in changed]
            tables = [self._table(each, made[each.spec.name], again) for each in new]
            self._describe(specs, tables, grown, again=again)
        except BaseException:
            for folder in {files.place.folder for files in made.values()}:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        return steps

    def _stale(self, specs: Sequence[TableSpec], published: Mapping[str, int]) -> set[str]:
        """Names of tables that are there, are to be something else, and were never published: of a cut that was
        given up as its tables were made.
        """
        wanted = {each.name: each for each in specs}
        there = (table.spec for table in self.tables if not published.get(table.spec.name))
        return {each.name for each in there if wanted.get(each.name, each) != each}

    def added_bytes(self, specs: Sequence[TableSpec], published: Mapping[str, int]) -> int:
        """How many bytes of files it takes that some tables are these, new or larger; see `change`."""
        stale = self._stale(specs, published)
        there = {table.spec.name: table for table in self.tables if table.spec.name not in stale}
        return sum(
            max(0, there[each.name].layout_as(each).nbytes - there[each.name].mapped.layout.nbytes)
            if each.name in there
            else TableLayout.of(each).nbytes
            for each in specs
            if each.name not in there or there[each.name].spec != each
        )

    def check_room(self, wanted: int) -> None:
        """Check that there is room for so many bytes of tables now; StorageFailed if not. Takes none."""
        ROOM.check(f"tables of model {self._model!r}", self._folder, wanted)

    def _table(
        self, layout: TableLayout, files: TableFiles, again: Mapping[str, int] = MappingProxyType({})
    ) -> MappedTable:
        return MappedTable(layout, files, (self.removed | dict(again)).get(layout.spec.name, 0))

    def _grows(self, spec: TableSpec) -> bool:
        return spec.name in self._specs and spec.rows > self._specs[spec.name].rows

    def _made(self, layouts: Sequence[TableLayout]) -> dict[str, TableFiles]:
        """Files for tables, all zero, by the table's name."""
        files = make_tables(self._folder, [layout.arrays() for layout in layouts]) if layouts else []
        return {layout.spec.name: each for layout, each in zip(layouts, files, strict=True)}

    def flush(self, version: int) -> bool:
        """Put the tables, which are at `version` or later, on disk, and drop the log up to there; nothing where
        another process may go on with that, see `cut_log`.

        Returns:
            Whether there was anything in the log to drop.

        Raises:
            StorageFailed: the log could not be written; nothing was lost.
        """
        with self._flushing:
            if self._retired or self._log.shared:
                return False
            mapped = {table: table.mapped for table in list(self.tables)}
            flush(each.files for each in mapped.values())  # What was mended, too, if nothing is newer.
            if version <= self.flushed:
                if self._log.refusing:
                    self._kept_seals = max(1, self._kept_seals // 2)
                    self._drop_old_seals(self.flushed)
                return False
            self._describe(flushed=version, mapped={table.spec.name: each for table, each in mapped.items()})
            for table, each in mapped.items():
                table.remove_stale(each)
            self._cut_log(version)
            return True

    def cut_log(self, version: int) -> None:
        """Drop what the log has up to a version of which there is a snapshot; StorageFailed if that fails."""
        with self._flushing:
            if version > self.flushed and not self._retired:
                self._describe(flushed=version)
                self._cut_log(version)

    def _cut_log(self, version: int) -> None:
        self._log.truncate(self._cuts, upto := self.pin.limit(version)).result()
        self._drop_old_seals(upto)
        for forgotten in self._layouts.forget(upto):
            forgotten.result()
        self.flushed = version

    def retire(self) -> None:
        """Write nothing down any more; a flush that goes on is waited for."""
        with self._flushing:
            self._retired = True

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
        """Forget the rows of cuts after version `sealed`, which were never finished. Where there is no room for
        that, as the log tells, they do no harm: a part drops its own as it begins, and `rows` passes over others.
        """
        with contextlib.suppress(VolumeFailed, LogFull):
            self._log.drop(self._cuts, sealed + 1).result()

    # Cuts, from their first part to their seal.

    @property
    def capacity(self) -> int:
        """Bytes of rows that the log takes, at most."""
        return self._log.capacity

    def drop_cut(self, version: int) -> Future[None]:
        """Forget what was appended of a cut that is given up, which is not sealed."""
        return self._log.drop(self._cuts, version)

    def drop_part(self, version: int, rank: int) -> Future[None]:
        """Forget what was appended of a rank's part of a cut that is not sealed; on disk with the seal."""
        return self._log.drop(self._cuts, version, rank, patient=True)

    def use_layout(self, layout: bytes, shards: Sequence[Shard], version: int) -> LayoutUse:
        """Have a layout, packed, with these shards in it, for rows of a version that is not sealed yet."""
        self.written = True
        return self._layouts.use(layout, shards, version)

    def append(self, version: int, rank: int, index: int, slot: int, rows: RowBatch, layout: int) -> Future[None]:
        """Append record `index` of a rank's part: rows of the shard in `slot` of its layout. It is on disk
        with the seal, at the latest.
        """
        return self._log.append(self._cuts, version, rank, index, *pack_rows(slot, rows, layout), patient=True)

    def seal(self, seal: Seal, after: Sequence[Future[None]] = ()) -> Future[None]:
        """Make a cut visible, unless one of the writes `after` which it comes was refused.

        Once this is done it is on disk with them, and part of the history.
        """
        return self._log.append(self._seals, seal.version, 0, 0, pack_json(seal_record(seal)), after=after)

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
                f"the log has {counted(count, 'row')} of version {seal.version} of model {self._model!r}, "
                f"expected {seal.rows}: {RESTORE}"
            )

    def _describe(
        self,
        specs: Sequence[TableSpec] = (),
        new: Sequence[MappedTable] = (),
        grown_from: Mapping[str, int] = MappingProxyType({}),
        mapped: Mapping[str, MappedArrays] = MappingProxyType({}),
        flushed: int = 0,
        removed: Mapping[str, int] = MappingProxyType({}),
        again: Mapping[str, int] = MappingProxyType({}),
    ) -> None:
        """Write down which tables there are, and only then have them."""
        with self._describing:
            every = self._specs | {spec.name: spec for spec in specs}
            every = {name: spec for name, spec in every.items() if name not in removed}
            grown = {**self.grown_from, **grown_from}
            every_removed = self.removed | dict(removed) | dict(again)
            places = self._flushed | {table.spec.name: table.mapped for table in new} | dict(mapped)
            flushed = max(flushed, self._described_flushed)
            for name, spec in every.items():  # Room may have been made for other segments than are written down.
                places[name].lengthen(spec.rows)
            record = {
                "history": self.history,
                "flushed": flushed,
                "tables": [table_record(spec, places[name], grown) for name, spec in every.items()],
            }
            record |= {"removed": every_removed} if every_removed else {}
            self._log.put(f"model/{self._model}", pack_json(record)).result()
            if new:
                self._have(new)
            self._specs, self.grown_from = every, {name: rows for name, rows in grown.items() if name in every}
            self._flushed = {name: each for name, each in places.items() if name in every}
            self._described_flushed, self.removed = flushed, every_removed

    def _have(self, new: Sequence[MappedTable]) -> None:
        """Have tables that are written down, instead of others of their names."""
        names = {table.spec.name for table in new}
        for table in self.tables:
            table.removed = table.removed or table.spec.name in names
        self.tables = [*(table for table in self.tables if table.spec.name not in names), *new]

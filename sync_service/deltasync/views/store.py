"""Where a view is, in memory and on disk: its tables' files in a folder, its records and rows in the log.

Rows of a release are in the log before they are in the view's files, and the release is written down before any
replica can be given it: what a replica holds is never lost to the view in a crash.
"""

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deltasync.core.delivery import Delivery
from deltasync.core.errors import StorageFailed
from deltasync.core.rows import RowBatch
from deltasync.core.steady_clock import FOREVER_NS, steady_ns
from deltasync.core.table_records import delivery_of_record
from deltasync.core.tables import Shard
from deltasync.feeds.frozen_release import Head
from deltasync.feeds.model import Model
from deltasync.feeds.statistics import Backlog, ReleaseStatistics
from deltasync.storage.log_store import LAST_NUMBER, LogFull
from deltasync.storage.mapped_table import MappedTable
from deltasync.storage.pin import Pin
from deltasync.storage.records import (
    name_of,
    pack_json,
    pack_rows,
    packed_bytes,
    reading,
    unpack_json,
    unpack_rows,
)
from deltasync.storage.table_files import flush, make_tables, open_tables
from deltasync.storage.unused_files import remove_left_behind, remove_unused
from deltasync.storage.volume import VolumeFailed
from deltasync.views.history import KEPT_HEADS, ReleaseHistory
from deltasync.views.records import (
    head_of_record,
    head_record,
    heads_stream,
    is_of_removed,
    place_of_record,
    recorded_release,
    release_name,
    releases_stream,
    statistics_of_record,
    statistics_record,
    table_record,
    view_name,
)
from deltasync.views.table import ViewTable, view_arrays


@dataclass(frozen=True)
class NewestRelease:
    """The newest release of a view: what replicas can be given, and what it took."""

    head: Head
    statistics: ReleaseStatistics


@dataclass(frozen=True, kw_only=True)
class ViewState:
    """Where a view is at one moment. Replaced as a whole, so that any thread can read what belongs together.

    Attributes:
        tables: what replicas hold; a table's index is its slot.
        newest: the newest release; None = replicas can be given nothing yet.
        compared_version: the version of the model at which its rows were last compared with those of the view.
        backlog: what was left of each table then, by the table's name. After a restart it is not known, and empty.
        mixed: whether rows that belong together may be of several versions, say a map and the rows that it leads
            to, or those of another run: nobody is given them before the next release, which makes them fit.
    """

    tables: tuple[ViewTable, ...] = ()
    newest: NewestRelease | None = None
    compared_version: int = 0
    backlog: Mapping[str, Backlog] = field(default_factory=dict)
    mixed: bool = False

    @property
    def head(self) -> Head | None:
        """The newest release; None = replicas can be given nothing yet."""
        return self.newest.head if self.newest else None

    @property
    def backlog_rows(self) -> int:
        """Dirty rows that are left for later releases."""
        return self.newest.statistics.backlog.rows if self.newest else 0

    @property
    def oldest_dirty_version(self) -> int:
        """The version since which the oldest of these rows is dirty; 0 = there is none."""
        return min((each.oldest_version for each in self.backlog.values() if each.amount.rows), default=0)


class ViewStore:
    """The state of one view, in memory and on disk. Every method blocks, but for `append`, `drop` and `advance`.

    Releases and tables are written by one call at a time; a flush may run on another thread at any time. The state
    is replaced as a whole, so that every thread may read it.

    Attributes:
        consumer: whose view it is.
        history: the releases there were.
        state: where the view is.
        pin: keeps in the log what a snapshot is to have.
        queue: what all have submitted to the log that is not on disk yet.
    """

    def __init__(self, consumer: str, model: Model, directory: Path) -> None:
        self.history = ReleaseHistory()
        self.state = ViewState()
        self._model = model
        self._log, self.queue = model.log, model.log.queue
        self._directory = directory
        self.consumer = consumer
        self._stream, self._heads = releases_stream(consumer), heads_stream(consumer)
        self._flushed = 0
        self._flushing, self.pin = threading.Lock(), Pin()
        self._appended_bytes = 0  # Written by one release at a time.
        self._dropped_bytes = 0  # Of these, those that flushes have dropped.

    # Releases.

    def append(self, number: int, slot: int, index: int, rows: RowBatch) -> Future[None]:
        """Hand encoded rows of the table in `slot` to the log, as record `index` of these in release `number`."""
        self._appended_bytes += packed_bytes(rows)
        return self._log.append(self._stream, number, slot, index, *pack_rows(slot, rows))

    def drop(self, number: int) -> Future[None]:
        """Drop what the log has of release `number`, which no replica was given."""
        return self._log.drop(self._stream, number)

    def advance(self, state: ViewState) -> None:
        """Go on to `state`, whose release is written down: on the model's thread, as its tables are changed."""
        if state.newest and state.head != self.state.head:
            self.history.add(state.newest.head, steady_ns())
        self.state = state

    def install(self, state: ViewState, release: NewestRelease) -> None:
        """Go on to a state with other tables, whose files are on disk, and to the release that has them.

        Raises:
            StorageFailed: the log could not be written; the view is as it was, or the next flush cuts the log.
        """
        with self._flushing:
            self.write_release(release)
            self._write_view(state, release.head.number)
            # Before the log is cut: even if that fails, these are the tables after a restart.
            self.history.add(release.head, steady_ns())
            self.state = replace(state, newest=release)
            self._cut_log(release.head.number)

    def write_release(self, release: NewestRelease, after: Sequence[Future[None]] = ()) -> None:
        """Write down what the newest release is, `after` its rows: unless one of these writes was refused.

        Raises:
            StorageFailed: the log could not be written, or has not all of these.
        """
        head = head_record(release.head)
        chained = pack_json(head | {"after": self.history.newest_seal})
        # Where the log is full it goes without: after a restart, replicas of older releases are sent everything.
        self._log.append(self._heads, release.head.number, 0, 0, chained, after=after, patient=True)
        record = {"head": head, "account": statistics_record(release.statistics)}
        self._log.put(release_name(self.consumer), pack_json(record), after=after).result()

    # Tables and their files, on any thread.

    def make_tables(self, wanted: Mapping[Delivery, MappedTable]) -> list[ViewTable]:
        """Make tables, by what replicas are sent of which source.

        One that is there already, with room for fewer rows, begins with what that has; it is to be told to
        `follow` it before it is used.

        Raises:
            StorageFailed: there is no room; what is there is as it was.
        """
        smaller = {each: self.smaller(each) for each in wanted}
        growing = {each: table for each, table in smaller.items() if table and table.files.place.offset is None}
        files = {each: table.files.extended(view_arrays(each)) for each, table in growing.items()}
        others = [each for each in wanted if each not in growing]
        made = make_tables(self._directory, [view_arrays(each) for each in others]) if others else []
        files |= dict(zip(others, made, strict=True))
        for each, new in files.items():
            if before := smaller[each]:
                new.begin_with(before.files, len(new.arrays))
        return [ViewTable(source, each, files[each]) for each, source in wanted.items()]

    def smaller(self, delivery: Delivery) -> ViewTable | None:
        """The table that is as a delivery wants it, but has room for fewer rows; None if there is none."""
        for table in self.state.tables:
            rows = table.delivery.spec.rows
            if (
                not table.source.removed
                and rows < delivery.spec.rows
                and table.delivery == replace(delivery, spec=replace(delivery.spec, rows=rows))
            ):
                return table
        return None

    def remove_unused(self) -> None:
        """Remove what the files have of tables that the view does not have."""
        remove_unused(self._directory, [table.files for table in self.state.tables])

    def should_flush(self, flush_bytes: int) -> bool:
        """Whether the log holds so many bytes of unflushed releases, or half as many of them as heads are kept."""
        unflushed = self.state.head.number - self._flushed if self.state.head else 0
        return self._appended_bytes - self._dropped_bytes >= flush_bytes or unflushed >= KEPT_HEADS // 2

    def flush(self) -> bool:
        """Put the view's files on disk and drop its rows from the log; whether there was anything to flush.

        Nothing is done where another process may go on with the log, see `cut_log`.

        Raises:
            StorageFailed: the log could not be written; nothing was lost.
        """
        with self._flushing:
            appended, state = self._appended_bytes, self.state
            if state.head is None or self._log.shared:
                return False
            flush(table.files for table in state.tables)  # What was mended, too, if nothing is newer.
            if state.head.number == self._flushed:
                return False
            self._write_view(state, state.head.number)
            self._cut_log(state.head.number)
            self._dropped_bytes = appended
            return True

    def cut_log(self, number: int) -> None:
        """Drop what the log has up to a release, of which there is a snapshot.

        Raises:
            StorageFailed: the log could not be written; nothing was lost.
        """
        with self._flushing:
            if number > self._flushed:
                self._write_view(self.state, number)
                self._cut_log(number)

    def discard(self) -> None:
        """Remove everything there is of the view."""
        with self._flushing:
            self.state = replace(self.state, newest=None)
            self._log.put(view_name(self.consumer), None).result()
            self._log.put(release_name(self.consumer), None).result()
            self._log.truncate(self._heads, LAST_NUMBER).result()
            self._log.truncate(self._stream, LAST_NUMBER).result()
            remove_left_behind(self._directory, ())
            with suppress(OSError):  # Or at the next start; or it has a file that no service has made.
                self._directory.rmdir()

    def _write_view(self, state: ViewState, number: int) -> None:
        """Write down that the files are at release `number`, or later; the log need not hold the rows up to it."""
        self._log.put(view_name(self.consumer), pack_json(self.record(state, number))).result()

    def record(self, state: ViewState, number: int) -> dict[str, Any]:
        """What is written down of it in that state, if its tables are as of release `number`, or later."""
        record = {
            "history": self.history.id,
            "model_history": self._model.history,
            "forked": self.history.first_version,
            "flushed": number,
            "seen": state.compared_version,
            "tables": [table_record(table) for table in state.tables],
        }
        return record | ({"mixed": True} if state.mixed else {})

    def _cut_log(self, number: int) -> None:
        self._log.truncate(self._stream, self.pin.limit(number)).result()
        self._log.truncate(self._heads, max(0, number - KEPT_HEADS)).result()
        self._flushed = number

    # Coming back.

    def recover(self, record: Mapping[str, Any]) -> None:
        """Come back as of the last flush, which left `record`, and the log after it.

        Raises:
            StorageFailed: a file is damaged or missing, or a record of the log is damaged.
        """
        with reading(f"record {view_name(self.consumer)}"):
            if record["model_history"] != self._model.history:
                self.discard()  # What replicas hold is of another model: they need everything anyway.
                return
            history, forked = record["history"], record["forked"]
            self._flushed, compared_version = record["flushed"], record["seen"]
            mixed = record.get("mixed", False)
            tables = self._open_tables(record["tables"])
        newest, model_version = self._recover_release(), self._model.position.number
        if (version := max(compared_version, newest.head.version if newest else 0)) > model_version:
            raise StorageFailed(f"it is made of version {version}, and the model's newest one is {model_version}")
        self.history = ReleaseHistory(history, forked, self._heads_before(newest.head) if newest else ())
        self._replay(tables, newest.head.number if newest else 0)
        mixed = bool(mixed and newest and newest.head.number == self._flushed)
        self.state = ViewState(tables=tables, newest=newest, compared_version=compared_version, mixed=mixed)
        for table in tables:
            table.retag(newest.head.number if newest else 0)
            table.check_marks(model_version)
        if newest:
            self.history.add(newest.head, -FOREVER_NS)
        remove_left_behind(self._directory, [table.files for table in tables])

    def _open_tables(self, records: Sequence[Mapping[str, Any]]) -> tuple[ViewTable, ...]:
        sources = self._sources(records)
        deliveries = [delivery_of_record(each, source.spec) for each, source in zip(records, sources, strict=True)]
        places = [place_of_record(each, self._directory) for each in records]
        arrays = [view_arrays(delivery) for delivery in deliveries]
        files = open_tables(list(zip(places, arrays, strict=True)))
        tables = tuple(ViewTable(*each) for each in zip(sources, deliveries, files, strict=True))
        for table, each in zip(tables, records, strict=True):
            table.sent.removed_before = each.get("replaces", 0)
        return tables

    def _sources(self, records: Sequence[Mapping[str, Any]]) -> list[MappedTable]:
        by_name = {table.spec.name: table for table in self._model.tables}
        for each in records:
            if is_of_removed(each, by_name, self._model.store.removed):
                raise StorageFailed(f"table {each['table']!r}, which it has, was deleted")
        return [by_name[each["table"]] for each in records]

    def _replay(self, tables: Sequence[ViewTable], newest: int) -> None:
        """Write the rows that the log has of releases up to the newest one into the tables.

        Of a later one it may have a part, say a map without the rows that it leads to. No replica was given any of
        it, and all of it is dirty still.
        """
        last, shards = newest, [Shard.whole(table.held.spec) for table in tables]
        for record in self._log.read(self._stream):  # Also those that nobody needs: they may be of another number.
            if self._flushed < record.number <= newest:
                with reading(name_of(self._stream, record.number, record.part, record.index)):
                    tables[record.part].write(unpack_rows(record.payload, lambda _: shards), record.number)
                self._appended_bytes += len(record.payload)
            last = max(last, record.number)
        if last > newest:
            with suppress(VolumeFailed, LogFull):  # As the log tells. Each release begins with it, too.
                self.drop(newest + 1).result()
        for table in tables:
            table.find_marked()

    def _heads_before(self, newest: Head) -> list[Head]:
        """The heads of releases before the newest one, oldest first, back to where the seals no longer chain."""
        records = {}
        for each in self._log.read(self._heads, last=newest.number):
            with reading(name_of(self._heads, each.number)):
                record = unpack_json(each.payload)
                records[head_of_record(record)] = record["after"]
        heads, seal = list[Head](), newest.seal
        for head in reversed(records):
            if not seal or head.seal != seal:
                break
            heads.append(head)
            seal = records[head]
        return heads[:0:-1]

    def _recover_release(self) -> NewestRelease | None:
        record = recorded_release(self._log, self.consumer)
        if record is None:
            return None
        with reading(f"record {release_name(self.consumer)}"):
            return NewestRelease(head_of_record(record["head"]), statistics_of_record(record["account"]))

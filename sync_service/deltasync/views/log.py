"""The state of a view, and its records in the log: heads of releases, and the row ids of each."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from deltasync.base.clock import Succession
from deltasync.base.errors import StorageFailed
from deltasync.core.rows import Ids
from deltasync.core.seal import Seal, release_checksum
from deltasync.log.log_store import LAST_NUMBER, LogStore
from deltasync.log.records import (
    name_of,
    pack_ids,
    pack_json,
    reading,
    unpack_ids,
    unpack_json,
)
from deltasync.model.feed import Backlog, ReleaseStatistics, RowTotals
from deltasync.model.releases import Head
from deltasync.views.table import ViewTable


class ReleaseHistory:
    """The releases of one view. One call at a time adds to it; any thread reads it.

    Releases are numbered from `first_version` on, the version at which the view began; 0 = it has no tables yet.
    Smaller numbers are versions of the model.
    """

    def __init__(self, history_id: str, most: int, first_version: int = 0, heads: Iterable[Head] = ()) -> None:
        """Start with known releases, oldest first. It keeps `most` of them."""
        self.id = history_id
        self._most = most
        self.first_version = first_version
        self.succession = Succession()
        self.heads = {head.number: head for head in heads}
        self._newest = next(reversed(self.heads.values()), None)

    def add(self, head: Head, at_ns: int) -> None:
        """Add the newest release, made at `at_ns` by `steady_ns`."""
        self.heads[head.number] = self._newest = head
        if len(self.heads) > self._most:
            del self.heads[next(iter(self.heads))]
        self.succession.add(head.number, at_ns)

    def sealed(self, head: Head, of: Seal, made_unix_ns: int) -> Head:
        """Return the head of the next release, sealed; the release was made from the version with seal `of`."""
        before = self._newest.seal if self._newest else self.id
        return replace(head, seal=release_checksum(before, head.number, of, made_unix_ns))

    def version_of(self, number: int) -> int:
        """The version of the rows that a replica at `number` holds; `first_version` or less if unknown."""
        newest = self._newest
        head = newest if newest and number >= newest.number else self.heads.get(number)
        known = head.version if head else self.first_version
        return min(number, known) if number <= self.first_version else known

    def seal_of(self, number: int) -> int:
        """The checksum of a release's seal; 0 if unknown."""
        head = self.heads.get(number)
        return head.seal if head else 0


def view_name(consumer: str) -> str:
    """The name of the record of a consumer's view."""
    return f"view/{consumer}"


def head_of_record(record: Mapping[str, Any]) -> Head:
    """The head in the record of a release."""
    return Head(**{each.name: record[each.name] for each in fields(Head)})


def table_record(table: ViewTable) -> dict[str, Any]:
    """The record of a view's table, without its rows."""
    form = table.form
    return {
        "table": form.spec.name,
        "rows": form.spec.rows,
        "value_type": form.value_type and form.value_type.value,
        "mode": form.mode.value,
        "source": table.source.removed_before,
        "replaces": table.sent.removed_before,
        "born": table.born,
        "stamp": table.stamp,
    }


@dataclass(frozen=True)
class ViewState:
    """The state of a view at one moment, which is replaced and never changed, so any thread may read it.

    Attributes:
        tables: the tables that replicas hold, by slot.
        record: the record of the newest release; empty if there is none.
        compared_version: the version of the model at which rows were last compared.
        backlog: dirty rows that were left at that version, by table name.
    """

    tables: tuple[ViewTable, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)
    compared_version: int = 0
    backlog: Mapping[str, Backlog] = field(default_factory=dict)

    @cached_property
    def head(self) -> Head | None:
        """The head of the newest release; None if replicas can receive none yet."""
        return head_of_record(self.record) if self.record else None

    @cached_property
    def statistics(self) -> ReleaseStatistics | None:
        """The statistics of the newest release; None if there is none."""
        if not self.record:
            return None
        statistics = self.record["statistics"]
        taken, backlog = RowTotals(**statistics["taken"]), RowTotals(**statistics["backlog"])
        return ReleaseStatistics(**{**statistics, "taken": taken, "backlog": backlog})

    @property
    def described(self) -> Sequence[Mapping[str, Any]]:
        """The records of the tables by slot, as of the newest release."""
        tables: Sequence[Mapping[str, Any]] = self.record.get("tables", ())
        return tables

    @property
    def backlog_rows(self) -> int:
        """Number of dirty rows left for later releases."""
        return self.statistics.backlog.rows if self.statistics else 0

    @property
    def oldest_dirty_version(self) -> int:
        """The version since which the oldest of these rows is dirty; 0 if there is none."""
        return min((each.oldest_version for each in self.backlog.values() if each.amount.rows), default=0)

    @property
    def kept(self) -> str:
        """The id of the kept version that the newest release brought replicas to; empty = the newest version."""
        kept: str = self.record.get("kept_id", "")
        return kept

    @property
    def has_removed(self) -> bool:
        """Whether the model has removed a table of the view."""
        return any(table.source.removed for table in self.tables)

    def without_removed(self) -> "ViewState":
        """The state without removed tables. The record of the newest release still names them."""
        tables = tuple(table for table in self.tables if not table.source.removed)
        return replace(self, tables=tables, backlog={table.name: self.backlog[table.name] for table in tables})

    def without_dirty(self, version: int) -> "ViewState":
        """The state after a comparison at `version` that found no dirty rows."""
        record = self.record
        if self.statistics:
            statistics = asdict(replace(self.statistics, backlog=RowTotals()))
            record = {**record, "compared": version, "statistics": statistics}
        backlog = {table.name: Backlog(RowTotals(), table.source.norm) for table in self.tables}
        return ViewState(self.tables, record, version, backlog)


def state_record(history: str, state: ViewState) -> dict[str, Any]:
    """The state of a view for checkpoints, without rows: the input of `Replay.restore`."""
    tables = [table_record(table) | {"compared": table.compared} for table in state.tables]
    return {"history": history, "compared": state.compared_version, "head": state.record, "tables": tables}


# Number of ids in one record.
_PIECE_IDS = 1 << 16
# Maximum number of pending records, because others write to the log too.
_UNWRITTEN_RECORDS = 16


class ViewLog:
    """The records of a view. Any thread may call it; every method except `note` blocks."""

    def __init__(self, log: LogStore, consumer: str) -> None:
        self._log = log
        self._name, self._heads, self._ids = view_name(consumer), f"heads/{consumer}", f"releases/{consumer}"

    def view(self) -> Mapping[str, Any] | None:
        """The record of the view; None if there is none."""
        if (record := self._log.items(self._name).get("")) is None:
            return None
        with reading(f"record {self._name}"):
            content = unpack_json(record)
            return {name: content[name] for name in ("history", "model_history")}

    def write(self, head: Mapping[str, Any], ids: Sequence[Ids], view: Mapping[str, Any] | None) -> None:
        """Write the head of a release and its row ids by slot; with its first release, the record of the view.

        If the log refuses a record, the release does not exist. Repeat the call then.
        """
        number, written = head["number"], list[Future[None]]()
        if view:
            written.append(self._log.put(self._name, pack_json(view)))
        for slot, some in enumerate(ids):
            for index, start in enumerate(range(0, len(some), _PIECE_IDS)):
                piece = some[start : start + _PIECE_IDS]
                written.append(self._log.append(self._ids, number, slot, index, pack_ids(piece), patient=True))
                if len(written) >= _UNWRITTEN_RECORDS:
                    written[-_UNWRITTEN_RECORDS].exception()  # If it was refused, the head will be too.
        self._log.append(self._heads, number, 0, 0, pack_json(head), after=written).result()

    def note(self, head: Mapping[str, Any]) -> None:
        """Update the record of a head without waiting. If the log refuses it, only the added fields are lost."""
        self._log.append(self._heads, head["number"], 0, 0, pack_json(head), patient=True)

    def heads(self, first: int = 0, last: int = LAST_NUMBER) -> Iterator[dict[str, Any]]:
        """The records of heads with numbers from `first` to `last`, oldest first."""
        for each in self._log.read(self._heads, first, last):
            with reading(name_of(self._heads, each.number)):
                yield unpack_json(each.payload)

    def heads_before(self, newest: Mapping[str, Any]) -> list[Head]:
        """The heads before the newest one, oldest first, as far back as their seals form a chain."""
        heads, seal = deque[Head](), newest["after"]
        for record in reversed(list(self.heads(last=newest["number"] - 1))):
            if not seal or record["seal"] != seal:
                break
            heads.appendleft(head_of_record(record))
            seal = record["after"]
        return list(heads)

    def ids(self, head: Mapping[str, Any]) -> list[Ids]:
        """The rows ([n], ascending, by slot) that a release took."""
        number, rows = head["number"], head["rows_taken"]
        pieces: list[list[Ids]] = [[] for _ in rows]
        missing = list(rows)
        for each in self._log.read(self._ids, number, number) if any(rows) else ():
            # Further records are from an unfinished release of the same number.
            if each.part < len(rows) and missing[each.part] > 0:
                with reading(name_of(self._ids, number, each.part, each.index)):
                    pieces[each.part].append(unpack_ids(each.payload))
                missing[each.part] -= len(pieces[each.part][-1])
        if any(missing):
            raise StorageFailed(f"the log lacks rows of release {number}")
        return [np.concatenate([np.zeros(0, np.int64), *some]) for some in pieces]

    def truncate(self, ids: int, heads: int) -> None:
        """Drop row ids up to release `ids`, which checkpoints contain, and heads up to `heads` of these."""
        self._log.truncate(self._ids, ids).result()
        self._log.truncate(self._heads, max(0, min(ids, heads))).result()

    def discard(self) -> None:
        """Remove all records."""
        self._log.put(self._name, None).result()
        self._log.truncate(self._heads, LAST_NUMBER).result()
        self._log.truncate(self._ids, LAST_NUMBER).result()

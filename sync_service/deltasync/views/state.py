"""Where a view is at one moment."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from deltasync.model.feed import Backlog, ReleaseStatistics, RowTotals
from deltasync.model.releases import Head
from deltasync.views.log import head_of_record, statistics_of_record, statistics_record
from deltasync.views.table import ViewTable


@dataclass(frozen=True)
class NewestRelease:
    """The newest release of a view: what replicas can be given, and what it took."""

    head: Head
    statistics: ReleaseStatistics


@dataclass(frozen=True)
class ViewState:
    """Where a view is at one moment. Replaced as a whole, so that any thread can read what belongs together.

    Attributes:
        tables: what replicas hold; a table's index is its slot.
        record: the whole record of the newest release, see `records`; empty = there is none.
        compared_version: the version of the model at which its rows were last compared with those of the view.
        backlog: what was left of each table then, by the table's name.
    """

    tables: tuple[ViewTable, ...] = ()
    record: Mapping[str, Any] = field(default_factory=dict)
    compared_version: int = 0
    backlog: Mapping[str, Backlog] = field(default_factory=dict)

    @cached_property
    def newest(self) -> NewestRelease | None:
        """The newest release; None = replicas can be given nothing yet."""
        if not self.record:
            return None
        return NewestRelease(head_of_record(self.record), statistics_of_record(self.record["statistics"]))

    @property
    def head(self) -> Head | None:
        """The head of the newest release."""
        return self.newest.head if self.newest else None

    @property
    def described(self) -> Sequence[Mapping[str, Any]]:
        """The records of the tables, by slot, as the newest release has them."""
        tables: Sequence[Mapping[str, Any]] = self.record.get("tables", ())
        return tables

    @property
    def backlog_rows(self) -> int:
        """Dirty rows that are left for later releases."""
        return self.newest.statistics.backlog.rows if self.newest else 0

    @property
    def oldest_dirty_version(self) -> int:
        """The version since which the oldest of these rows is dirty; 0 = there is none."""
        return min((each.oldest_version for each in self.backlog.values() if each.amount.rows), default=0)

    @property
    def has_removed(self) -> bool:
        """Whether there is a table that the model does not have any more."""
        return any(table.source.removed for table in self.tables)

    def without_removed(self) -> "ViewState":
        """The state without such tables. The record of the newest release names them still."""
        tables = tuple(table for table in self.tables if not table.source.removed)
        return replace(self, tables=tables, backlog={table.name: self.backlog[table.name] for table in tables})

    def without_dirty(self, version: int) -> "ViewState":
        """The state after a look at a version that has found no dirty row."""
        record = self.record
        if newest := self.newest:
            statistics = statistics_record(replace(newest.statistics, backlog=RowTotals()))
            record = {**record, "compared": version, "statistics": statistics}
        backlog = {table.name: Backlog(RowTotals(), table.source.norm) for table in self.tables}
        return ViewState(self.tables, record, version, backlog)

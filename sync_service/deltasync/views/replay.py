"""A view made again: what a checkpoint has of it, then the releases that the log has of each version."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from deltasync.base.errors import StorageFailed
from deltasync.checkpoints.manifest import TableEntry, TableKey
from deltasync.checkpoints.writing import SourceTable
from deltasync.core.delivery import delivery_of_record
from deltasync.core.position import line_of
from deltasync.core.rows import Ids, members
from deltasync.core.seal import release_checksum
from deltasync.core.stamped_table import StampedTable
from deltasync.log.log_store import LogUnavailable
from deltasync.log.volume import VolumeFailed
from deltasync.model.model import Model
from deltasync.views.log import ViewLog, table_record
from deltasync.views.making import Making, ReleasePlan, left_of
from deltasync.views.state import ViewState
from deltasync.views.table import NONE_DIRTY, Versions, ViewTable


class _Lost(Exception):
    """The view cannot be made again."""


@contextmanager
def _reading() -> Iterator[None]:
    """Turn what is wrong with the log's records into `_Lost`; not that they cannot be read now."""
    try:
        yield
    except (LogUnavailable, VolumeFailed):
        raise
    except StorageFailed as error:
        raise _Lost(str(error)) from error
    except (LookupError, TypeError, ValueError) as error:
        raise _Lost(f"a record of the log cannot be understood ({error!r})") from error


class Replay:
    """Makes a view again, on the model's thread: a `ViewRecovery`.

    A table that the model does not have any more is left out. What the log says of it is passed over.

    Attributes:
        owner: the view's consumer.
        begun: whether it has read what there is of the view.
        state: where the view is.
        lost: why the view cannot be made again; empty if it can.
    """

    def __init__(self, owner: str, model: Model, log: ViewLog, history: str) -> None:
        self.owner = owner
        self._model = model
        self._log = log
        self._history = history
        self.let_go()

    def let_go(self) -> None:
        """Keep nothing of an earlier `restore`."""
        self.begun = False
        self.state = ViewState()
        self.lost = ""
        self._sources = dict[tuple[str, int], StampedTable]()
        self._heads = deque[dict[str, Any]]()
        # The version at which nothing was dirty after the release that the checkpoint has, as the log says.
        self._clean_at = 0

    def restore(self, state: Mapping[str, Any] | None, entries: Sequence[TableEntry]) -> list[StampedTable | None]:
        """Begin with the tables that a checkpoint has; see `ViewRecovery.restore`.

        Raises:
            StorageFailed: there is no room for them, or the log cannot be read now.
        """
        self.begun = True
        self._sources = {(table.spec.name, table.removed_before): table for table in self._model.tables}
        if state and line_of(state["history"]) == line_of(self._history):
            made = [(table, each["compared"]) for each in state["tables"] if (table := self._make(each))]
            for table, compared in made:
                table.note_compared(table.dirty, table.clean, compared)
            self.state = ViewState(tuple(table for table, _ in made), state["head"], state["compared"])
        head = self.state.head
        try:
            with _reading():
                for record in self._log.heads(head.number if head else 0):
                    if head is None or record["number"] > head.number:
                        self._heads.append(record)
                    elif record["number"] == head.number and record["seal"] != head.seal:
                        raise _Lost(f"the log has another release {head.number} than the checkpoint")
                    elif record["seal"] == head.seal:
                        self._clean_at = record["compared"]
        except _Lost as error:
            self.lost = str(error)
        keys = {each.key: each.table for each in sources(self.owner, self.state)}
        loaded = [keys.pop(entry.key, None) for entry in entries]
        for key in keys:
            self.lost = f"the checkpoint has no rows of table {key.name!r}"
        return loaded

    def restored(self, dirty: Mapping[TableKey, tuple[Ids, Versions]]) -> None:
        """Go on once all rows of the tables are loaded; see `ViewRecovery.restored`."""
        none = NONE_DIRTY.ids, NONE_DIRTY.since
        for table in self.state.tables:
            ids, since = dirty.get(TableKey(self.owner, table.name, table.born), none)
            table.restore(ids, since, table.compared)
        self.state = replace(self.state, backlog={table.name: left_of(table) for table in self.state.tables})
        if self._clean_at > self.state.compared_version:
            self._nothing_dirty(self._clean_at)

    def replay(self, version: int) -> None:
        """Make again the releases that were made of a version, which the model's tables are at.

        Raises:
            StorageFailed: there is no room for tables, or the log cannot be read now.
        """
        try:
            while not self.lost and self._heads and self._heads[0]["version"] <= version:
                self._make_again(self._heads.popleft(), version)
        except _Lost as error:
            self.lost = str(error)

    def end(self, version: int) -> None:
        """Note that all is read, and `version` is the model's newest."""
        newest = max([self.state.compared_version, *(each["version"] for each in self._heads)])
        if newest > version and not self.lost:
            self.lost = f"it is made of version {newest}, and the model's newest is {version}"

    def _make_again(self, record: Mapping[str, Any], version: int) -> None:
        with _reading():
            self._check(record, version)
            whole = {"tables": self.state.described, **record}
            number, ids = record["number"], self._log.ids(record)
        if record["from"] > self.state.compared_version:
            self._nothing_dirty(record["from"])
        plan = self._plan(whole["tables"], number)
        making = Making(self.state, plan, plan.new[0].stamp if plan.new else 0, self.owner)
        while not making.go_on():
            pass
        making.compare_rest(version)
        by_name = {each["table"]: some for each, some in zip(whole["tables"], ids, strict=True)}
        taken = [members(table.dirty.ids, by_name[table.name]) for table in plan.tables]
        for table, mask in zip(plan.tables, taken, strict=True):
            if np.count_nonzero(mask) != len(by_name[table.name]):
                raise _Lost(f"release {number} took rows of table {table.name!r} that had not changed")
        _, _, backlog = making.begin_update(taken, number)
        while not making.go_on_updating():
            pass
        self.state = ViewState(plan.tables, whole, version, backlog)
        if record["compared"] > version:
            self._nothing_dirty(record["compared"])

    def _check(self, record: Mapping[str, Any], version: int) -> None:
        """Check that a release comes next, and that it was made of this version of the model."""
        head, number, seal = self.state.head, record["number"], self._model.applied
        if (number, record["after"]) != ((head.number + 1, head.seal) if head else (number, 0)):
            raise _Lost(f"the log does not have all releases before release {number}")
        if record["version"] != version:
            raise _Lost(f"release {number} was made of version {record['version']}, which was before it")
        made = record["statistics"]["made_unix_ns"]
        if seal and head and release_checksum(head.seal, number, seal, made) != record["seal"]:
            raise _Lost(f"release {number} was made of another version {version} than the model has")

    def _nothing_dirty(self, version: int) -> None:
        """Go on from a version at which no row was dirty."""
        for table in self.state.tables:
            table.forget_dirty(version)
        self.state = self.state.without_dirty(version)

    def _plan(self, described: Sequence[Mapping[str, Any]], number: int) -> ReleasePlan:
        """The tables that a release has led to."""
        there = {(table.name, table.born): table for table in self.state.tables}
        tables, new, growth = list[ViewTable](), list[ViewTable](), list[Callable[[], None]]()
        for each in described:
            table = there.get((each["table"], each["born"]))
            if table and table.delivery.spec.rows < each["rows"]:
                growth.append(table.grown(delivery_of_record(each, table.source.spec)))
            elif table is None and each["born"] == number and (table := self._make(each)):
                new.append(table)
            tables += [table] if table else []
        return ReleasePlan(tuple(tables), tuple(new), tuple(growth))

    def _make(self, record: Mapping[str, Any]) -> ViewTable | None:
        """An empty table, as it is written down; None where the model does not have that table any more, though it
        may have another of that name.
        """
        if (source := self._sources.get((record["table"], record["source"]))) is None:
            return None
        delivery, memory = delivery_of_record(record, source.spec), self._model.memory
        table = ViewTable(source, delivery, memory, record["born"], record["stamp"])
        table.sent.removed_before = record["replaces"]
        return table


def sources(owner: str, state: ViewState) -> list[SourceTable]:
    """The tables of a view as checkpoints have them. Norms that are sent are a table beside that of the rows."""
    return [
        SourceTable(TableKey(owner, table.name, born), each, table_record(table), dirty)
        for table in state.tables
        for born, each in zip((table.born, -table.born), table.stamped, strict=False)
        for dirty in [(table.dirty.ids, table.dirty.since) if each is table.held else None]
    ]


def state_record(history: str, state: ViewState) -> dict[str, Any]:
    """What a checkpoint has of a view beside the rows of its tables: what `Replay.begin` begins with."""
    tables = [table_record(table) | {"compared": table.compared} for table in state.tables]
    return {"history": history, "compared": state.compared_version, "head": state.record, "tables": tables}

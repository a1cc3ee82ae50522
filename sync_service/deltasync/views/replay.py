"""Rebuild a view: load it from a checkpoint, then repeat the releases in the log at their versions."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np

from deltasync.base.errors import InvalidInput, StorageFailed
from deltasync.checkpoints.manifest import TableEntry, TableKey
from deltasync.checkpoints.writing import SourceTable
from deltasync.core.policy import Policy
from deltasync.core.position import line_of
from deltasync.core.rows import Ids, members
from deltasync.core.seal import release_checksum
from deltasync.core.stamped_table import StampedTable
from deltasync.core.table_form import form_of_record
from deltasync.log.log_store import LogUnavailable
from deltasync.log.volume import VolumeFailed
from deltasync.model.applied_tables import key_of
from deltasync.model.model import Model
from deltasync.views.decision import ReleaseOptions
from deltasync.views.log import ViewLog, ViewState, table_record
from deltasync.views.release_maker import ReleaseBuild, ReleasePlan, split_dirty
from deltasync.views.table import NONE_DIRTY, Versions, ViewTable


class _Lost(Exception):
    """The view cannot be rebuilt."""


@contextmanager
def _reading() -> Iterator[None]:
    """Turn invalid records of the log into `_Lost`. Let temporary read errors pass."""
    try:
        yield
    except (LogUnavailable, VolumeFailed):
        raise
    except StorageFailed as error:
        raise _Lost(str(error)) from error
    except (LookupError, TypeError, ValueError) as error:
        raise _Lost(f"a record of the log is invalid ({error!r})") from error


class Replay:
    """Rebuilds a view, on the model's thread, without tables that the model no longer has: a `ViewRecovery`.

    Attributes:
        begun: whether it has read the records of the view.
        state: the state of the view.
        lost: why the view cannot be rebuilt; empty if it can.
    """

    def __init__(self, owner: str, model: Model, log: ViewLog, history: str, options: ReleaseOptions) -> None:
        self.owner, self._model, self._log, self._history, self._options = owner, model, log, history, options
        self.discard()

    def discard(self) -> None:
        """Discard the result of an earlier `restore`."""
        self.begun = False
        self.state = ViewState()
        self.lost = ""
        self._sources = dict[tuple[str, int], StampedTable]()
        self._heads = deque[dict[str, Any]]()
        # The version, from the log, at which nothing was dirty after the release in the checkpoint.
        self._clean_at = 0

    def restore(self, state: Mapping[str, Any] | None, entries: Sequence[TableEntry]) -> list[StampedTable | None]:
        """Begin with the tables of a checkpoint; see `ViewRecovery.restore`."""
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
                        raise _Lost(f"the log and the checkpoint have different releases {head.number}")
                    elif record["seal"] == head.seal:
                        self._clean_at = record["compared"]
        except _Lost as error:
            self.lost = str(error)
        keys = {each.key: each.table for each in sources(self.owner, self.state)}
        loaded = [keys.pop(entry.key, None) for entry in entries]
        for key in keys:
            self.lost = f"the checkpoint lacks the rows of table {key.name!r}"
        return loaded

    def loaded(self, dirty: Mapping[TableKey, tuple[Ids, Versions]]) -> None:
        """Continue once all rows of the tables are loaded; see `ViewRecovery.loaded`."""
        none = NONE_DIRTY.ids, NONE_DIRTY.since
        for table in self.state.tables:
            ids, since = dirty.get(TableKey(self.owner, table.name, table.born), none)
            table.restore(ids, since, table.compared)
        nothing = ((table, np.zeros(len(table.dirty), np.bool_)) for table in self.state.tables)
        self.state = replace(self.state, backlog={each.name: split_dirty(each, mask)[1] for each, mask in nothing})
        if self._clean_at > self.state.compared_version:
            self._nothing_dirty(self._clean_at)

    def give_up(self, why: str) -> None:
        """Give the view up; see `ViewRecovery.give_up`."""
        self.lost = self.lost or why

    def replay(self, version: int) -> None:
        """Repeat the releases made from a version, with the model's tables at that version."""
        try:
            while not self.lost and self._heads and self._heads[0]["version"] <= version:
                self._make_again(self._heads.popleft(), version)
        except _Lost as error:
            self.lost = str(error)

    def end(self, version: int) -> None:
        """After the last record, check that the view is not ahead of the model's newest version."""
        newest = max([self.state.compared_version, *(each["version"] for each in self._heads)])
        if newest > version and not self.lost:
            self.lost = f"it was made from version {newest}, but the model's newest is {version}"

    def _make_again(self, record: Mapping[str, Any], version: int) -> None:
        with _reading():
            self._check(record, version)
            whole = {"tables": self.state.described, **record}
            number, ids = record["number"], self._log.ids(record)
        if record["from"] > self.state.compared_version:
            self._nothing_dirty(record["from"])
        plan = self._plan(whole["tables"], number)
        if record.get("kept_id"):
            plan = self._with_kept(plan, record)
        stamp = plan.new[0].stamp if plan.new else 0
        build = ReleaseBuild(self.state, plan, stamp, self.owner, self._options)
        while not build.compare_some():
            pass
        build.compare_rest(record["version"])
        by_name = {each["table"]: some for each, some in zip(whole["tables"], ids, strict=True)}
        for name, missing in () if plan.kept_tables else self._model.tables.missing.items():
            if name in by_name and members(missing, by_name[name]).any():
                raise _Lost(f"release {number} took rows of table {name!r} that damage has cost")
        taken = [members(table.dirty.ids, by_name[table.name]) for table in plan.tables]
        for table, mask in zip(plan.tables, taken, strict=True):
            if np.count_nonzero(mask) != len(by_name[table.name]):
                raise _Lost(f"release {number} took rows of table {table.name!r} that were not dirty")
        _, _, backlog = build.begin_update(taken, number)
        while not build.update_some():
            pass
        if plan.kept_tables:
            plan.return_to(self._model.tables)
        self.state = ViewState(plan.tables, whole, record["version"], backlog)
        if record["compared"] > record["version"]:
            self._nothing_dirty(record["compared"])

    def _check(self, record: Mapping[str, Any], version: int) -> None:
        """Check that a release is the next one, made from this version of the model."""
        head, number, seal = self.state.head, record["number"], self._model.tables.seal
        kept = bool(record.get("kept_id"))
        if (number, record["after"]) != ((head.number + 1, head.seal) if head else (number, 0)):
            raise _Lost(f"the log lacks releases before release {number}")
        if record["version"] != version and not kept:
            raise _Lost(f"release {number} was made from version {record['version']}, before version {version}")
        made = record["statistics"]["made_unix_ns"]
        if seal and head and not kept and release_checksum(head.seal, number, seal, made) != record["seal"]:
            raise _Lost(f"release {number} was made from a version {version} that differs from the model's")

    def _with_kept(self, plan: ReleasePlan, record: Mapping[str, Any]) -> ReleasePlan:
        """The plan of a release that was made from a kept version, with the tables of that version."""
        try:
            kept = self._model.load_kept(record["kept_id"], Policy.from_dict(record["policy"]), replaying=True)
        except (InvalidInput, StorageFailed) as error:  # Others must not wait for this view.
            raise _Lost(f"kept version {record['version']} cannot be loaded: {error}") from error
        for table in plan.new:
            table.source = kept[key_of(table.source)]
        return replace(plan, kept_tables=kept)

    def _nothing_dirty(self, version: int) -> None:
        """Move to a version at which no row was dirty."""
        for table in self.state.tables:
            table.note_clean(version)
        self.state = self.state.without_dirty(version)

    def _plan(self, described: Sequence[Mapping[str, Any]], number: int) -> ReleasePlan:
        """The tables of the view after a release."""
        there = {(table.name, table.born): table for table in self.state.tables}
        tables, new, growth = list[ViewTable](), list[ViewTable](), list[Callable[[], None]]()
        for each in described:
            table = there.get((each["table"], each["born"]))
            if table and table.form.spec.rows < each["rows"]:
                growth.append(table.grown(form_of_record(each, table.source.spec)))
            elif table is None and each["born"] == number and (table := self._make(each)):
                new.append(table)
            tables += [table] if table else []
        return ReleasePlan("the log has it", tuple(tables), tuple(new), tuple(growth))

    def _make(self, record: Mapping[str, Any]) -> ViewTable | None:
        """Make an empty table from its record; None if the model no longer has that table."""
        if (source := self._sources.get((record["table"], record["source"]))) is None:
            return None
        form, memory = form_of_record(record, source.spec), self._model.memory
        table = ViewTable(source, form, memory, record["born"], record["stamp"])
        table.sent.removed_before = record["replaces"]
        return table


def sources(owner: str, state: ViewState) -> list[SourceTable]:
    """The tables of a view for checkpoints. The norms of `Mode.IDS` are a separate table beside the rows."""
    return [
        SourceTable(TableKey(owner, table.name, born), each, table_record(table), dirty)
        for table in state.tables
        for born, each in zip((table.born, -table.born), table.stamped, strict=False)
        for dirty in [(table.dirty.ids, table.dirty.since) if each is table.held else None]
    ]

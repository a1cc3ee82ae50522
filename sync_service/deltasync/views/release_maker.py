"""Make the releases of a view, one after the other.

A release is built on the model's thread, in turns between which cuts are applied: rows are copied and compared in
blocks, chosen at one version, and updated; a row that a cut is about to change is updated just before. Then its
head and row ids go to the log. Replicas and checkpoints see it once these are on disk. A release that the log
refused is written again before anything else. After a crash in between, it does not exist, and no replica has it.

The log needs only the row ids, because a replay builds each release again with the same code at the same version.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from typing import Any, TypeAlias

import numpy as np

from deltasync.base.clock import FOREVER_NS, steady_ns
from deltasync.base.errors import StorageFailed
from deltasync.base.logs import Progress
from deltasync.base.threads import in_own_thread
from deltasync.checkpoints.kept_version import KeptVersion
from deltasync.checkpoints.manifest import TableKey
from deltasync.core.policy import Policy
from deltasync.core.precopy import PreCopy
from deltasync.core.rows import DamagedRows, Ids, Mask, RowBatch, members
from deltasync.core.seal import Seal
from deltasync.core.stamped_table import StampedTable
from deltasync.core.table_form import TableForm
from deltasync.core.tables import Shard, TableKind
from deltasync.kernels.dirty_rows import split_amounts
from deltasync.log.log_store import LogUnavailable
from deltasync.log.volume import VolumeFailed
from deltasync.model.applied_tables import key_of
from deltasync.model.feed import Backlog, ReleaseStatistics, RowTotals, total
from deltasync.model.model import Model
from deltasync.model.releases import FrozenRelease, Head, Releases
from deltasync.views.decision import DirtyRows, ReleaseOptions, pick
from deltasync.views.log import (
    ReleaseHistory,
    ViewLog,
    ViewState,
    head_of_record,
    state_record,
    table_record,
)
from deltasync.views.table import ReplicaComparison, RowUpdate, ViewTable

logger = logging.getLogger(__name__)

GoesOn: TypeAlias = Callable[[], bool]


@dataclass(frozen=True)
class ReleasePlan:
    """What a release does, with which tables, and why.

    Attributes:
        reason: why it is made.
        tables: the tables of the view after it, by slot.
        new: the tables that it creates.
        growth: functions that enlarge others, for the model's thread.
        policy: the consumer's policy.
        overdue_version: rows dirty since this version or longer are overdue.
        goes_on: checks on the model's thread whether to make the release after all.
        kept: the kept version that replicas are to hold exactly; None = the model's newest version.
        kept_tables: its tables.
    """

    reason: str
    tables: tuple[ViewTable, ...]
    new: tuple[ViewTable, ...] = ()
    growth: tuple[Callable[[], None], ...] = ()
    policy: Policy = field(default_factory=Policy)
    overdue_version: int = 0
    goes_on: GoesOn = lambda: True
    kept: KeptVersion | None = None
    kept_tables: Mapping[TableKey, StampedTable] = field(default_factory=dict)

    def return_to(self, tables: Iterable[StampedTable]) -> None:
        """Read from the model's tables again after a release from a kept version, made or not."""
        live = {key_of(table): table for table in tables}
        for table in self.tables:
            if source := live.get(key_of(table.source)):
                table.source = source
            else:
                table.source.removed = True  # The model has removed it meanwhile.


class Stage(Enum):
    """How far a release is that is not on disk yet."""

    UPDATING = "rows are being updated"
    WRITING = "on its way to the log"
    REFUSED = "refused by the log"


@dataclass
class PendingRelease:
    """A release that is not on disk yet: the state of the view with it, and the rows that it took, by slot.

    The model's thread sets `stage`; after the turns, the loop does. Replicas at the last release get `frozen`.
    """

    state: ViewState
    ids: Sequence[Ids]
    stage: Stage = Stage.UPDATING
    frozen: FrozenRelease | None = None


class ReleaseMaker:
    """Makes the releases of one view, in the event loop, one call at a time. `pending` is not on disk yet."""

    def __init__(
        self,
        consumer: str,
        model: Model,
        log: ViewLog,
        history: str,
        releases: Releases,
        changed: Callable[[FrozenRelease | None], None],
        options: ReleaseOptions,
    ) -> None:
        """Call `changed` with each release, if `releases` has memory for its rows, and after each failure."""
        self.state = ViewState()
        self.history = ReleaseHistory(history, options.known_releases)
        self.pending: PendingRelease | None = None
        self._consumer, self._model, self._log, self._options = consumer, model, log, options
        self._releases, self._changed = releases, changed

    async def resume(self, state: ViewState) -> None:
        """Continue from the end of a replay."""
        self.state = state
        if state.head:
            try:
                heads = await in_own_thread(self._log.heads_before, state.record)
            except (LogUnavailable, VolumeFailed):
                raise
            except StorageFailed as error:  # This only affects replicas that were away, which get more rows.
                logger.warning("consumer %s: cannot read releases before the newest: %s", self._consumer, error)
                heads = []
            first, most = state.record["first_version"], self._options.known_releases
            self.history = ReleaseHistory(self.history.id, most, first, heads)
            self.history.add(state.head, -FOREVER_NS)
            self._log.note(state.record)  # It may exist only in a checkpoint.

    async def plan(
        self, reason: str, forms: Iterable[tuple[StampedTable, TableForm]], **fields: Any
    ) -> ReleasePlan:
        """Plan a release of tables, each in its form. Allocate those that the view lacks.

        `fields` are further fields of the plan.
        """

        def allocate() -> ReleasePlan:
            tables, new, growth = list[ViewTable](), list[ViewTable](), list[Callable[[], None]]()
            for source, form in forms:
                key = key_of(source)
                same = (each for each in self.state.tables if key_of(each.source) == key and each.becomes(form))
                if table := next(same, None):
                    growth += [table.grown(form)] if table.form != form else []
                else:
                    table = ViewTable(source, form, self._model.memory)
                    new.append(table)
                tables.append(table)
            return ReleasePlan(reason, tuple(tables), tuple(new), tuple(growth), **fields)

        return await asyncio.to_thread(allocate)

    async def make(self, plan: ReleasePlan) -> None:
        """Make the next release, if there is anything to release. Call `finish` before planning it."""
        logger.debug("consumer %s: a release, because %s", self._consumer, plan.reason)
        try:
            turns = self._turns(plan)
            next(turns)
            while await self._model.on_thread(_turn, turns, self._at_once):
                pass
        except BaseException:
            self._changed(None)
            raise
        await self.finish()

    async def finish(self) -> None:
        """Write the pending release to the log, if there is one, also if the log refused it before; publish it."""
        if (pending := self.pending) is None:
            return
        frozen = None
        try:
            await self._write(pending)
            self.pending, frozen = None, pending.frozen
        finally:
            self._changed(frozen)

    async def _write(self, pending: PendingRelease) -> None:
        if pending.stage is Stage.UPDATING:
            self._model.tables.check_sound()
            raise RuntimeError(f"tables of consumer {self._consumer!r} are between two releases")
        pending.stage = Stage.WRITING
        view = {"history": self.history.id, "model_history": self._model.history}
        record = dict(pending.state.record)
        if pending.state.described == self.state.described:
            del record["tables"]
        try:
            await in_own_thread(self._log.write, record, pending.ids, None if self.state.head else view)
        except Exception:
            pending.stage = Stage.REFUSED
            raise
        self.history.first_version = record["first_version"]
        self.history.add(head_of_record(record), steady_ns())
        self.state = pending.state

    @property
    def _at_once(self) -> bool:
        """Whether a new run has begun. Its rows do not fit those of the last run, so they must all go together."""
        return any(seal.at_once for seal in self._model.seals.after(self.state.compared_version))

    # On the model's thread.

    def _turns(self, plan: ReleasePlan) -> Generator[None, bool, None]:
        """Build a release in turns, each of which is sent `_at_once`. It ends early if there is nothing to do."""
        at_once = yield
        before, tables = self.state, self._model.tables
        if not (seal := tables.seal):
            return
        stamp = before.head.number + 1 if before.head else seal.version + 1
        if not before.head and all(table.form == TableForm.unchanged(table.form.spec) for table in plan.new):
            stamp = 0  # Replicas already hold these rows of the model, from before the policy.
        try:
            build = ReleaseBuild(before, plan, stamp, self._consumer, self._options)
            while (seal := tables.seal) and plan.goes_on():
                if build.compare_some():
                    break
                at_once = yield
            else:
                return
            # The newest cut may be applied before the event loop sees its seal.
            at_once = at_once or (seal.at_once and seal.version > before.compared_version)
            if self._take(build, plan, plan.kept.seal if plan.kept else seal, at_once=at_once):
                while not build.update_some():
                    yield
                if pending := self.pending:
                    pending.stage = Stage.WRITING
                    if build.sent is not None and pending.state.head:
                        sent = [table.sent for table in plan.tables]
                        pending.frozen = self._releases.of_cut(build.sent, sent, pending.state.head)
        finally:
            if plan.kept:
                plan.return_to(tables)

    def _take(self, build: "ReleaseBuild", plan: ReleasePlan, seal: Seal, *, at_once: bool) -> bool:
        """Choose rows at the version of a seal and begin to update them. Return whether there is a release."""
        before, last, made_unix_ns = self.state, self.state.statistics, time.time_ns()
        build.compare_rest(seal.version)
        picked = pick(
            build.dirty(plan.overdue_version),
            plan.policy,
            last.taken.rows if last and seal.version == before.compared_version else 0,
            kept=seal.version if plan.kept else 0,
            at_once=at_once,
            new_tables=[table.sent.counts.changed for table in plan.new],
        )
        kept = {"kept_id": plan.kept.id, "policy": plan.policy.as_dict()} if plan.kept else {}
        # Replicas wait until the view has the kept version in the policy's form, even if no row differs.
        same = before.head and before.described == [table_record(table) for table in plan.tables]
        same = same and all(before.record.get(each) == kept.get(each) for each in ("kept_id", "policy"))
        if same and not any(mask.any() for mask in picked.taken):
            self.state = before.without_dirty(seal.version)
            self._log.note(self.state.record)
            return False
        number, first_version = max(build.stamp, seal.version), (build.stamp or seal.version + 1) - 1
        if before.head:
            number, first_version = before.head.number + 1, before.record["first_version"]
        for table in plan.new:
            table.born, removed = number, table.source.removed_before
            # Replicas may hold rows of an earlier table of that name, which this one never had.
            table.sent.removed_before = number - 1 if removed and before.head else removed
        # A replica that holds the last release gets rows as they are encoded, instead of reading them again.
        ids, taken, backlog = build.begin_update(
            picked.taken, number, most_sent_bytes=0 if plan.new else self._releases.room * self._releases.followed
        )
        head = replace(Head.of(seal, number), rows=taken.rows, bytes=taken.bytes)
        head = replace(head, kept=plan.kept.name if plan.kept else "")
        left = total(each.amount for each in backlog.values())
        statistics = ReleaseStatistics(number, seal.version, made_unix_ns, taken, left, picked.reason)
        record = {
            **asdict(self.history.sealed(head, seal, made_unix_ns)),
            "after": before.head.seal if before.head else 0,
            "from": before.compared_version,
            "compared": 0,
            "statistics": asdict(statistics),
            "rows_taken": [len(some) for some in ids],
            "tables": [table_record(table) for table in plan.tables],
            "first_version": first_version,
            **kept,
        }
        self.pending = PendingRelease(ViewState(plan.tables, record, seal.version, backlog), ids)
        return True

    @property
    def visible(self) -> ViewState | None:
        """The state for replicas; None while a release is not on disk yet."""
        return None if self.pending else self.state

    @property
    def latest(self) -> ViewState:
        """The state of the tables, even if the log does not have the release yet."""
        pending = self.pending  # Read once, because the event loop may set it to None.
        return pending.state if pending and pending.stage is not Stage.UPDATING else self.state

    def checkpoint_state(self) -> dict[str, Any] | None:
        """The state for a checkpoint, without tables; None while a release is being written. It includes a refused
        one, because the log may need a checkpoint before it has room again.
        """
        written = self.pending is None or self.pending.stage is Stage.REFUSED
        return state_record(self.history.id, self.latest) if written else None


def _turn(turns: Generator[None, bool, None], at_once: bool) -> bool:
    """Run one turn on the model's thread. Return whether there are more."""
    try:
        turns.send(at_once)
    except StopIteration:
        return False
    return True


class ReleaseBuild:
    """An unfinished release, of a maker or of a replay. Used on the model's thread, by one call at a time.

    Rows of new tables get `stamp`; 0 = their stamps in the model. `sent` has the updated rows as sent, with their
    tables' slots; None = they are not collected.
    """

    def __init__(
        self, before: ViewState, plan: ReleasePlan, stamp: int, consumer: str, options: ReleaseOptions
    ) -> None:
        for grow in plan.growth:
            grow()
        self.stamp = stamp
        self._before, self._tables, self._options = before, plan.tables, options
        self._new = plan.new
        present = [table for table in plan.tables if table not in plan.new]
        if plan.kept_tables:
            for table in present:  # All rows are compared.
                table.source = source = plan.kept_tables[key_of(table.source)]
                table.note_clean(0)
                later = np.flatnonzero((table.held.stamps > 0) & (source.stamps[: table.held.slots] == 0))
                if len(later):  # Replicas hold rows that the version never had.
                    deletes = RowBatch.deletes(Shard.whole(source.spec), source.ids_of(later))
                    source.apply(deletes, max(1, source.counts.newest))
        for table in plan.new:
            table.stamp = stamp
        self._comparisons = {table: ReplicaComparison(table, before.compared_version + 1) for table in present}
        after = [table.compared if table in self._comparisons else 0 for table in plan.tables]
        self._block_bytes = options.copied_bytes if plan.new else options.compared_bytes
        self._copy = PreCopy([table.source for table in plan.tables], after, self._block_bytes)
        self._copied, self._updates = False, list[RowUpdate]()
        self.sent: list[tuple[int, RowBatch]] | None = None
        what = f"consumer {consumer!r}: reading rows of the model"
        self._progress = Progress(what, self._copy.left_bytes, "bytes")

    def compare_some(self) -> bool:
        """Copy or compare rows for a short time. Return whether only a little is left for `compare_rest`."""
        end, blocks = time.perf_counter() + self._options.turn_seconds, 0
        while not self._copied:
            if (block := self._copy.next_block(self._block_bytes)) is None:
                self._copied = True
                return not blocks  # If this call did work, the rest gets a call of its own.
            slot, ids = block
            self._compare(slot, ids)
            self._progress.add(len(ids) * self._tables[slot].source.spec.row_bytes)
            blocks += 1
            if time.perf_counter() >= end:
                return False
        return True

    def compare_rest(self, version: int) -> None:
        """Copy or compare all other rows, with the model's tables at `version`."""
        for slot, ids in self._copy.rest():
            self._compare(slot, ids)
        for comparison in self._comparisons.values():
            comparison.finish(version)
        for table in self._new:
            table.note_clean(version)

    def _compare(self, slot: int, ids: Ids) -> None:
        table = self._tables[slot]
        if comparison := self._comparisons.get(table):
            comparison.add(ids)
        else:
            table.copy(ids)

    def dirty(self, overdue_version: int) -> list[DirtyRows]:
        """The dirty rows by slot, none of new tables; overdue if dirty since `overdue_version` or longer."""
        result = dict[str, DirtyRows]()
        for table in self._tables:
            dirty, ranked = table.dirty, table.source.spec.kind.ranked
            forced = dirty.deleted if ranked else np.ones(len(dirty), np.bool_)
            overdue, row_bytes = dirty.since <= overdue_version, table.sent.spec.row_bytes
            result[table.name] = DirtyRows(dirty.ids, dirty.norms, dirty.never_sent, overdue, forced, row_bytes)
        # Force rows whose raw id changed. Otherwise a replica would return the old id's row for the new id.
        for table in self._tables:
            rows = result.get(table.source.spec.of)
            if table.source.spec.kind is TableKind.ID_MAP and rows:
                # A new map counts all changes since the other tables were compared.
                since = table.within(table.source.changed_since(self._before.compared_version))
                for ids in (result[table.name].ids, since):
                    np.logical_or(rows.forced, members(rows.ids, ids), out=rows.forced)
        return list(result.values())

    def begin_update(
        self, taken: Sequence[Mask], number: int, most_sent_bytes: int = 0
    ) -> tuple[list[Ids], RowTotals, dict[str, Backlog]]:
        """Start updating the dirty rows in the masks `taken`, by slot; collect them if below `most_sent_bytes`.

        Returns these rows ([n], ascending) by slot, the totals of the release with all rows of new tables, and the
        backlog of each table by name.
        """
        every, amounts, backlog, updates = list[Ids](), list[RowTotals](), dict[str, Backlog](), list[RowUpdate]()
        for table, mask in zip(self._tables, taken, strict=True):
            amount, backlog[table.name] = split_dirty(table, mask)
            if table in self._new:
                rows = table.sent.counts.changed
                amount = RowTotals(rows, rows * table.sent.spec.row_bytes, table.source.norm)
            amounts.append(amount)
            which = np.flatnonzero(mask)  # A few times faster than indexing with the mask.
            every.append(table.dirty.ids[which])
            update = RowUpdate(table, every[-1], table.dirty.norms[which], number, self._options.updated_bytes)
            updates.append(update)
        self._updates, of_release = updates, total(amounts)
        self.sent = [] if of_release.bytes < most_sent_bytes else None
        for each in updates:  # At the end, because an update that has begun must not fail.
            each.begin(collect=self.sent is not None)
        return every, of_release, backlog

    def update_some(self) -> bool:
        """Update rows for a short time, and return whether all are done. After an error, which is always
        `DamagedRows`, the tables are between two releases.
        """
        end = time.perf_counter() + self._options.turn_seconds
        while self._updates:
            try:
                if (update := self._updates[-1]).go_on():
                    self._updates.pop()
                    if self.sent is not None:
                        self.sent += [(len(self._updates), rows) for rows in update.sent or ()]
            except DamagedRows:
                raise
            except Exception as error:  # For example lack of memory: some rows are updated, others are not.
                table = self._tables[len(self._updates) - 1]
                raise DamagedRows(table.name, table.dirty.ids) from error
            if time.perf_counter() >= end:
                break
        return not self._updates


def split_dirty(table: ViewTable, taken: Mask) -> tuple[RowTotals, Backlog]:
    """The totals of the dirty rows in the mask `taken`, and the backlog of the others."""
    size, every = table.sent.spec.row_bytes, len(taken)
    rows, of_taken, of_left, oldest = split_amounts(table.dirty.norms, table.dirty.since, taken)
    left = RowTotals(every - int(rows), (every - int(rows)) * size, math.sqrt(of_left))
    return RowTotals(int(rows), int(rows) * size, math.sqrt(of_taken)), Backlog(
        left, table.source.norm, int(oldest)
    )

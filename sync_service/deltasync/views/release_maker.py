"""Make the releases of a view, one after the other.

A release is made on the model's thread. It first copies and compares rows in blocks, between which cuts are
applied. In a single call it then compares the rest and chooses its rows at that version. It updates them piece by
piece; if a cut is about to change a row, that row is updated just before. Then its head and row ids go to the log.
Replicas and checkpoints do not see the release until these are on disk. If the log refuses them, the release is
written again before anything else happens. After a crash in between, the release does not exist, and no replica
has it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from deltasync.base.clock import FOREVER_NS, steady_ns
from deltasync.base.errors import StorageFailed
from deltasync.base.threads import in_own_thread
from deltasync.base.words import counted
from deltasync.checkpoints.kept_version import KeptVersion
from deltasync.core.policy import Policy
from deltasync.core.rows import Ids
from deltasync.core.seal import Seal
from deltasync.core.stamped_table import StampedTable
from deltasync.core.table_form import TableForm
from deltasync.log.log_store import LogUnavailable
from deltasync.log.volume import VolumeFailed
from deltasync.model.feed import ReleaseStatistics, total
from deltasync.model.model import Model
from deltasync.model.releases import Head
from deltasync.views.log import (
    ReleaseHistory,
    ViewLog,
    ViewState,
    head_of_record,
    head_record,
    statistics_record,
    table_record,
)
from deltasync.views.making import Making, ReleasePlan
from deltasync.views.picking import Pick, pick
from deltasync.views.replay import state_record

logger = logging.getLogger(__name__)


class Wish(NamedTuple):
    """How to make the next release.

    Attributes:
        policy: the consumer's policy.
        overdue_version: rows dirty since this version or longer are overdue.
        goes_on: checks, on any thread, whether to make the release after all; None = always.
        kept: the kept version that replicas are to hold exactly; None = the model's newest version.
    """

    policy: Policy
    overdue_version: int
    goes_on: Callable[[], bool] | None
    kept: KeptVersion | None = None


class ReleaseMaker:
    """Makes the releases of one view. Runs in the event loop, one call at a time, unless stated otherwise.

    Attributes:
        state: the state of the view. Any thread may read it; it is replaced, never changed.
        history: the earlier releases.
    """

    def __init__(self, consumer: str, model: Model, log: ViewLog, history: str) -> None:
        self.state = ViewState()
        self.history = ReleaseHistory(history)
        self._consumer = consumer
        self._model = model
        self._log = log
        # A release that is not on disk yet: the view's state with it, and its row ids by slot. The model's thread
        # sets it; the event loop sets it to None once the release is on disk.
        self._made: tuple[ViewState, Sequence[Ids]] | None = None
        self._taking: tuple[ViewState, Sequence[Ids]] | None = None  # The same while rows are being updated.
        self._refused = False

    async def go_on_from(self, state: ViewState) -> None:
        """Continue from the end of a replay."""
        self.state = state
        if state.newest:
            try:
                heads = await in_own_thread(self._log.heads_before, state.record)
            except (LogUnavailable, VolumeFailed):
                raise
            except StorageFailed as error:  # This only affects replicas that were away, which get more rows.
                logger.warning("consumer %s: cannot read releases before the newest: %s", self._consumer, error)
                heads = []
            self.history = ReleaseHistory(self.history.id, state.record["first_version"], heads)
            self.history.add(state.newest.head, -FOREVER_NS)
            self._log.note(state.record)  # It may exist only in a checkpoint.

    async def plan(self, tables: Sequence[tuple[StampedTable, TableForm]]) -> ReleasePlan:
        """Allocate the tables of the next release.

        Args:
            tables: tables of the model, and the form in which replicas get each.

        Raises:
            StorageFailed: there is no room.
        """
        return await asyncio.to_thread(ReleasePlan.of, self.state.tables, tables, self._model.memory)

    async def make(self, wish: Wish | None, plan: ReleasePlan | None = None) -> None:
        """Make the next release, if there is anything to release.

        Args:
            wish: how to make it; None = only finish a release that the log refused.
            plan: the tables of the view after it; None = its present tables.

        Raises:
            StorageFailed: the log refused the release.
            DamagedRows: rows of the model do not match their digests.
        """
        await self._finish()
        if wish is None or (plan is None and self.state.head is None):
            return
        plan = plan or ReleasePlan(self.state.tables)
        making, done = await self._model.on_thread(self._begin, plan, wish, self._resyncs)
        try:
            while making and not done:
                done = await self._model.on_thread(self._go_on, making, wish, self._resyncs)
        finally:
            if making and wish.kept and not self._taking:
                await self._model.on_thread(making.let_go_kept, list(self._model.tables))
        await self._finish()

    async def _finish(self) -> None:
        """Write the pending release to the log, if there is one, and publish it."""
        if self._taking:
            self._model.tables.check_sound()
            raise RuntimeError(f"tables of consumer {self._consumer!r} are between two releases")
        if self._made is None:
            return
        (state, ids), self._refused = self._made, False
        view = {"history": self.history.id, "model_history": self._model.history}
        record = dict(state.record)
        if state.described == self.state.described:
            del record["tables"]
        try:
            await in_own_thread(self._log.write, record, ids, None if self.state.head else view)
        except StorageFailed:
            self._refused = True
            raise
        self.history.first_version = record["first_version"]
        self.history.add(head_of_record(record), steady_ns())
        self.state = state
        self._made = None

    @property
    def _resyncs(self) -> bool:
        """Whether a new run has begun. Its rows do not fit those of the last run, so they must all go together."""
        return any(seal.at_once for seal in self._model.seals.after(self.state.compared_version))

    # The methods below run on the model's thread.

    def _begin(self, plan: ReleasePlan, wish: Wish, resyncs: bool) -> tuple[Making | None, bool]:
        """Begin a release if anything was published. Also return whether it has ended; see `_go_on`."""
        seal, head = self._model.tables.seal, self.state.head
        if seal is None:
            return None, True
        stamp = head.number + 1 if head else seal.version + 1
        if head is None and all(table.form == TableForm.unchanged(table.form.spec) for table in plan.new):
            stamp = 0  # Replicas already hold these rows of the model, from before the policy.
        live = {table: table.source for table in plan.tables if table not in plan.new}
        try:
            making = Making(self.state, plan, stamp, self._consumer, wish.kept.version if wish.kept else 0)
        except BaseException:
            for table, source in live.items():
                table.source = source
            raise
        # A release from a kept version must first be known to the caller, which lets go of its tables.
        return making, not wish.kept and self._go_on(making, wish, resyncs)

    def _go_on(self, making: Making, wish: Wish, resyncs: bool) -> bool:
        """Continue a release. Return whether it has ended, made or cancelled."""
        if self._taking:
            return self._go_on_updating(making)
        seal = self._model.tables.seal
        if seal is None or (wish.goes_on and not wish.goes_on()):
            return True
        if not making.go_on():
            return False
        policy = wish.policy
        if wish.kept:
            seal, resyncs = wish.kept.seal, True
        # The newest cut may be applied before the event loop sees its seal.
        if resyncs or (seal.at_once and seal.version > self.state.compared_version):
            policy = replace(policy, top_k=None, top_k_per_table=False, max_bytes=None)
        newest = self.state.newest
        rest_after = newest.statistics.taken.rows if newest and seal.version == self.state.compared_version else 0
        making.compare_rest(seal.version)
        dirty = making.dirty(wish.overdue_version)
        picked = pick(dirty, policy, rest_after)
        described = [table_record(table) for table in making.tables]
        kept = dict[str, Any]()
        if wish.kept:
            kept = {"kept": wish.kept.id, "kept_name": wish.kept.name, "policy": wish.policy.as_dict()}
        # Replicas wait until the view has the kept version in the policy's form, even if no row differs.
        unchanged = self.state.head and described == self.state.described
        unchanged = unchanged and all(self.state.record.get(each) == kept.get(each) for each in ("kept", "policy"))
        if unchanged and not any(mask.any() for mask in picked.taken):
            self.state = self.state.without_dirty(seal.version)
            self._log.note(self.state.record)
            return True
        self._take(making, picked, seal, kept)
        return self._go_on_updating(making)

    def _take(self, making: Making, picked: Pick, seal: Seal, kept: Mapping[str, Any]) -> None:
        """Start updating the rows of a release at the compared version; `kept` has its kept version's fields."""
        before, made_unix_ns = self.state, time.time_ns()
        number, first_version = max(making.stamp, seal.version), (making.stamp or seal.version + 1) - 1
        if before.head:
            number, first_version = before.head.number + 1, before.record["first_version"]
        head = replace(Head.of(seal, number), kept=kept.get("kept_name", ""))
        head = self.history.sealed(head, seal, made_unix_ns)
        for table in making.new:
            table.born, removed = number, table.source.removed_before
            # Replicas may hold rows of an earlier table of that name, which this one never had.
            table.sent.removed_before = number - 1 if removed and before.head else removed
        ids, taken, backlog = making.begin_update(picked.taken, number)
        statistics = ReleaseStatistics(
            number=number,
            version=seal.version,
            made_unix_ns=made_unix_ns,
            taken=taken,
            backlog=total(each.amount for each in backlog.values()),
            reason=f"brings replicas to kept version {seal.version}" if kept else _reason(making, picked),
        )
        record = {
            **head_record(head),
            "after": before.head.seal if before.head else 0,
            "from": before.compared_version,
            "compared": 0,
            "statistics": statistics_record(statistics),
            "rows": [len(some) for some in ids],
            "tables": [table_record(table) for table in making.tables],
            "first_version": first_version,
            **kept,
        }
        self._taking = ViewState(making.tables, record, seal.version, backlog), ids

    def _go_on_updating(self, making: Making) -> bool:
        """Update more rows of a release. Return whether it is made."""
        if not making.go_on_updating():
            return False
        self._made = self._taking
        self._taking = None
        self._refused = False
        return True

    @property
    def shown(self) -> ViewState | None:
        """The state for replicas; None while a release is not on disk yet."""
        return None if self._taking or self._made else self.state

    @property
    def made(self) -> ViewState:
        """The state of the tables, even if the log does not have the release yet."""
        made = self._made  # Read once, because the event loop may set it to None.
        return made[0] if made else self.state

    def saved(self) -> dict[str, Any] | None:
        """The state for a checkpoint, without tables; None while a release is being written.

        A release that the log refused is included: the log may need a checkpoint before it has room again.
        """
        if self._taking or (self._made and not self._refused):
            return None
        return state_record(self.history.id, self.made)


def _reason(making: Making, picked: Pick) -> str:
    """Explain why a release takes these rows."""
    if not making.new:
        return picked.reason
    rows = counted(sum(table.sent.counts.changed for table in making.new), "row")
    tables = counted(len(making.new), "table")
    whole = f"took all {rows} of {tables} that the replicas did not have in this form"
    return f"{whole}; and {picked.reason}" if any(len(mask) for mask in picked.taken) else whole

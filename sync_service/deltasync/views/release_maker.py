"""Making the releases of a view, one after the other.

A release is made on the model's thread. First it copies and compares rows in blocks, between which cuts are
applied. In one call it then compares the rest, and chooses its rows at that version. It takes them piece by
piece; a row that a cut is about to change is taken just before. After that its head and the ids of its rows
go to the log. Until they are on disk nothing of it is shown: replicas and checkpoints wait. If the log
refuses them, they are tried again before anything else is done. After a crash in between, the release never
was: no replica was given it.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from deltasync.base.clock import FOREVER_NS, steady_ns
from deltasync.base.errors import StorageFailed
from deltasync.base.words import counted
from deltasync.core.delivery import Delivery
from deltasync.core.policy import Policy
from deltasync.core.rows import Ids
from deltasync.core.seal import Seal
from deltasync.core.stamped_table import StampedTable
from deltasync.log.log_store import LogUnavailable
from deltasync.log.volume import VolumeFailed
from deltasync.model.feed import ReleaseStatistics, total
from deltasync.model.model import Model
from deltasync.model.releases import Head
from deltasync.views.log import (
    ReleaseHistory,
    ViewLog,
    head_of_record,
    head_record,
    statistics_record,
    table_record,
)
from deltasync.views.making import Making, ReleasePlan
from deltasync.views.picking import Pick, pick
from deltasync.views.replay import state_record
from deltasync.views.state import ViewState

logger = logging.getLogger(__name__)


class Wish(NamedTuple):
    """What the next release is to be like.

    Attributes:
        policy: the consumer's policy.
        overdue_version: rows that are dirty since this version or before are overdue.
        goes_on: whether the release is still wanted. Any thread.
    """

    policy: Policy
    overdue_version: int
    goes_on: Callable[[], bool]


class ReleaseMaker:
    """Makes the releases of one view. Used in the event loop, by one call at a time, except where it is said.

    Attributes:
        state: where the view is. Any thread; replaced as a whole.
        history: the releases there were.
    """

    def __init__(self, consumer: str, model: Model, log: ViewLog, history: str) -> None:
        self.state = ViewState()
        self.history = ReleaseHistory(history)
        self._consumer = consumer
        self._model = model
        self._log = log
        # A release that is not on disk yet: where the view is with it, and the rows that it took, by slot. Set on
        # the model's thread; the event loop sets it to None once the release is there.
        self._made: tuple[ViewState, Sequence[Ids]] | None = None
        self._taking: tuple[ViewState, Sequence[Ids]] | None = None  # The same while its rows are taken.
        self._refused = False

    async def go_on_from(self, state: ViewState) -> None:
        """Go on from where a replay has led to."""
        self.state = state
        if state.newest:
            try:
                heads = await asyncio.to_thread(self._log.heads_before, state.record)
            except (LogUnavailable, VolumeFailed):
                raise
            except StorageFailed as error:  # Only positions of replicas that were away cannot be recognised.
                logger.warning("consumer %s: releases before the newest are not known: %s", self._consumer, error)
                heads = []
            self.history = ReleaseHistory(self.history.id, state.record["first_version"], heads)
            self.history.add(state.newest.head, -FOREVER_NS)
            self._log.note(state.record)  # Perhaps only a checkpoint has it.

    async def plan(self, tables: Sequence[tuple[StampedTable, Delivery]]) -> ReleasePlan:
        """Make room for the next release.

        Args:
            tables: tables of the model, and what replicas are to be sent of each.

        Raises:
            StorageFailed: there is none.
        """
        return await asyncio.to_thread(ReleasePlan.of, self.state.tables, tables, self._model.memory)

    async def make(self, wish: Wish | None, plan: ReleasePlan | None = None) -> None:
        """Make the next release, if there is anything to release.

        Args:
            wish: what it is to be like; None = only finish the one that the log has refused.
            plan: the tables that it leads to; None = those there are.

        Raises:
            StorageFailed: the log has refused it.
            DamagedRows: rows of the model do not fit their digests.
        """
        await self._finish()
        if wish is None or (plan is None and self.state.head is None):
            return
        plan = plan or ReleasePlan(self.state.tables)
        making, done = await self._model.on_thread(self._begin, plan, wish, self._resyncs)
        while making and not done:
            done = await self._model.on_thread(self._go_on, making, wish, self._resyncs)
        await self._finish()

    async def _finish(self) -> None:
        """Write down the release that was made, if it is not on disk yet, and show it."""
        if self._taking:
            self._model.check_sound()
            raise RuntimeError(f"tables of consumer {self._consumer!r} are at no release")
        if self._made is None:
            return
        (state, ids), self._refused = self._made, False
        view = {"history": self.history.id, "model_history": self._model.history}
        record = dict(state.record)
        if state.described == self.state.described:
            del record["tables"]
        try:
            await asyncio.to_thread(self._log.write, record, ids, None if self.state.head else view)
        except StorageFailed:
            self._refused = True
            raise
        self.history.first_version = record["first_version"]
        self.history.add(head_of_record(record), steady_ns())
        self.state = state
        self._made = None

    @property
    def _resyncs(self) -> bool:
        """Whether another run has begun, whose rows do not fit those of the run before: all go together."""
        return any(seal.resync for seal in self._model.seals.after(self.state.compared_version))

    # On the model's thread.

    def _begin(self, plan: ReleasePlan, wish: Wish, resyncs: bool) -> tuple[Making | None, bool]:
        """Begin a release, if anything was published; and whether it is through, see `_go_on`."""
        seal, head = self._model.applied, self.state.head
        if seal is None:
            return None, True
        stamp = head.number + 1 if head else seal.version + 1
        if head is None and all(table.delivery == Delivery.unchanged(table.delivery.spec) for table in plan.new):
            stamp = 0  # What replicas held of the model before there was a policy need not be sent to them again.
        making = Making(self.state, plan, stamp, self._consumer)
        return making, self._go_on(making, wish, resyncs)

    def _go_on(self, making: Making, wish: Wish, resyncs: bool) -> bool:
        """Go on with a release; whether it is through: made, or not wanted any more."""
        if self._taking:
            return self._go_on_updating(making)
        seal = self._model.applied
        if seal is None or not wish.goes_on():
            return True
        if not making.go_on():
            return False
        policy = wish.policy
        # The newest cut may be applied before the event loop knows of its seal.
        if resyncs or (seal.resync and seal.version > self.state.compared_version):
            policy = replace(policy, top_k=None, top_k_per_table=False, max_bytes=None)
        making.compare_rest(seal.version)
        dirty = making.dirty(wish.overdue_version)
        picked = pick(dirty, policy)
        described = [table_record(table) for table in making.tables]
        if self.state.head and described == self.state.described and not any(mask.any() for mask in picked.taken):
            self.state = self.state.without_dirty(seal.version)
            self._log.note(self.state.record)
            return True
        self._take(making, picked, seal)
        return self._go_on_updating(making)

    def _take(self, making: Making, picked: Pick, seal: Seal) -> None:
        """Begin to take the rows of a release, of a version that everything was compared at."""
        before, made_unix_ns = self.state, time.time_ns()
        number, first_version = max(making.stamp, seal.version), (making.stamp or seal.version + 1) - 1
        if before.head:
            number, first_version = before.head.number + 1, before.record["first_version"]
        head = self.history.sealed(Head.of(seal, number), seal, made_unix_ns)
        for table in making.new:
            table.born, removed = number, table.source.removed_before
            # Of another table of that name, replicas may hold rows that this one never had.
            table.sent.removed_before = number - 1 if removed and before.head else removed
        ids, taken, backlog = making.begin_update(picked.taken, number)
        statistics = ReleaseStatistics(
            number=number,
            version=seal.version,
            made_unix_ns=made_unix_ns,
            taken=taken,
            backlog=total(each.amount for each in backlog.values()),
            reason=_reason(making, picked),
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
        }
        self._taking = ViewState(making.tables, record, seal.version, backlog), ids

    def _go_on_updating(self, making: Making) -> bool:
        """Go on with the rows that a release takes; whether it is made."""
        if not making.go_on_updating():
            return False
        self._made = self._taking
        self._taking = None
        self._refused = False
        return True

    @property
    def shown(self) -> ViewState | None:
        """What replicas can be given; None while a release is not on disk yet."""
        return None if self._taking or self._made else self.state

    @property
    def made(self) -> ViewState:
        """Where the tables are, whether the log has the release or not."""
        made = self._made  # Once: the event loop may set it to None.
        return made[0] if made else self.state

    def saved(self) -> dict[str, Any] | None:
        """What a checkpoint has of it beside tables; None while a release is on its way to the disk.

        A release that the log refuses is part of it: there may be no room before a checkpoint lets the log be cut.
        """
        if self._taking or (self._made and not self._refused):
            return None
        return state_record(self.history.id, self.made)


def _reason(making: Making, picked: Pick) -> str:
    """Why a release takes these rows."""
    if not making.new:
        return picked.reason
    rows = counted(sum(table.sent.counts.changed for table in making.new), "row")
    tables = counted(len(making.new), "table")
    whole = f"took all of {rows} of {tables} that the replicas did not have in this form"
    return f"{whole}; and {picked.reason}" if any(len(mask) for mask in picked.taken) else whole

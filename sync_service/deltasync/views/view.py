"""A consumer's view: what its replicas hold, and the releases that bring them nearer to the model.

A release is in the log before anybody is given it, and only then written into the view's files: after a crash the
view claims nothing that the log could not give its replicas again.
"""

import asyncio
import math
import threading
import time
import uuid
from collections import deque
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from deltasync.core.delivery import Delivery
from deltasync.core.errors import StorageFailed
from deltasync.core.policy import Policy
from deltasync.core.position import Decision, Position, resume
from deltasync.core.seal import Seal
from deltasync.core.signals import Signal
from deltasync.core.stamps import StampedTable
from deltasync.feeds.model import Model
from deltasync.feeds.release import NO_TABLES, FrozenRelease, Head, Releases
from deltasync.storage.log import Log
from deltasync.storage.mapped_table import MappedTable
from deltasync.views.ranking import pick
from deltasync.views.release_writer import ReleaseWriter, look
from deltasync.views.statistics import Account, TableLeft, Taken, account_of, table_left, taken_of, with_left
from deltasync.views.store import StoredTable, ViewRecord, ViewStore
from deltasync.views.table import ViewTable

# Rows copied at once when a table of a view is made; between two copies cuts may be applied.
_COPIED_ROWS = 1 << 16
# Of releases older than these, which version they were made of is no longer known.
_KEPT_HEADS = 10_000


class View:
    """What the replicas of one consumer hold of a model, and what they are given next.

    Its tables are read and written on the model's thread, where no cut is applied meanwhile. Its releases are
    numbered from the version on at which it began.

    Attributes:
        model: the model it is a view of.
        history: the id of the view.
        head: the newest release, or None.
        seen: the version up to which rows that changed are known to be dirty.
        account: what the newest release took and left, or None.
        left: the dirty rows that the last look has left of each table, by name.
        trouble: why it does not have the tables that the policy wants; empty if it does.
    """

    def __init__(self, consumer: str, model: Model, log: Log, directory: Path) -> None:
        self.model = model
        self.history = uuid.uuid4().hex
        self.head: Head | None = None
        self.seen = 0
        self.account: Account | None = None
        self.left: dict[str, TableLeft] = {}
        self.trouble = ""
        self._store = ViewStore(log, consumer, directory)
        self._giving = ReleaseWriter(log, self._store.name)
        self._unwritten: tuple[Head, Account] | None = None
        self._kept: tuple[StoredTable, ...] = ()
        self._heads: deque[Head] = deque(maxlen=_KEPT_HEADS)
        self._forked = 0
        self._flushed = 0
        self._flushing = threading.Lock()
        self._signal = Signal()
        self._releases = Releases(model.run, self._sendable, directory)

    # What a replica's stream asks for, of a model as well.

    @property
    def tables(self) -> list[StampedTable]:
        """What replicas are sent; a table's index is its slot. Empty until something is published."""
        return [kept.table.sent for kept in self._kept]

    @property
    def view_tables(self) -> list[ViewTable]:
        """The same tables, with what is dirty in them."""
        return [kept.table for kept in self._kept]

    @property
    def deliveries(self) -> list[Delivery]:
        """What these tables are to the replicas."""
        return [kept.table.delivery for kept in self._kept]

    @property
    def position(self) -> Position:
        """What a replica that has every release holds."""
        return Position(self.history, self.head.number if self.head else 0)

    @property
    def left_rows(self) -> int:
        """Dirty rows that the last look has left."""
        return self.account.left_rows if self.account else 0

    @property
    def oldest(self) -> int:
        """The version since which the oldest of these rows is dirty; 0 = there is none."""
        return min((left.since for left in self.left.values() if left.rows), default=0)

    def release(self, after: int, whole: frozenset[int] = NO_TABLES) -> "asyncio.Task[FrozenRelease]":
        """What a replica at release `after` lacks, and all of the tables in the slots `whole`."""
        return self._releases.get(after, whole, self.position.number)

    def changed(self) -> Coroutine[None, None, Literal[True]]:
        """To be awaited: the head moving, or other tables, or trouble, from this call on."""
        return self._signal.changed()

    def resume(self, held: Position) -> tuple[Decision, Position]:
        """Whether a replica that holds `held` can go on from there, and what that is in this history.

        One that held all of the model when the view began holds what the view began with.
        """
        if held.history == self.model.history and 0 < held.number <= self._forked:
            decision = Decision(True, f"the replica holds version {held.number}, from before the policy")
            return decision, Position(self.history, held.number)
        decision = resume(held, self.history, self.position.number, unit="release")
        return decision, held if decision.yes else Position(self.history)

    def fits(self, policy: Policy) -> bool:
        """Whether it has the tables that the policy follows, as it wants them given."""
        return self.deliveries == [policy.delivery_of(table.spec) for table in self._followed(policy)]

    def may_serve(self, policy: Policy) -> bool:
        """Whether a replica may be given the tables there are: those of the policy, or at least of its mode where
        there is no room for others.
        """
        return self.fits(policy) or (
            bool(self.trouble) and all(each.mode is policy.mode for each in self.deliveries)
        )

    # Moving on: one call at a time.

    async def prepare(self, policy: Policy) -> None:
        """Have the tables that the policy follows, as it wants them given. Those it lacks are made, whole.

        Raises:
            StorageFailed: there is no room; the view is as it was.
        """
        try:
            if self.model.head and not self.fits(policy):
                await self._make(policy)
        except StorageFailed as error:
            self.trouble = str(error)
            self._signal.wake()
            raise
        self.trouble = ""

    async def make_release(self, policy: Policy, overdue_version: int) -> None:
        """Give the next rows, by the policy; those dirty since `overdue_version` or before are overdue.

        Raises:
            StorageFailed: not all of them could be written; these are still dirty.
        """
        try:
            await self.model.run(self._look_and_give, policy, overdue_version)
        finally:
            self._signal.wake()

    def version_of(self, release: int) -> int:
        """The version that what a replica at `release` holds was made of; of releases made before a restart only
        that it is not an earlier one than the view began with.
        """
        if self.head and release == self.head.number:
            return self.seen
        known = next(
            (head.version for head in reversed(tuple(self._heads)) if head.number <= release), self._forked
        )
        return min(release, known) if release <= self._forked else known

    async def count_lacking(self, release: int, tables: Sequence[ViewTable]) -> list[int]:
        """How many rows of each of these tables who holds `release` lacks."""
        return await self.model.run(lambda: [table.count_lacking(release, self.seen) for table in tables])

    # Coming back.

    def recover(self, meta: dict[str, Any]) -> None:
        """Come back as of the last flush, and the log after it. Blocks.

        Raises:
            StorageFailed: a file is damaged or missing.
        """
        record = ViewRecord(**{name: value for name, value in meta.items() if name != "tables"})
        if record.model_history != self.model.history:
            self._store.discard()  # What replicas hold is of another model: they need everything anyway.
            return
        self.history, self.seen = record.history, record.seen
        self._forked, self._flushed = record.forked, record.flushed
        self._kept = self._store.open(meta["tables"], {table.spec.name: table for table in self.model.tables})
        newest = record.flushed
        for newest, slot, payload in self._store.records(record.flushed):
            self._kept[slot].table.replay(payload, newest)
            self._giving.log_bytes += len(payload)
        for kept in self._kept:
            kept.table.count_digests()
        self._recover_head(newest)
        self._store.remove_unused(self._kept)

    def flush(self) -> None:
        """Put the view on disk and drop its records from the log. Blocks; any thread.

        Raises:
            StorageFailed: the log could not be written; nothing was lost.
        """
        with self._flushing:
            head, seen, kept = self.head, self.seen, self._kept
            if head and head.number != self._flushed:
                written = self._giving.log_bytes
                _flush(kept)
                self._write(kept, head.number, seen)
                self._giving.log_bytes -= written

    def should_flush(self, flush_bytes: int) -> bool:
        """Whether the log holds so many bytes of its releases."""
        return self._giving.log_bytes >= flush_bytes

    def discard(self) -> None:
        """Remove everything there is of it. Blocks."""
        with self._flushing:
            self.head = None
            self._store.discard()

    def _write(self, kept: tuple[StoredTable, ...], number: int, seen: int) -> None:
        histories = {"history": self.history, "model_history": self.model.history}
        record = ViewRecord(**histories, forked=self._forked, flushed=number, seen=seen)
        self._store.write(record, kept)
        self._flushed = number

    def _recover_head(self, newest: int) -> None:
        last = self._store.last_release()
        if last is None:
            return
        head, self.account = last
        # Of a release that was never finished the log may have some rows: no replica has them, all are given them.
        self.head = head if head.number >= newest else Head(newest, head.version, head.step, head.step_end_unix_ns)
        self._heads.append(self.head)

    # On the model's thread.

    def _look_and_give(self, policy: Policy, overdue_version: int) -> None:
        if self._unwritten:
            self._write_release(*self._unwritten)
        seal = self.model.applied
        if seal is None or self.head is None:
            return
        tables = self.view_tables
        dirty = look(tables, self.seen, policy, overdue_version)
        since = [table.since[rows.ids] for table, rows in zip(tables, dirty, strict=True)]
        picked = pick(dirty, policy)
        head = _head(self.head.number + 1, seal.version, seal)
        failure = self._giving.give(tables, dirty, picked.taken, head.number)
        # What could not be written is still dirty.
        given = [table.since[rows.ids] == 0 for table, rows in zip(tables, dirty, strict=True)]
        self.left = {
            table.source.spec.name: table_left(rows, ~mask, dirty_since, table.source.norm)
            for table, rows, mask, dirty_since in zip(tables, dirty, given, since, strict=True)
        }
        self._account_for(head, taken_of(dirty, given, picked.reason))
        self.seen = seal.version
        if failure:
            raise failure

    def _account_for(self, head: Head, taken: Taken) -> None:
        if taken.rows:
            self._unwritten = (head, account_of(head, time.time_ns(), taken, self.left.values()))
            self._write_release(*self._unwritten)
        elif self.account:
            self.account = with_left(self.account, self.left.values())

    def _sendable(self) -> tuple[list[StampedTable], Head | None]:
        """What may be sent: not what was given as a release that is not written down."""
        if self._unwritten:
            self._write_release(*self._unwritten)
        return self.tables, self.head

    def _write_release(self, head: Head, account: Account) -> None:
        self._store.write_release(head, account)
        self._advance(head, account)

    def _advance(self, head: Head, account: Account) -> None:
        """From here on replicas are given the release, which is written down."""
        self.head, self.account, self._unwritten = head, account, None
        self._heads.append(head)

    # Making tables.

    def _followed(self, policy: Policy) -> list[MappedTable]:
        return [table for table in self.model.tables if policy.follows(table.spec)]

    async def _make(self, policy: Policy) -> None:
        sources = self._followed(policy)
        wanted = [policy.delivery_of(source.spec) for source in sources]
        seen = self.seen if self.head else self.model.position.number
        # What replicas held of the model before there was a policy need not be sent to them again.
        as_it_was = self.head is None and all(each == Delivery.unchanged(each.spec) for each in wanted)
        number = seen if as_it_was else self.head.number + 1 if self.head else seen + 1
        try:
            # All of them first: where there is no room for one, nothing need be copied.
            kept = await asyncio.to_thread(self._had_or_made, sources, wanted)
            for each in kept:
                if each not in self._kept:
                    await self._copy(each, None if as_it_was else number)
            await asyncio.to_thread(_flush, kept)
            await self.model.run(self._install, kept, number, seen)
            self._signal.wake()
        finally:
            await asyncio.to_thread(self._store.remove_unused, self._kept)

    def _had_or_made(self, sources: Sequence[MappedTable], wanted: Sequence[Delivery]) -> tuple[StoredTable, ...]:
        have = {kept.table.delivery: kept for kept in self._kept}
        pairs = zip(sources, wanted, strict=True)
        return tuple(have.get(each) or self._store.make(source, each) for source, each in pairs)

    async def _copy(self, kept: StoredTable, release: int | None) -> None:
        ids = await self.model.run(kept.table.source.changed_since, 0)
        for start in range(0, len(ids), _COPIED_ROWS):
            await self.model.run(kept.table.copy, ids[start : start + _COPIED_ROWS], release)

    def _install(self, kept: tuple[StoredTable, ...], number: int, seen: int) -> None:
        seal = self.model.applied
        if seal is None:
            raise RuntimeError("a view is made of a model of which nothing is published")
        if self.head is None:
            self._forked, number = seen, max(number, seal.version)
        new = [each.table for each in kept if each not in self._kept]
        left = {each.table.source.spec.name: self._left_of(each) for each in kept}
        head = _head(number, seen, seal)
        account = account_of(head, time.time_ns(), _whole(new), left.values())
        with self._flushing:
            self._store.write_release(head, account)
            self._write(kept, number, seen)
            self._kept, self.seen, self.left = kept, seen, left
            self._advance(head, account)

    def _left_of(self, kept: StoredTable) -> TableLeft:
        """What is left of a table; nothing of one that is new."""
        table = kept.table.source
        before = self.left.get(table.spec.name) if kept in self._kept else None
        dirty = int(np.count_nonzero(kept.table.since))  # All that is known of them after a restart.
        return before or TableLeft(dirty, dirty * kept.table.sent.spec.row_bytes, table_norm=table.norm)


def _whole(tables: Sequence[ViewTable]) -> Taken:
    """What a release takes that gives whole tables."""
    rows = [table.sent.count_changed_since(0) for table in tables]
    size = sum(count * table.sent.spec.row_bytes for count, table in zip(rows, tables, strict=True))
    reason = f"took all {sum(rows)} rows of {len(tables)} tables that the replicas did not have in this form"
    return Taken(sum(rows), size, math.hypot(*(table.held.norm for table in tables)), reason)


def _flush(kept: Sequence[StoredTable]) -> None:
    for each in kept:
        each.table.flush()


def _head(number: int, version: int, seal: Seal) -> Head:
    return Head(number, version, seal.step, seal.step_end_unix_ns)

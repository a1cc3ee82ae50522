"""Views against a model of plain dictionaries: cuts, policies, releases, replicas, refusals, restarts."""

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.folders import fast_folder
from tests.support.local_model import LocalModel, Rows
from tests.support.plain_view import DirtyRow, PlainHeld, PlainModel, PlainRelease, PlainTable, norm_of
from tests.support.releases import live_rows
from tests.support.view_scenarios import bits_of, refuse, small_blocks

from deltasync.base.errors import StorageFailed
from deltasync.base.words import counted
from deltasync.core.digests import checksum_of
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.core.rows import Values
from deltasync.core.table_form import Mode, TableForm
from deltasync.core.tables import TableSpec
from deltasync.core.value_types import ValueType
from deltasync.model.feed import RowTotals
from deltasync.model.releases import FrozenRelease
from deltasync.views.table import ViewTable

TABLES = [TableSpec("a", 6, 3), TableSpec("ab", 5, 12, np.dtype("<f2")), TableSpec("c", 4, 1)]
VALUES = np.array([0.0, 1.0, -1.0, 0.5, -0.0, 3e38, -3e38, 1e-40, 6.5e4, 7.25, 1e20])
REPLICAS = 3


def row_of(table: TableSpec, kind: int) -> Values:
    values = VALUES[(kind * np.arange(1, table.dim + 1) + kind // 3) % len(VALUES)]
    largest = float(np.finfo(np.dtype(table.dtype)).max)  # type: ignore[type-var]
    row: Values = np.clip(values, -largest, largest).astype(table.dtype)
    return row


def changes_of(kinds: Mapping[tuple[int, int], int]) -> Mapping[str, Rows]:
    changes: dict[str, dict[int, Values]] = {table.name: {} for table in TABLES}
    for (number, row), kind in kinds.items():
        table = TABLES[number]
        changes[table.name][row % table.rows] = row_of(table, kind)
    return dict(changes)


@dataclass
class PlainReplica:
    """A replica: what it was told to hold, by table."""

    position: Position = field(default_factory=Position)
    tables: dict[str, Values] = field(default_factory=dict)

    def begin(self, given: list[TableForm], *, resync: bool) -> None:
        names = {each.spec.name for each in given}
        self.tables = {name: rows for name, rows in self.tables.items() if name in names and not resync}

    def take(self, release: FrozenRelease, given: list[TableForm], history: str) -> None:
        for each in given:
            table = each.wire_spec if each.mode is Mode.IDS else each.replica_spec
            rows = self.tables.setdefault(table.name, np.zeros((table.rows, table.dim), table.dtype))
            if (rows.shape, rows.dtype) != ((table.rows, table.dim), table.dtype):
                self.tables[table.name] = np.zeros((table.rows, table.dim), table.dtype)
        for slot, batch in live_rows(release).items():
            each = given[slot]
            norms = each.mode is Mode.IDS
            held = batch.values if norms else each.held(batch.values)
            self.tables[each.spec.name][batch.ids] = held
        assert release.head
        self.position = Position(history, release.head.number)

    def checksums(self, given: list[TableForm]) -> tuple[int, ...]:
        held = [self.tables[each.spec.name] for each in given]
        return tuple(checksum_of(np.arange(len(rows)), rows) for rows in held)


class Play:
    """A view and the plain model of it, doing the same things; what one holds is held against the other."""

    def __init__(self, directory: Path, policy: Policy) -> None:
        self.policy = policy
        self.plain = PlainModel()
        self.local = LocalModel(directory, options=small_blocks(100))
        self.view = self.local.view()
        self.replicas = [PlainReplica() for _ in range(REPLICAS)]
        self.at: dict[Position, dict[str, int]] = {}

    async def run(self, operations: list[tuple[str, Any]]) -> None:
        for table in TABLES[:2]:
            await self.add(table)
        for name, argument in [("cut", {(0, 0): 1, (1, 1): 2}), *operations]:
            await getattr(self, name)(argument)
            await self.check_lacking()
        await self.everything_is_reached()

    # -- operations

    async def add(self, table: TableSpec) -> None:
        await self.local.add(table)
        self.plain.tables += [PlainTable(table)] if table not in [t.table for t in self.plain.tables] else []

    async def more(self, _: Any) -> None:
        await self.add(TABLES[2])

    async def cut(self, kinds: Mapping[tuple[int, int], int]) -> None:
        names = {each.table.name for each in self.plain.tables}
        await self._cut({name: rows for name, rows in changes_of(kinds).items() if name in names})

    async def go_back(self, _: Any) -> None:
        """Dirty rows become what replicas hold."""
        await self._cut(
            {held.form.spec.name: {row: held.decoded(row) for row in held.dirty_since} for held in self.plain.held}
        )

    async def change(self, policy: Policy) -> None:
        self.policy = policy

    async def release(self, overdue: int) -> None:
        await self.prepare(overdue)
        if not self.view.state.head:
            return
        old, before = self._old(overdue), self.view.state.head.number
        await self.view.make_release(self.policy, old)
        await self.check_release(before, self.plain.release(self.policy, old))

    async def prepare(self, overdue: int) -> None:
        followed = [self.policy.form_of(t.table) for t in self.plain.tables if self.policy.follows(t.table)]
        if followed == [each.form for each in self.plain.held]:
            return
        old, before = self._old(overdue), self.view.state.head
        await self.view.prepare(self.policy, old)
        expected, new = self.plain.prepare(self.policy, old)
        number = before.number if before else self.plain.version - self.as_it_was(new)
        await self.check_release(number, expected, new, others=True)

    def as_it_was(self, new: list[PlainHeld]) -> bool:
        return all(each.form == TableForm.unchanged(each.form.spec) for each in new)

    def _old(self, overdue: int) -> int:
        return max(0, self.plain.version - overdue) if self.policy.max_age_seconds else 0

    async def overtake(self, kinds: Mapping[tuple[int, int], int]) -> None:
        """A cut comes, and a replica asks for rows, while a release is on its way to the disk."""
        await self.prepare(0)
        if not self.view.state.head:
            return
        loop = asyncio.get_running_loop()
        names = {each.table.name for each in self.plain.tables}
        changes = {name: rows for name, rows in changes_of(kinds).items() if name in names}
        before, asked = self.view.state.head.number, list[asyncio.Task[None]]()

        async def follow() -> None:
            asked.append(asyncio.create_task(self.follow(0)))

        def meanwhile(stream: str) -> None:
            if stream.startswith("heads/"):
                for each in (self.local.cut(changes), follow()):
                    asyncio.run_coroutine_threadsafe(each, loop).result(20)

        expected = self.plain.release(self.policy, 0)
        with self.local.log_that(meanwhile):
            await self.view.make_release(self.policy, 0)
        await self.check_release(before, expected, exact_lag=not asked)
        await asyncio.gather(*asked)
        if asked:
            self.plain.cut(changes)

    async def refuse(self, _: Any) -> None:
        """The log refuses a release: replicas are not given it before it is there."""
        await self.prepare(0)
        if not self.view.state.head:
            return
        before = self.view.state.head.number
        expected = self.plain.release(self.policy, 0)
        with self.local.log_that(refuse):
            with contextlib.suppress(StorageFailed):
                await self.view.make_release(self.policy, 0)
            assert self.view.position.number == before
        before += bool(expected.taken)
        expected = self.plain.release(self.policy, 0)
        await self.view.make_release(self.policy, 0)  # First what was refused, then what that has left.
        await self.check_release(before, expected)

    async def checkpoint(self, _: Any) -> None:
        await self.local.checkpoint()

    async def restart(self, _: Any) -> None:
        before = await bits_of(self.view)
        await self.local.close()
        self.local = await LocalModel.opened(self.local.directory, options=small_blocks(100))
        assert self.local.lost == {}
        self.view = self.local.view()
        if before.head:
            assert await bits_of(self.view) == before
            await self.check_held()

    async def follow(self, number: int) -> None:
        replica = self.replicas[number % REPLICAS]
        feed = self.view if self.view.tables else self.local.model
        decision, position = feed.continue_from(replica.position)
        release = await feed.release(position.number)
        assert isinstance(release, FrozenRelease)
        given = feed.forms
        replica.begin(given, resync=not decision.yes)
        replica.take(release, given, feed.history)
        checksums = replica.checksums(given)
        assert checksums == release.checksums
        # All replicas at the same release hold the same bits; of an empty table it does not matter.
        held = {each.spec.name: checksum for each, checksum in zip(given, checksums, strict=True) if checksum}
        assert self.at.setdefault(replica.position, held) == held

    async def _cut(self, changes: Mapping[str, Rows]) -> None:
        await self.local.cut(changes)
        self.plain.cut(changes)

    # -- checks

    async def check_release(
        self,
        before: int,
        expected: PlainRelease,
        new: Sequence[PlainHeld] = (),
        *,
        others: bool = False,
        exact_lag: bool = True,
    ) -> None:
        """The release that was just made, after the one with the number `before`, is the one that it had to be.

        `others`: it has other tables than the one before, of which some are `new`.
        """
        head = self.view.state.head
        assert head
        assert head.number == before + bool(expected.taken or others)
        await self.check_held()
        held = {table.name: table.sent.checksum for table in self.view.state.tables if table.sent.checksum}
        assert self.at.setdefault(self.view.position, held) == held
        self.check_statistics(expected, new)
        if expected.taken or others:  # It names the version and the step that its rows are of.
            assert (head.version, head.step) == (self.plain.version, self.plain.version)
        if not exact_lag:  # Of rows that have changed meanwhile it is not known how many are dirty.
            return
        assert self.lacking(head.number) == [len(each.dirty_since) for each in self.plain.held]
        from_nothing = [len(each.dirty_since.keys() | each.rows.keys()) for each in self.plain.held]
        assert self.lacking(0) == from_nothing

    def lacking(self, number: int) -> list[int]:
        return [table.lacking(number) for table in self.view.status(self.policy).tables()]

    async def check_held(self) -> None:
        assert self.view.forms == [each.form for each in self.plain.held]
        for table, plain in zip(self.view.state.tables, self.plain.held, strict=True):
            for row in range(plain.form.spec.rows):
                assert table.held.rows[row].tobytes() == plain.row(row).tobytes(), (plain.form, row)
            assert {int(row) for row in table.sent.changed_since(0)} == set(plain.rows)
            assert await self._dirty_since(table) == plain.dirty_since
        assert self.view.state.compared_version == self.plain.compared_version

    async def _dirty_since(self, table: ViewTable) -> dict[int, int]:
        dirty = await self.local.model.on_thread(lambda: table.dirty)
        return dict(zip(dirty.ids.tolist(), dirty.since.tolist(), strict=True))

    async def check_lacking(self) -> None:
        """Rows that were sent after a release, are dirty, or have changed since they were compared, are lacking.
        Of these only the last may be counted twice.
        """
        state = self.view.state
        for number in range(state.head.number + 1 if state.head else 0):
            rows = self.lacking(number)[: len(state.tables)]  # After these come tables that are still to be made.
            for table, lacking in zip(state.tables, rows, strict=True):
                changed, known = table.source.stamps > state.compared_version, table.sent.stamps > number
                known[list(await self._dirty_since(table))] = True
                assert np.count_nonzero(known | changed) <= lacking <= table.source.spec.rows
                assert lacking <= np.count_nonzero(known) + np.count_nonzero(changed)

    def check_statistics(self, expected: PlainRelease, new: Sequence[PlainHeld]) -> None:
        state = self.view.state
        assert state.statistics
        statistics = state.statistics
        check_amount(statistics.backlog, expected.left)
        for number, held in enumerate(self.plain.held):
            backlog = state.backlog[held.form.spec.name]
            check_amount(backlog.amount, [row for row in expected.left if row.table == number])
            assert backlog.oldest_version == min(held.dirty_since.values(), default=0)
            assert np.isfinite(backlog.table_norm)
        reason = statistics.reason
        if new:
            assert statistics.taken.rows == len(expected.taken) + sum(len(each.rows) for each in new)
            assert f" of {counted(len(new), 'table')} that the replicas did not have in this form" in reason
        elif expected.taken:
            check_amount(statistics.taken, expected.taken)
        if expected.taken:
            assert statistics.version == self.plain.version
            assert all(said in reason for said in expected.reasons), (reason, expected.reasons)

    async def everything_is_reached(self) -> None:
        """Once cuts have stopped, in a bounded number of releases."""
        await self.release(0)
        if not self.view.state.head:
            return
        for _ in range(sum(len(each.dirty_since) for each in self.plain.held)):
            await self.release(0)
        assert not any(each.dirty_since for each in self.plain.held)
        for table, plain in zip(self.view.state.tables, self.plain.held, strict=True):
            for row in plain.source.rows:
                assert table.held.rows[row].tobytes() == plain.wanted(row).tobytes()
        for number in range(REPLICAS):
            await self.follow(number)


def check_amount(amount: RowTotals, rows: Sequence[DirtyRow]) -> None:
    assert amount.rows == len(rows)
    assert amount.bytes == sum(row.size for row in rows)
    assert amount.norm == pytest.approx(norm_of(rows), rel=1e-9)


PATTERNS = [("*",), ("a*",), ("ab",), ("a", "c")]


@st.composite
def policies(draw: st.DrawFn) -> Policy:
    top_k = draw(st.none() | st.sampled_from([1, 2, 3, 0.1, 0.5, 0.34]))
    tables = draw(st.sampled_from(PATTERNS))
    # Of the tables, those of other dims cannot be sent in all types.
    fitting = [each for each in ValueType if tables == ("ab",) or each.dim_multiple == 1]
    smallest = 60 * (int(top_k) if top_k is not None and top_k >= 1 else 1)
    return Policy(
        tables=tables,
        mode=draw(st.sampled_from([Mode.EMBEDDINGS, Mode.EMBEDDINGS, Mode.EMBEDDINGS, Mode.IDS])),
        top_k=top_k,
        top_k_per_table=draw(st.booleans()),
        max_age_seconds=draw(st.sampled_from([None, 60.0])),
        max_bytes=draw(st.none() | st.integers(smallest, smallest + 60)),
        value_type=draw(st.sampled_from(fitting)),
    )


KINDS = st.dictionaries(st.tuples(st.integers(0, 2), st.integers(0, 5)), st.integers(0, 12), max_size=6)
OPERATIONS = st.one_of(
    st.tuples(st.just("cut"), KINDS),
    st.tuples(st.just("cut"), KINDS),
    st.tuples(st.just("release"), st.integers(0, 3)),
    st.tuples(st.just("release"), st.integers(0, 3)),
    st.tuples(st.just("overtake"), KINDS),
    st.tuples(st.just("refuse"), st.none()),
    st.tuples(st.just("follow"), st.integers(0, REPLICAS - 1)),
    st.tuples(st.just("change"), policies()),
    st.tuples(st.just("go_back"), st.none()),
    st.tuples(st.just("more"), st.none()),
    st.tuples(st.just("checkpoint"), st.none()),
    st.tuples(st.just("restart"), st.none()),
)


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """Operations, and at the end releases after which the service restarts."""
    operations = draw(st.lists(OPERATIONS, max_size=12))
    for _ in range(2):
        operations += [("cut", draw(KINDS)), ("release", draw(st.integers(0, 3))), ("follow", 0)]
    return [*operations, ("restart", None), ("follow", 0)]


@settings(suppress_health_check=list(HealthCheck))
@given(policies(), programs())
def test_a_view_does_what_plain_dictionaries_do(policy: Policy, operations: list[tuple[str, Any]]) -> None:
    async def main(folder: Path) -> None:
        one = Play(folder, policy)
        try:
            await one.run(operations)
        finally:
            await one.local.close()

    with fast_folder() as folder:
        asyncio.run(main(Path(folder)))

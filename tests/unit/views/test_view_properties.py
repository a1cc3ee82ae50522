"""Views against a model of plain dictionaries: cuts, policies, releases, replicas, restarts, lost power."""

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.folders import fast_folder
from tests.support.local_model import LocalModel, Rows
from tests.support.mapping import check_noted, files_on_disk
from tests.support.plain_view import DirtyRow, PlainModel, PlainRelease, PlainTable, norm_of
from tests.support.releases import frozen_at, live_rows

from deltasync.core.delivery import Delivery
from deltasync.core.digests import checksum_of
from deltasync.core.errors import StorageFailed
from deltasync.core.mode import Mode
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.core.rows import Values
from deltasync.core.tables import TableSpec
from deltasync.core.threads import not_shared_yet
from deltasync.core.value_types import ValueType
from deltasync.feeds.frozen_release import FrozenRelease
from deltasync.feeds.statistics import Amount
from deltasync.storage import touched
from deltasync.views.release_draft import ReleaseDraft
from deltasync.views.store import ViewState
from deltasync.views.table import ViewTable, view_arrays

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

    def begin(self, given: list[Delivery], *, resync: bool) -> None:
        names = {each.spec.name for each in given}
        self.tables = {name: rows for name, rows in self.tables.items() if name in names and not resync}

    def take(self, release: FrozenRelease, given: list[Delivery], history: str) -> None:
        for each in given:
            table = each.wire_spec if each.mode is Mode.IDS else each.held_spec
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

    def checksums(self, given: list[Delivery]) -> tuple[int, ...]:
        held = [self.tables[each.spec.name] for each in given]
        return tuple(checksum_of(np.arange(len(rows)), rows) for rows in held)


class Play:
    """A view and the plain model of it, doing the same things; what one holds is held against the other."""

    def __init__(self, directory: Path, policy: Policy) -> None:
        self.directory, self.policy = directory, policy
        self.plain = PlainModel()
        self.local = LocalModel(directory)
        self.view = self.local.view()
        self.replicas = [PlainReplica() for _ in range(REPLICAS)]
        self.at: dict[Position, dict[str, int]] = {}
        self.files: list[dict[str, bytes]] = []

    async def run(self, operations: list[tuple[str, Any]]) -> None:
        for table in TABLES[:2]:
            await self.add(table)
        for name, argument in [("cut", {(0, 0): 1, (1, 1): 2}), *operations]:
            await getattr(self, name)(argument)
            self.check_lacking()
            self.check_noted()
            if name != "restart":
                self.files.append(self._read_files())
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
            {
                held.delivery.spec.name: {row: held.decoded(row) for row in held.dirty_since}
                for held in self.plain.held
            }
        )

    async def change(self, policy: Policy) -> None:
        self.policy = policy

    async def release(self, overdue: int) -> None:
        await self.prepare()
        if not self.view.state.head:
            return
        old = max(0, self.plain.version - overdue) if self.policy.max_age_seconds else 0
        before = self.view.state.head.number
        self.view._releases.followed |= overdue % 2 == 0
        await self.view.make_release(self.policy, old)
        await self.check_release(before, old)

    async def overtake(self, kinds: Mapping[tuple[int, int], int]) -> None:
        """A cut comes, and a replica, while a release is on its way to the disk."""
        await self.prepare()
        if not self.view.state.head:
            return
        loop, settle, names = (
            asyncio.get_running_loop(),
            ReleaseDraft.settle,
            {t.table.name for t in self.plain.tables},
        )
        changes = {name: rows for name, rows in changes_of(kinds).items() if name in names}
        before = self.view.state.head.number

        def meanwhile(draft: ReleaseDraft, state: ViewState) -> tuple[ViewState, StorageFailed | None]:
            for each in (self.local.cut(changes), self.follow(0)):
                asyncio.run_coroutine_threadsafe(each, loop).result(20)
            return settle(draft, state)

        self.view._releases.followed = True
        with mock.patch.object(ReleaseDraft, "settle", meanwhile):
            await self.view.make_release(self.policy, 0)
        await self.check_release(before, 0, exact_lag=False)
        self.plain.cut(changes)

    async def check_release(self, before: int, old: int, *, exact_lag: bool = True) -> None:
        """The release that was just made, after the one with the number `before`, is the one that it had to be."""
        expected = self.plain.release(self.policy, old)
        assert self.view.state.head
        assert self.view.state.head.number == before + bool(expected.taken)
        self.check_held()
        self.check_statistics(expected)
        await self.check_sent(before)
        if not exact_lag:  # Of rows that have changed meanwhile it is not known how many are dirty.
            return
        assert self.lacking(self.view.state.head.number) == [len(each.dirty_since) for each in self.plain.held]
        from_nothing = [len(each.dirty_since.keys() | each.rows.keys()) for each in self.plain.held]
        assert self.lacking(0) == from_nothing

    async def check_sent(self, before: int) -> None:
        """Replicas that follow are sent what the tables hold, also where it is sent as it was drawn."""
        sent = await self.view.release(before)
        held = frozen_at(self.view.tables, before, self.view.state.head, self.directory, 1 << 20)
        assert (sent.head, sent.checksums) == (held.head, held.checksums)
        assert [each.sent() for each in sent.chunks] == [each.sent() for each in held.chunks]

    def lacking(self, number: int) -> list[int]:
        return [table.lacking(number) for table in self.view.standing(self.policy).tables()]

    async def prepare(self) -> None:
        if [self.policy.delivery_of(t.table) for t in self.plain.tables if self.policy.follows(t.table)] == [
            each.delivery for each in self.plain.held
        ]:
            return
        await self.view.prepare(self.policy)
        self.plain.prepare(self.policy)
        self.check_held()
        self.files = [self._read_files()]

    async def follow(self, number: int) -> None:
        replica = self.replicas[number % REPLICAS]
        feed = self.view if self.view.tables else self.local.model
        decision, position = feed.resume(replica.position)
        given = feed.deliveries
        release = await feed.release(position.number)
        replica.begin(given, resync=not decision.yes)
        replica.take(release, given, feed.history)
        checksums = replica.checksums(given)
        assert checksums == release.checksums
        # All replicas at the same release hold the same bits; of an empty table it does not matter.
        held = {each.spec.name: checksum for each, checksum in zip(given, checksums, strict=True) if checksum}
        assert self.at.setdefault(replica.position, held) == held

    async def flush(self, _: Any) -> None:
        if self.view.flush():
            for table in self.view.state.tables:
                found = files_on_disk(table).arrays
                assert [each.tobytes() for each in found] == [each.tobytes() for each in table.files.arrays]
            self.files = [self._read_files()]

    async def break_off(self, seed: int) -> None:
        """A flush that the disk refuses, once it has written some files."""
        synced = iter([None] * (seed % 3))

        def sync(_: int) -> None:
            if next(synced, seed) is not None:
                raise OSError(5, "Input/output error")

        with mock.patch.object(os, "fdatasync", sync), contextlib.suppress(StorageFailed):
            await self.flush(None)

    async def restart(self, choices: list[int] | None) -> None:
        """After a kill, or if there are `choices` after lost power, or in the middle of a flush: each word of each
        file is as it was at the last flush, or some time after it.
        """
        await self.local.close()
        for name, choice in zip(self._read_files(), choices or (), strict=False):
            if self.files:
                states = [
                    np.frombuffer(each[name].ljust(-(-len(each[name]) // 8) * 8), "<i8") for each in self.files
                ]
                words = np.random.default_rng(choice).integers(0, len(states), len(states[0]))
                torn = np.stack(states)[words, np.arange(len(words))].tobytes()
                (self.local.view_directory / name).write_bytes(torn[: len(self.files[0][name])])
        self.local = await LocalModel.opened(self.directory)
        self.view = self.local.view()
        for name in {replica.position.history for replica in self.replicas} - {"", self.local.model.history}:
            assert name == self.view.history
        self.take_over_marks()
        self.check_held(marks=False)

    async def _cut(self, changes: Mapping[str, Rows]) -> None:
        await self.local.cut(changes)
        self.plain.cut(changes)

    # -- checks

    def check_held(self, *, marks: bool = True) -> None:
        assert self.view.deliveries == [each.delivery for each in self.plain.held]
        for table, plain in zip(self.view.state.tables, self.plain.held, strict=True):
            for row in range(plain.delivery.spec.rows):
                assert table.held.rows[row].tobytes() == plain.row(row).tobytes(), (plain.delivery, row)
            assert {int(row) for row in table.sent.changed_since(0)} == set(plain.rows)
            if marks:
                assert marks_of(table) == plain.dirty_since
        if marks and self.view.state.head:
            assert self.view.state.compared_version == self.plain.compared_version

    def check_lacking(self) -> None:
        """Rows that were sent after a release, are dirty, or have changed since they were compared, are lacking.
        Of these only the last may be counted twice.
        """
        state = self.view.state
        for number in range(state.head.number + 1 if state.head else 0):
            rows = self.lacking(number)[: len(state.tables)]  # After these come tables that are still to be made.
            for table, lacking in zip(state.tables, rows, strict=True):
                changed = table.source.stamps > state.compared_version
                with not_shared_yet():
                    known = table.sent.stamps > number
                    known[table.dirty.ids] = True
                assert np.count_nonzero(known | changed) <= lacking <= table.source.spec.rows
                assert lacking <= np.count_nonzero(known) + np.count_nonzero(changed)

    def check_noted(self) -> None:
        for table in self.view.state.tables:
            check_noted(table.files, view_arrays(table.delivery))

    def check_statistics(self, expected: PlainRelease) -> None:
        state = self.view.state
        assert state.newest
        statistics = state.newest.statistics
        check_amount(statistics.backlog, expected.left)
        for number, held in enumerate(self.plain.held):
            backlog = state.backlog[held.delivery.spec.name]
            check_amount(backlog.amount, [row for row in expected.left if row.table == number])
            assert backlog.oldest_version == min(held.dirty_since.values(), default=0)
            assert np.isfinite(backlog.table_norm)
        if expected.taken:
            assert statistics.version == self.plain.version
            check_amount(statistics.taken, expected.taken)
            reason = statistics.reason
            assert all(said in reason for said in expected.reasons), (reason, expected.reasons)

    def take_over_marks(self) -> None:
        """Since when a row is dirty may be known less exactly after a restart, but never is it later; no dirty row
        is overlooked.
        """
        assert self.view.state.compared_version <= self.plain.compared_version
        self.plain.compared_version = self.view.state.compared_version
        for table, plain in zip(self.view.state.tables, self.plain.held, strict=True):
            marks = marks_of(table)
            for row, since in plain.dirty_since.items():
                assert marks.get(row, 0) <= since
                assert row in marks or plain.source.versions[row] > self.view.state.compared_version, (
                    f"row {row} is overlooked"
                )
            plain.dirty_since = marks

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

    def _read_files(self) -> dict[str, bytes]:
        """The files as they were if a flush that is under way had come so far, or the system had written them."""
        root = self.local.view_directory
        mappings = {mapping for table in self.view.state.tables for mapping in table.files.mappings}
        return {
            str(Path(each.name).relative_to(root)): np.asarray(each).tobytes()
            for each in sorted(mappings, key=lambda mapping: mapping.name)
        }


def marks_of(table: ViewTable) -> dict[int, int]:
    """The dirty rows, and since when they are: nothing else uses the table while a play checks it."""
    with not_shared_yet():
        marks = table.files.arrays[-1]
        assert table.dirty.ids.tolist() == marks.nonzero()[0].tolist()
        assert table.dirty.since.tolist() == marks[table.dirty.ids].tolist()
        return dict(zip(table.dirty.ids.tolist(), table.dirty.since.tolist(), strict=True))


def check_amount(amount: Amount, rows: Sequence[DirtyRow]) -> None:
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
    st.tuples(st.just("follow"), st.integers(0, REPLICAS - 1)),
    st.tuples(st.just("change"), policies()),
    st.tuples(st.just("go_back"), st.none()),
    st.tuples(st.just("flush"), st.none()),
    st.tuples(st.just("break_off"), st.integers(0, 2)),
    st.tuples(st.just("more"), st.none()),
    st.tuples(st.just("restart"), st.none() | st.lists(st.integers(0, 20), min_size=12, max_size=12)),
)


CHOICES = st.lists(st.integers(0, 20), min_size=12, max_size=12)


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, Any]]:
    """Operations, and at the end releases after which the power is lost."""
    operations = draw(st.lists(OPERATIONS, max_size=12))
    for _ in range(2):
        operations += [("cut", draw(KINDS)), ("release", draw(st.integers(0, 3))), ("follow", 0)]
    return [*operations, ("restart", draw(CHOICES)), ("follow", 0)]


def play(policy: Policy, operations: list[tuple[str, Any]]) -> None:
    async def main(folder: Path) -> None:
        one = Play(folder, policy)
        try:
            await one.run(operations)
        finally:
            await one.local.close()

    # Of a row that is written none other is noted.
    with fast_folder() as folder, mock.patch.object(touched, "_LARGEST_SHIFT", 0):
        asyncio.run(main(Path(folder)))


@settings(suppress_health_check=list(HealthCheck))
@given(policies(), programs())
def test_a_view_does_what_plain_dictionaries_do(policy: Policy, operations: list[tuple[str, Any]]) -> None:
    play(policy, operations)

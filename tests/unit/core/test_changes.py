"""What has changed since a number, and how many rows that are: against plain stamps."""

from unittest import mock

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.support.examples import stateful

from deltasync.core import changes
from deltasync.core.changes import ChangeCounts, ChangeIndex
from deltasync.core.rows import Ids, RowBatch
from deltasync.core.stamped_table import StampedTable
from deltasync.core.tables import TableSpec
from deltasync.kernels import stamps as stamp_kernels

_LARGE = 1_000_000


class Changes(RuleBasedStateMachine):
    """Rows are stamped, deleted, restamped; tables grow, and are there again after a restart."""

    def __init__(self) -> None:
        super().__init__()
        self._note_ids = mock.patch.object(changes, "_NOTE_IDS", 1)  # Else small tables keep no ids.
        self._note_ids.start()

    def teardown(self) -> None:
        self._note_ids.stop()

    @initialize(rows=st.sampled_from([1, 50, 256, 257, 1000]))
    def begin(self, rows: int) -> None:
        self.stamps = np.zeros(rows, np.int64)
        self.index = ChangeIndex(self.stamps)
        self.number = 1

    def _ids(self, data: st.DataObject) -> Ids:
        rows = len(self.stamps)
        ids = data.draw(st.sets(st.integers(0, rows - 1), max_size=30))
        first = data.draw(st.integers(0, rows - 1))
        run = range(first, min(rows, first + data.draw(st.sampled_from([0, 5, 60, 400]))))
        return np.array(sorted(ids.union(run)), np.int64)

    @rule(data=st.data(), step=st.sampled_from([0, 0, 1, 1, 1, 7, -2, -30]), deleted=st.booleans())
    def stamp(self, data: st.DataObject, step: int, deleted: bool) -> None:
        """With a later number, the same, as chunks of a cut come, or an earlier one."""
        self.number = max(1, self.number + step)
        ids = self._ids(data)
        self.index.note(ids, self.number)
        self.stamps[ids] = -self.number if deleted else self.number

    @rule(data=st.data(), numbers=st.lists(st.integers(-40, 40), min_size=1, max_size=5))
    def restamp(self, data: st.DataObject, numbers: list[int]) -> None:
        ids = self._ids(data)
        stamps = np.resize(np.array(numbers), len(ids))
        self.index.note_each(ids, stamps)
        self.stamps[ids] = stamps

    @rule(data=st.data())
    def reuse_the_ids(self, data: st.DataObject) -> None:
        """They may lie in a message that is gone, or is used again."""
        ids = self._ids(data)
        self.index.note(ids, self.number)
        self.stamps[ids] = self.number
        ids[:] = 0

    @rule(rows=st.sampled_from([0, 1, 5, 300]))
    def grow(self, rows: int) -> None:
        self.stamps = np.concatenate([self.stamps, np.zeros(rows, np.int64)])
        self.index.extend(self.stamps)

    @rule()
    def restart(self) -> None:
        self.index = ChangeIndex(self.stamps)

    @invariant()
    def finds_what_the_stamps_say(self) -> None:
        if not hasattr(self, "stamps"):
            return
        newest = int(np.abs(self.stamps).max())
        for number in {0, *range(max(0, newest - 5), newest + 2), newest // 2}:
            found = self.index.changed_since(number)
            assert found.dtype == np.int64
            expected = np.flatnonzero(np.abs(self.stamps) > number)
            assert found.tolist() == expected.tolist()
            rows = len(self.stamps)
            for first, last in ((0, rows), (rows // 3, rows // 2), (rows // 2, rows), (rows // 3, rows // 3 + 1)):
                within = self.index.changed_in(first, last, number)
                assert within.dtype == np.int64
                assert within.tolist() == expected[(expected >= first) & (expected < last)].tolist()

    @invariant()
    def keeps_few_ids(self) -> None:
        if hasattr(self, "stamps"):
            assert sum(len(ids) + 1 for _, ids in self.index._notes) == self.index._noted_ids
            assert self.index._noted_ids <= len(self.stamps) // 8


TestChanges = Changes.TestCase
TestChanges.settings = stateful(stateful_step_count=30)


def cut(table: StampedTable, ids: Ids, number: int) -> None:
    values = np.full((len(ids), table.spec.dim), number, np.float32)
    table.apply(RowBatch.of_table(table.spec, ids, values), number)


def test_the_stamps_are_not_read_for_who_is_nearly_up_to_date() -> None:
    table = StampedTable(TableSpec("t", _LARGE, 1))
    cut(table, np.arange(_LARGE), 1)
    rows = np.random.default_rng(0)
    cuts = {number: np.sort(rows.choice(_LARGE, 1000, replace=False)) for number in range(2, 50)}
    for number, ids in cuts.items():
        cut(table, ids, number)
    with mock.patch.object(stamp_kernels, "rows_after", side_effect=AssertionError("all stamps were read")):
        for behind in range(4):
            newer = [ids for number, ids in cuts.items() if number > 49 - behind]
            expected = np.unique(np.concatenate([np.zeros(0, np.int64), *newer]))
            np.testing.assert_array_equal(table.changed_since(49 - behind), expected)


def test_one_far_behind_reads_the_stamps_of_blocks_that_are_newer() -> None:
    table = StampedTable(TableSpec("t", _LARGE, 1))
    cut(table, np.arange(_LARGE), 1)
    for number in range(2, 500):
        cut(table, np.arange(5_000, 6_000), number)
    rows_after = stamp_kernels.rows_after
    with mock.patch.object(stamp_kernels, "rows_after", side_effect=rows_after) as asked:
        assert table.changed_since(1).tolist() == list(range(5_000, 6_000))
    _, largest, number, found = asked.call_args.args
    assert len(found) == 256 * np.count_nonzero(largest > number) <= 2_000


# Counts of changed rows against plain counting.

# Steps from one number to the next: mostly small, some far beyond everything that is counted in groups.
STEPS = st.one_of(st.integers(1, 3), st.integers(1, 200), st.integers(1, 10_000), st.integers(1, 1 << 40))


def numbers(draw: st.DrawFn, most: int) -> list[int]:
    """Numbers in ascending order, from 1 on."""
    found = [draw(st.integers(1, 100))]
    for step in draw(st.lists(STEPS, max_size=most)):
        found.append(found[-1] + step)
    return found


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[tuple[int, list[int]]]]:
    """So many rows, and which of them each number stamps."""
    rows = draw(st.integers(1, 12))
    some = st.sets(st.integers(0, rows - 1)).map(sorted)
    return rows, [(number, draw(some)) for number in numbers(draw, 12)]


def check(counts: ChangeCounts, stamps: list[int]) -> None:
    newest = counts.newest
    assert counts.rows == len(stamps)
    assert counts.changed == counts.after(0) == sum(stamp > 0 for stamp in stamps)
    asked = {
        max(0, base + by) for base in (0, 1, *stamps, newest) for by in (-4097, -4096, -65, -64, -63, -1, 0, 1)
    }
    for number in asked:
        least = sum(stamp > number for stamp in stamps)
        if number >= newest - 64:
            assert counts.after(number) == least
        assert least <= counts.after(number) <= sum(stamp > bound(number, newest) for stamp in stamps)


def bound(number: int, newest: int) -> int:
    """The number below the group in which `number` + 1 is, if the newest 64 groups of its size reach that far."""
    sizes = (size for size in (1, 64, 4096) if newest // size - (number + 1) // size < 64)
    size = next(sizes, None)
    return (number + 1) // size * size - 1 if size else 0


@given(histories())
def test_counts_are_those_of_the_stamps(history: tuple[int, list[tuple[int, list[int]]]]) -> None:
    rows, changes = history
    stamps = np.zeros(rows, np.int64)
    counts = ChangeCounts.unchanged(rows)
    for number, changed in changes:
        counts = counts.moved(stamps[changed], number)
        stamps[changed] = number
        check(counts, stamps.tolist())
        check(ChangeCounts.of(stamps), stamps.tolist())


@given(histories(), st.data())
def test_rows_are_taken_out_and_put_back_whatever_their_stamps(
    history: tuple[int, list[tuple[int, list[int]]]], data: st.DataObject
) -> None:
    rows, changes = history
    stamps = np.zeros(rows, np.int64)
    for number, changed in changes:
        stamps[changed] = number
    out = data.draw(st.sets(st.integers(0, rows - 1)).map(sorted))
    counts = ChangeCounts.of(stamps).without(stamps[out])
    check(counts, np.delete(stamps, out).tolist())
    check(counts.plus(stamps[out]), stamps.tolist())
    # An older number than the newest there is, as when a log is applied again.
    older = data.draw(st.integers(1, max(1, int(stamps.max()))))
    stamped_again = [*np.delete(stamps, out).tolist(), *[older] * len(out)]
    check(counts.plus_rows(len(out), older), stamped_again)
    check(ChangeCounts.of(stamps).moved(stamps[out], older), stamped_again)


def test_a_count_does_not_change() -> None:
    """Any thread may hold one while rows are stamped."""
    counts = ChangeCounts.of(np.array([0, 1, 5]))
    found = {number: counts.after(number) for number in range(7)}
    assert counts.plus_rows(4, 6).without(np.array([5])).after(4) == 4
    assert {number: counts.after(number) for number in range(7)} == found

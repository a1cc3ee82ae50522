"""Checksums of a target, against what it really holds."""

from dataclasses import replace
from itertools import pairwise
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.base.errors import Contradiction
from deltasync.client import NumpyTarget, Position, Release, RowBatch, Shard, TableSpec
from deltasync.client.targets.checksums import TargetChecksums
from deltasync.client.targets.keyed_target import KeyedTarget
from deltasync.client.targets.local import LocalTarget
from deltasync.client.targets.target import Reads, Written
from deltasync.core.digests import checksum_of, row_digests
from deltasync.core.rows import Ids, Values
from deltasync.core.table_form import Mode, ReplicaSpec, TableForm
from deltasync.core.value_types import ValueType

TABLES = [TableSpec("user", 5, 3), TableSpec("item", 3, 2, np.dtype("<f2"))]
NAMES = [table.name for table in TABLES]
# Whole numbers, and a zero that is none to a checksum.
NUMBERS = st.sampled_from([0.0, -0.0, 1.0, 2.0, 3.0])


class Careless(NumpyTarget):
    """Writes something else into some of the rows that it was told to write."""

    def __init__(self) -> None:
        super().__init__()
        self.spoils: list[tuple[str, int]] = []

    def apply(self, release: Release) -> Written | None:
        written, spoils, self.spoils = super().apply(release), self.spoils, []
        for name, row in spoils:
            self.tables[name][row] += 1
        return None if spoils else written


class Followed:
    """A target, its checksums, and beside them what a dictionary knows.

    Attributes:
        tables: as of the last release.
        target: the target.
        checksums: of it.
        sent: what it should hold: what was sent, or what was there before the first release.
        touched: rows that something else has written since they were sent.
    """

    def __init__(self, block_rows: int) -> None:
        self.tables = list(TABLES)
        self.target, self._block_rows = Careless(), block_rows
        self.checksums = TargetChecksums(self.target, block_rows)
        self.sent = {table.name: np.zeros((table.rows, table.dim), table.dtype) for table in TABLES}
        self.touched = set[tuple[str, int]]()
        self._version = 0
        self.apply([], resync=True)

    def apply(self, rows: list[RowBatch], *, resync: bool = False, whole: frozenset[str] = frozenset()) -> None:
        """Apply a release."""
        self._version += 1
        release = Release(Position("h", self._version), 0, 0, resync, list(self.tables), rows, whole)
        for table in self.tables:
            if release.resets(table):
                self.sent[table.name] = np.zeros((table.rows, table.dim), table.dtype)
                self.touched -= {(table.name, row) for row in range(table.rows)}
        self.touched -= {(each.table.name, row) for each in rows for row in each.ids.tolist()}
        for each in rows:
            self.sent[each.table.name][each.ids] = each.values
        self.touched |= set(self.target.spoils)
        told = self.checksums.after(release, self.target.apply(release))
        if not self.touched:
            assert told == self.held()

    def held(self) -> dict[str, int]:
        """The checksum of each table as it is."""
        return {table.name: checksum_of(np.arange(table.rows), self._rows_of(table)) for table in self.tables}

    def look_at_all(self) -> dict[str, int]:
        """Until every block of every table was read again."""
        return [self.checksums.look() for _ in range(2 * sum(table.rows for table in self.tables))][-1]

    def start_again(self) -> None:
        """As a new process does over the same target: what it holds is taken as it is."""
        self.checksums = TargetChecksums(self.target, self._block_rows)
        self.sent = {name: rows.copy() for name, rows in self.target.tables.items()}
        self.touched = set()
        self.apply([])

    def _rows_of(self, table: TableSpec) -> Values:
        rows = self.target.read(table, np.arange(table.rows))
        assert rows is not None
        return rows


def batch(data: st.DataObject, table: TableSpec) -> RowBatch:
    ids = np.array(data.draw(st.lists(st.integers(0, table.rows - 1), min_size=1, unique=True).map(sorted)))
    if data.draw(st.booleans()):
        return RowBatch.deletes(Shard.whole(table), ids)
    numbers = data.draw(st.lists(NUMBERS, min_size=len(ids), max_size=len(ids)))
    rows = RowBatch.of_table(table, ids, np.repeat(np.array(numbers, table.dtype)[:, None], table.dim, axis=1))
    return rows.digested() if data.draw(st.booleans()) else rows


def step(data: st.DataObject, followed: Followed) -> None:
    name = data.draw(st.sampled_from(NAMES))
    row = data.draw(st.integers(0, len(followed.target.tables[name]) - 1))
    match data.draw(st.sampled_from(["release", "whole", "resync", "grow", "damage", "spoil", "mend", "again"])):
        case "release":
            followed.apply([batch(data, table) for table in followed.tables])
        case "whole":
            followed.apply([batch(data, followed.tables[0])], whole=frozenset({name}))
        case "resync":
            followed.apply([batch(data, table) for table in followed.tables], resync=True)
        case "grow":
            grow(followed, name)
        case "damage":
            followed.target.tables[name][row] += 1
            followed.touched.add((name, row))
        case "spoil":
            followed.target.spoils.append((name, row))
            followed.apply([batch(data, table) for table in followed.tables])
        case "mend":
            followed.target.tables[name][row] = followed.sent[name][row]
        case "again":
            followed.start_again()


def grow(followed: Followed, name: str) -> None:
    followed.tables = [replace(each, rows=each.rows + 2 * (each.name == name)) for each in followed.tables]
    followed.sent[name] = np.pad(followed.sent[name], ((0, 2), (0, 0)))
    followed.apply([])


@given(st.data(), st.integers(1, 3))
def test_what_is_told_is_what_is_held_in_the_end(data: st.DataObject, rows: int) -> None:
    followed = Followed(rows)
    for _ in range(data.draw(st.integers(1, 8))):
        step(data, followed)
    assert followed.look_at_all() == followed.held()


def release_of(values: Values, ids: list[int]) -> Release:
    table = TableSpec("user", 9, values.shape[1], values.dtype)
    return Release(Position("h", 1), 0, 0, True, [table], [RowBatch.of_table(table, np.array(ids), values)])


LOCAL = {
    f"{kind.__name__}, {reads}": (kind, reads) for kind in (NumpyTarget, KeyedTarget) for reads in get_args(Reads)
}


@pytest.mark.parametrize("name", LOCAL)
def test_a_local_target_returns_digests_of_the_rows_it_has_written(name: str) -> None:
    kind, reads = LOCAL[name]
    target, values = kind(reads=reads), np.random.default_rng(0).standard_normal((3, 4)).astype("<f4")
    first = release_of(values, [3, 5, 8])
    deletes = RowBatch.deletes(Shard.whole(first.tables[0]), [5])
    later = replace(first, resync=False, rows=[deletes, RowBatch.of_table(first.tables[0], [0, 3], values[:2])])
    for release in (first, later):
        written = target.apply(release)
        assert written is not None
        for rows, digests in zip(release.rows, written.digests, strict=True):
            assert digests is not None
            assert digests.tolist() == row_digests(rows.values).tolist()


@pytest.mark.parametrize("read_back", [False, True])
def test_damaged_rows_are_reported_until_they_come_again(
    read_back: bool, caplog: pytest.LogCaptureFixture
) -> None:
    target, values = NumpyTarget(), np.random.default_rng(0).standard_normal((3, 4)).astype("<f4")
    checksums, release = TargetChecksums(target), release_of(values, [3, 5, 8])
    right = release.rows[0].digested()
    flipped = values.copy()
    flipped.view("u1")[1, 7] ^= 8
    damaged = replace(release, rows=[replace(right, values=flipped)])

    def told(release: Release) -> dict[str, int]:
        written = target.apply(release)
        return checksums.after(release, None if read_back else written)

    expected = {"user": checksum_of(right.ids, values)}
    assert told(damaged) != expected
    assert "table 'user': damaged on the way, or written incorrectly by the target: row 5" in caplog.text
    assert told(replace(release, resync=False, rows=[right])) == expected


def test_a_damaged_digest_counts_as_a_damaged_row() -> None:
    target, release = NumpyTarget(), release_of(np.ones((2, 2), "<f4"), [1, 2])
    checksums = TargetChecksums(target, 1)  # The sweep reads row 0, which did not come.
    right = release.rows[0].digested()
    assert right.digests is not None
    wrong = replace(release, rows=[replace(right, digests=right.digests + np.array([0, 1], np.uint64))])
    assert checksums.after(wrong, target.apply(wrong)) != {"user": checksum_of(right.ids, right.values)}


def test_a_forgotten_verification_starts_from_the_first_row() -> None:
    target, release = NumpyTarget(), release_of(np.ones((2, 2), "<f4"), [1, 2])
    target.apply(release)
    checksums = TargetChecksums(target, 4)
    checksums.after(release)
    assert [checksums.read_again(1, 0.0) for _ in range(2)] == [5, 1]
    checksums.forget_question()
    assert checksums.read_again(1, 0.0) == 5


def test_a_table_that_a_target_loses_has_checksum_zero() -> None:
    target, release = NumpyTarget(), release_of(np.ones((2, 2), "<f4"), [1, 2])
    target.apply(release)
    checksums = TargetChecksums(target)
    right = checksums.after(release)
    del target.tables["user"]
    assert checksums.look() == {"user": 0} != right
    target.apply(release)
    assert checksums.after(release) == right


def test_a_table_that_returns_is_read_from_the_target() -> None:
    target, release = NumpyTarget(), release_of(np.ones((2, 2), "<f4"), [1, 2])
    target.apply(release)
    checksums = TargetChecksums(target)
    right = checksums.after(release)
    rows = target.tables["user"]
    nothing = replace(release, resync=False, tables=[], rows=[])
    target.apply(nothing)
    assert checksums.after(nothing) == {}
    target.tables = {"user": rows}
    assert checksums.after(replace(release, resync=False, rows=[])) == right


@pytest.mark.parametrize("ids", [[-1], [9], [0, 2**40]])
def test_rows_outside_of_their_table_are_refused(ids: list[int]) -> None:
    class Anything(NumpyTarget):
        def apply(self, release: Release) -> None:
            """As a target of a user's may."""

        def read(self, table: TableSpec, ids: Ids) -> Values | None:
            return np.ones((len(ids), table.dim), table.dtype)

    checksums = TargetChecksums(Anything())
    with pytest.raises(
        Contradiction, match=f"table 'user' has 9 rows, the release has rows {ids[0]} to {ids[-1]}"
    ):
        checksums.after(release_of(np.ones((len(ids), 2), "<f4"), ids))


@pytest.mark.parametrize(("before", "after"), [*pairwise([*ValueType, *ValueType])][: len(ValueType)])
def test_a_table_in_another_form_gets_new_checksums(before: ValueType, after: ValueType) -> None:
    target, values = NumpyTarget(), np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    checksums = TargetChecksums(target)
    for version, value_type in enumerate((before, after), 1):
        form = TableForm(TableSpec("t", 4, 8), value_type, Mode.EMBEDDINGS)
        rows = form.held(form.encode(values * version))
        changed = [RowBatch.of_table(form.replica_spec, np.array([1, 2]), rows)]
        release = Release(Position("h", version), version, 0, version == 1, [form.replica_spec], changed)
        LocalTarget.apply(target, release)  # A NumpyTarget refuses rows for a TBE.
        expected = np.zeros((4, rows.shape[1]), rows.dtype)
        expected[1:3] = rows
        np.testing.assert_array_equal(target.tables["t"], expected)
        assert checksums.after(release) == {"t": checksum_of(np.arange(4), expected)}


def test_the_value_type_determines_the_form_of_a_replicas_table() -> None:
    table, forms = TableSpec("t", 4, 8), list[Any]()
    for value_type in (ValueType.FP16, ValueType.INT4_TBE):
        held = TableForm(table, value_type, Mode.EMBEDDINGS).replica_spec
        assert isinstance(held, ReplicaSpec)
        forms.append((held.dim, held.dtype, held.value_type, held.table_dim))
    assert forms == [(8, np.dtype("<f4"), ValueType.FP16, 8), (8, np.dtype("u1"), ValueType.INT4_TBE, 8)]
    assert TableForm(table, ValueType.FP32, Mode.EMBEDDINGS).replica_spec == table
    assert TableForm(table, ValueType.INT4_TBE, Mode.IDS).replica_spec == table

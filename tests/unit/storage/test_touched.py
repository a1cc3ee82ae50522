"""What a flush puts into the files of a table: all that was written, and before a flush nothing."""

import os
import tempfile
import threading
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.support.folders import fast_folder

from deltasync.core.errors import StorageFailed
from deltasync.core.rows import Ids, RowBatch, Values
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import Shard, TableSpec
from deltasync.kernels import touched as kernels
from deltasync.storage import mapping, table_files
from deltasync.storage.mapped_table import MappedTable, TableLayout
from deltasync.storage.private_memory import PrivateMemory
from deltasync.storage.table_files import Place, make_tables, open_tables
from deltasync.storage.touched import Touched

OTHERS = [TableSpec("before", 3, 3, np.dtype("<f2")), TableSpec("after", 7, 1)]
# Of 64 rows in a block, and of one; with columns for several shards.
SPECS = [TableSpec("t", 300, 4), TableSpec("t", 20, 3000)]

CALLS = ["apply", "delete", "restamp", "forget_after", "mend", "make_digests", "trust", "split"]
CALLS += ["grow", "flush", "fail", "overtake"]


def contents(arrays: Sequence[NDArray[Any]]) -> list[bytes]:
    return [array.tobytes() for array in arrays]


class Play:
    """A table between two others, and what its files have to hold."""

    def __init__(self, folder: Path, spec: TableSpec) -> None:
        self.folder = folder
        layouts = [TableLayout.of(each) for each in (OTHERS[0], spec, OTHERS[1])]
        files = make_tables(folder, [layout.arrays() for layout in layouts])
        self.tables = [MappedTable(*each) for each in zip(layouts, files, strict=True)]
        self.table, self.plain = self.tables[1], StampedTable.zeros(spec)
        self.number = 0
        self.known, self.flushed = True, self.now

    # What can be done.

    def apply(self, ids: Ids, kind: int) -> None:
        self.number += 1
        cols = self._edges[kind % (len(self._edges) - 1) :][:2]
        shard = Shard(self.table.spec, 0, self.table.spec.rows, cols[0], cols[1] - cols[0])
        for table in (self.table, self.plain):
            table.apply(RowBatch(shard, ids, self._values(ids)[:, cols[0] : cols[1]]), self.number)
        self.tables[0].apply(RowBatch.of_table(OTHERS[0], ids[:1] % 3, np.ones((1, 3), np.float16)), self.number)

    def delete(self, ids: Ids, _: int) -> None:
        self.number += 1
        for table in (self.table, self.plain):
            table.apply(RowBatch.deletes(Shard.whole(self.table.spec), ids), self.number)

    def restamp(self, ids: Ids, _: int) -> None:
        for table in (self.table, self.plain):
            table.restamp(ids, np.arange(1, len(ids) + 1))

    def mend(self, ids: Ids, _: int) -> None:
        for table in (self.table, self.plain):
            table.mend(RowBatch.of_table(self.table.spec, ids, self._values(ids)))

    def make_digests(self, ids: Ids, kind: int) -> None:
        self.mend(ids, kind)
        self.flush()
        for table in (self.table, self.plain):
            table.make_digests()

    def trust(self, ids: Ids, kind: int) -> None:
        self.mend(ids, kind)
        self.flush()
        for table in (self.table, self.plain):
            table.trust(ids)

    def forget_after(self, _: Ids, kind: int) -> None:
        self.flush()
        for table in (self.table, self.plain):
            table.forget_after(max(1, self.number - kind))

    def split(self, _: Ids, kind: int) -> None:
        for table in (self.table, self.plain):
            table.split(1 + kind)

    def grow(self, _: Ids, kind: int) -> None:
        self.flush()
        self.delete(np.arange(kind), 0)
        layout = self.table.layout_as(replace(self.table.spec, rows=self.table.spec.rows + 100))
        made = make_tables(self.folder, [layout.arrays()])[0] if self.table.moves(layout.spec) else None
        become = self.table.extend(layout, made)
        self.apply(np.arange(1 + kind), kind)
        if made is None:  # Files that are longer than is written down are made shorter: not while they are mapped.
            pairs = zip(self.flushed[2], layout.arrays(), strict=True)
            self.flushed = self.flushed[0], layout, [content.ljust(each.nbytes, b"\0") for content, each in pairs]
        become()
        plain = self.plain
        arrays = plain.rows, plain.stamps, plain.tags, plain.digests, plain.squares
        rows, stamps, tags, digests, squares = (
            np.concatenate([each, np.zeros((100, *each.shape[1:]), each.dtype)]) for each in arrays
        )
        self.plain = StampedTable(self.table.spec, rows, stamps, digests, squares, plain.columns, tags)

    def flush(self, *_: Any) -> None:
        for table in self.tables:
            table.flush()
        self.known = True
        self.flushed = self.now

    def fail(self, _: Ids, kind: int) -> None:
        """The disk refuses what comes after some writes."""
        files = mock.Mock(side_effect=[*[mock.DEFAULT] * kind, OSError(5, "Input/output error")])
        self.known = False
        msync = mock.patch.object(mapping._c, "msync", return_value=-1)
        with mock.patch.object(os, "fdatasync", files), msync:
            try:
                self.table.flush()
            except StorageFailed:
                return
        self.known, self.flushed = True, self.now

    def overtake(self, ids: Ids, kind: int) -> None:
        """Rows are written while others are on their way to the disk."""

        def writing(*arguments: Any) -> int:
            self.apply(ids, kind)
            written = kernels.write(*arguments)
            self.apply(ids, kind + 1)
            return written

        with mock.patch.object(mapping, "kernels", mock.Mock(write=writing)):
            self.table.flush()
        self.known = False

    # What is looked at.

    @property
    def now(self) -> tuple[Place, TableLayout, list[bytes]]:
        mapped = self.table.mapped
        return mapped.files.place, mapped.layout, contents(mapped.files.arrays)

    def on_disk(self) -> list[bytes]:
        place, layout, _ = self.flushed
        return contents(open_tables([(place, layout.arrays())])[0].arrays)

    def check(self, private: bool) -> None:
        mapped = self.table.mapped.plain()
        arrays = self.table.rows, self.table.stamps, self.table.tags, self.table.digests, self.table.squares
        plain = self.plain.rows, self.plain.stamps, self.plain.tags, self.plain.digests, self.plain.squares
        assert all(a is b for a, b in zip(mapped, arrays, strict=True) if len(a))
        assert contents(arrays) == contents(plain)
        if private and self.known:
            assert self.on_disk() == self.flushed[2]

    @property
    def _edges(self) -> tuple[int, ...]:
        return self.table.columns

    def _values(self, ids: Ids) -> Values:
        rng = np.random.default_rng(self.number)
        values: Values = rng.normal(size=(len(ids), self.table.spec.dim)).astype(np.float32)
        return values


@pytest.mark.parametrize("spec", SPECS, ids=["short rows", "long rows"])
@pytest.mark.parametrize("private", [True, False], ids=["private", "shared"])
@pytest.mark.parametrize("small_bytes", [0, 1 << 24], ids=["files of their own", "a shared file"])
@given(
    history=st.lists(
        st.tuples(
            st.sampled_from(CALLS), st.sets(st.integers(0, 2**20), min_size=1, max_size=4), st.integers(0, 3)
        ),
        max_size=12,
    )
)
@example(history=[("make_digests", {1}, 0), ("grow", {0}, 0)])
def test_files_are_as_of_the_last_flush(
    spec: TableSpec, private: bool, small_bytes: int, history: list[tuple[str, set[int], int]]
) -> None:
    memory = mock.patch.object(mapping, "PRIVATE", PrivateMemory(1 << 40 if private else 0))
    small = mock.patch.object(table_files, "SMALL_BYTES", small_bytes)
    with fast_folder() as folder, memory, small:
        play = Play(Path(folder), spec)
        for call, some, kind in history:
            ids = np.array(sorted({each % play.table.spec.rows for each in some}), np.int64)
            getattr(play, call)(ids, kind)
            play.check(private)
        play.flush()
        assert play.on_disk() == play.now[2]
        for other in (play.tables[0], play.tables[2]):
            (found,) = open_tables([(other.mapped.files.place, other.mapped.layout.arrays())])
            assert contents(found.arrays) == contents(other.mapped.files.arrays)


def test_of_a_large_table_a_flush_writes_what_was_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "SMALL_BYTES", 0)
    spec, sizes = TableSpec("t", 100_000, 16), list[int]()
    layout = TableLayout.of(spec)
    table = MappedTable(layout, make_tables(tmp_path, [layout.arrays()])[0])
    table.flush()
    table.apply(RowBatch.of_table(spec, np.array([0, 70, 99_999]), np.ones((3, 16), np.float32)), 1)
    for each in ("rows", "stamps", "tags", "digests", "squares"):
        (path,) = tmp_path.rglob(f"*.{each}")
        with path.open("r+b") as file:  # So that it shows what is not written.
            file.write(bytes([255]) * path.stat().st_size)
    table.flush()
    for array, row_bytes in zip(layout.arrays(), (64, 8, 2, 8, 4), strict=True):
        content = np.fromfile(table.mapped.files.place.folder / array.file, np.uint8)
        written = np.flatnonzero((content.reshape(-1, row_bytes) != 255).any(axis=1))
        sizes.append(len(written) * row_bytes)
        assert {0, 70, 99_999} <= set(written.tolist())
    assert max(sizes) <= 3 * 4096


def test_a_flush_waits_for_one_that_has_taken_its_rows() -> None:
    touched, order, taken, go_on = Touched(10, 4), list[str](), threading.Event(), threading.Event()
    touched.note(np.array([3]), 1)

    def first() -> None:
        with touched.taken(255) as marks:
            order.append(f"first {marks.tolist()}")
            taken.set()
            go_on.wait(20)
            order.append("first is through")

    def second() -> None:
        with touched.taken(255) as marks:
            order.append(f"second {marks.tolist()}")

    threads = [threading.Thread(target=each) for each in (first, second)]
    threads[0].start()
    assert taken.wait(20)
    assert touched.pending().tolist() == [1], "it is not on disk yet"
    threads[1].start()
    go_on.set()
    for thread in threads:
        thread.join(20)
    assert order == ["first [1]", "first is through", "second [0]"]
    assert touched.pending().tolist() == [0]


@given(
    st.lists(st.sampled_from([0, 0, 0, 0, 1, 2, 3]), max_size=100),
    st.integers(1, 3000),
    st.integers(0, 9000),
    st.integers(0, 5000),
    st.integers(0, 10_000),
)
def test_what_is_written_is_whole_pages_of_the_array_and_short_gaps(
    marks: list[int], block_bytes: int, offset: int, short: int, start: int
) -> None:
    size = max(0, len(marks) * block_bytes - short % block_bytes)
    start = min(start, size)
    content = np.random.default_rng(size).integers(1, 256, size).astype(np.uint8)
    with tempfile.TemporaryFile() as file:
        arguments = file.fileno(), offset, content, np.array(marks, np.uint16), 2, block_bytes, start
        assert kernels.write(*arguments) == size
        file.seek(0)
        found = np.frombuffer(file.read().ljust(offset + size, b"\0"), np.uint8)
    assert not found[:offset].any()
    assert len(found) == offset + size
    blocks = np.array(marks, np.uint16)
    blocks[: start // block_bytes] = 0
    touched = np.repeat(blocks & 2, block_bytes)[:size] > 0
    pages = (offset + np.arange(size)) // 4096
    expected = np.isin(pages, pages[touched])
    for before, after in pairwise(np.flatnonzero(expected)):
        expected[before:after] |= after - before <= 32 << 10
    expected[:start] = False
    np.testing.assert_array_equal(found[offset:], np.where(expected, content, 0))

"""Tables that are split and grow while they are flushed: whatever a crash leaves, the log names files that fit."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tests.support.memory_store import MemoryDisk, MemoryStore

from deltasync.core.rows import RowBatch
from deltasync.core.tables import Shard, TableKind, TableSpec
from deltasync.storage import files, model_store, table_files
from deltasync.storage.mapped_table import MappedTable
from deltasync.storage.model_records import recorded_models
from deltasync.storage.model_store import ModelStore

SPEC = TableSpec("user", 20, 4)
ROOM = 1 << 20
# Columns of the shards that rows come in.
SHARDS = st.sampled_from([(0, 4), (0, 2), (2, 4), (1, 3), (3, 4)])
STEPS = st.lists(
    st.tuples(st.sampled_from(["write", "grow", "turn", "become", "flush"]), SHARDS, st.booleans()), max_size=9
)


class Story:
    """A table of a model, and what was written to it. The last step of a change is a step of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._disk = folder, MemoryDisk()
        self.store = ModelStore(MemoryStore(self._disk, ROOM), "m", folder)
        self._take(self.store.change([SPEC], {}))
        self.written: list[RowBatch] = []
        self._steps: list[Callable[[], None]] = []
        self._rows, self._kind = SPEC.rows, SPEC.kind

    @property
    def table(self) -> MappedTable:
        return self.store.tables[0]

    def write(self, columns: tuple[int, int]) -> None:
        """A cut of some rows of a shard, also of the newest there are."""
        number, spec = len(self.written) + 1, self.table.spec
        ids = np.unique([number, 3 * number % spec.rows, spec.rows - 1])
        shard = Shard(spec, 0, spec.rows, columns[0], columns[1] - columns[0])
        rows = RowBatch(shard, ids, np.full((len(ids), shard.cols), number, np.float32))
        self.written.append(rows)
        self.table.apply(rows, number)

    def grow(self, _: tuple[int, int]) -> None:
        """Room is made and written down."""
        self.become()
        self._rows += 1500
        self._announce()

    def turn(self, _: tuple[int, int]) -> None:
        """It turns out to be of another kind."""
        self.become()
        self._kind = TableKind.PARAMETER
        self._announce()

    def _announce(self) -> None:
        wanted = replace(SPEC, rows=self._rows, kind=self._kind)
        self._steps = self.store.change([wanted], {SPEC.name: SPEC.rows})

    def become(self, _: tuple[int, int] = (0, 4)) -> None:
        self._take(self._steps)
        self._steps = []

    def flush(self, _: tuple[int, int] = (0, 4)) -> None:
        self.store.flush(len(self.written))

    def _take(self, steps: list[Callable[[], None]]) -> None:
        for step in steps:
            step()

    @contextmanager
    def during(self, name: str, columns: tuple[int, int]) -> Iterator[None]:
        """A step inside of the next flush: once it has begun, or before it says so to the log."""
        flush = table_files.flush

        def flushing(tables: Any) -> None:
            flush(tables)
            getattr(self, name)(columns)

        with mock.patch.object(model_store, "flush", flushing):
            yield

    def after_a_crash(self) -> MappedTable:
        """What a restart makes of the files and the log."""
        store = ModelStore(MemoryStore(self._disk, ROOM), "m", self._folder)
        store.recover(recorded_models(MemoryStore(self._disk, ROOM))["m"])
        (table,) = store.tables
        columns = table.columns
        for version, rows in list(enumerate(self.written, start=1))[store.flushed :]:
            table.apply(rows, version)
        if table.columns != columns:
            table.trust(table.changed_since(store.flushed))
        return table

    def expected(self) -> Any:
        rows = np.zeros((self._rows, SPEC.dim), np.float32)
        for each in self.written:
            rows[each.ids, each.shard.col_offset : each.shard.col_offset + each.shard.cols] = each.values
        return rows


def check(story: Story) -> None:
    table = story.after_a_crash()
    np.testing.assert_array_equal(table.rows, story.expected())
    assert table.damaged(np.arange(table.spec.rows)).tolist() == []


@pytest.mark.parametrize("small", [True, False])
@given(steps=STEPS)
@example(steps=[("turn", (0, 4), False), ("write", (0, 2), False), ("become", (0, 4), False)])
@example(steps=[(each, (0, 2), False) for each in ("grow", "write", "flush", "become", "flush")])
def test_whatever_comes_before_a_crash_the_files_fit(
    small: bool, steps: list[tuple[str, tuple[int, int], bool]]
) -> None:
    with TemporaryDirectory() as folder, mock.patch.object(table_files, "SMALL_BYTES", 1 << 20 if small else 0):
        story, inside = Story(Path(folder)), None
        for name, columns, hold in steps:
            if hold and name != "flush":
                inside = (name, columns)  # For the next flush.
            elif name == "flush" and inside:
                with story.during(*inside):
                    story.flush()
                inside = None
            else:
                getattr(story, name)(columns)
        check(story)


@pytest.mark.parametrize("flushed", [True, False])
def test_a_table_that_is_split_while_its_files_are_made_longer_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flushed: bool
) -> None:
    """For large ones that takes seconds, and the files of before the split may be removed meanwhile."""
    monkeypatch.setattr(table_files, "SMALL_BYTES", 0)
    story, extend = Story(tmp_path), files.extend
    story.write((0, 4))

    def extending(path: Path, size: int) -> None:
        if len(story.written) == 1 and path.suffix == ".digests":
            story.write((0, 2))
            if flushed:
                story.flush()
        extend(path, size)

    monkeypatch.setattr("deltasync.storage.table_files.extend", extending)
    story.grow((0, 4))
    story.become()
    story.write((3, 4))
    check(story)
    story.flush()
    check(story)

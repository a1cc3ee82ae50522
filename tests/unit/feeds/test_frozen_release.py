import tempfile
import threading
import weakref
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.support.mapping import in_a_file, mapping_of
from tests.support.releases import deleted_rows, frozen_at, live_rows
from tests.support.stamped import stamped_table
from tests.support.wire import random_rows

from deltasync.core.rows import RowBatch, Values
from deltasync.core.stamps import StampedTable
from deltasync.core.tables import Shard, TableSpec
from deltasync.feeds.frozen_release import FrozenRelease

TABLES = [TableSpec("a", 40, 3), TableSpec("b", 20, 2, np.dtype("<f2")), TableSpec("c", 5, 1)]


def stamped(seed: int, versions: int) -> list[StampedTable]:
    rng = np.random.default_rng(seed)
    made = []
    for table, rows in zip(TABLES, random_rows(seed, TABLES), strict=True):
        stamps = rng.integers(0, versions + 1, table.rows)
        made.append(stamped_table(table, rows, stamps))
    return made


def content(frozen: FrozenRelease) -> list[tuple[int, list[int], bytes]]:
    return [(slot, rows.ids.tolist(), rows.values.tobytes()) for slot, rows in live_rows(frozen).items()]


def arrays(frozen: FrozenRelease) -> list[Values]:
    return [array for chunk in frozen.chunks for array in (chunk.rows.ids, chunk.rows.values)]


@given(st.integers(0, 999), st.integers(0, 4))
def test_a_spilled_release_is_the_same_as_one_in_memory(seed: int, after: int) -> None:
    tables = stamped(seed, 4)
    with tempfile.TemporaryDirectory() as folder:
        in_memory = frozen_at(tables, after, None, Path(folder), 1 << 20)
        spilled = frozen_at(tables, after, None, Path(folder), 0)
        assert not list(Path(folder).iterdir())
    assert all(in_a_file(array) for array in arrays(spilled))
    assert not any(in_a_file(array) for array in arrays(in_memory))
    assert spilled.memory_bytes == 0
    assert in_memory.memory_bytes == sum(array.nbytes for array in arrays(in_memory))
    assert content(spilled) == content(in_memory)
    for kept, unkept in zip(in_memory.chunks, spilled.chunks, strict=True):
        assert kept.message is not None
        assert unkept.message is None
        assert kept.sent() == unkept.sent()
    expected = [np.flatnonzero(table.stamps > after) for table in tables]
    assert [ids for _, ids, _ in content(in_memory)] == [ids.tolist() for ids in expected if len(ids)]
    assert in_memory.rows == sum(len(ids) for ids in expected)


def test_a_spilled_release_is_mapped_once(tmp_path: Path) -> None:
    """Each subscriber may lack something else, of thousands of tables."""
    release = frozen_at(stamped(0, 4), 0, None, tmp_path, 0)
    bases = {id(mapping_of(array)) for array in arrays(release)}
    assert len(release.chunks) > len(bases) == 1


def test_a_release_does_not_change_with_its_tables(tmp_path: Path) -> None:
    tables = stamped(0, 4)
    frozen = frozen_at(tables, 0, None, tmp_path, 1 << 20)
    before = content(frozen)
    for table in tables:
        table.apply(RowBatch.of_table(table.spec, np.arange(table.spec.rows), np.zeros_like(table.rows)), 9)
    assert content(frozen) == before


def test_deletes_take_no_more_memory_than_is_allowed(tmp_path: Path) -> None:
    table = StampedTable.zeros(TABLES[0])
    table.apply(RowBatch.of_table(table.spec, np.arange(9), np.ones((9, 3), np.float32)), 1)
    table.apply(RowBatch.deletes(Shard.whole(table.spec), np.arange(2, 8)), 2)
    in_memory, spilled = (frozen_at([table], 1, None, tmp_path, size) for size in (48, 47))
    assert (in_memory.memory_bytes, spilled.memory_bytes) == (48, 0)
    assert [in_a_file(each.chunks[0].rows.ids) for each in (in_memory, spilled)] == [False, True]
    assert [deleted_rows(each)[0].ids.tolist() for each in (in_memory, spilled)] == [[2, 3, 4, 5, 6, 7]] * 2


def test_what_a_spilled_release_takes_is_freed_in_a_thread_of_its_own(tmp_path: Path) -> None:
    """To unmap gigabytes takes a while, and the last to use a release is the event loop."""
    freed, by = threading.Event(), list[str]()

    def note() -> None:
        by.append(threading.current_thread().name)
        freed.set()

    release = frozen_at(stamped(0, 4), 0, None, tmp_path, 0)
    weakref.finalize(release.chunks[0].rows.values.base, note)
    del release
    assert freed.wait(20)
    assert by == ["release-freeing"]

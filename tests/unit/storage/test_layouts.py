"""What ranks hold is in the log once, for as long as rows name it."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.memory_store import MemoryDisk, MemoryStore

from deltasync.core.errors import StorageFailed
from deltasync.core.tables import Shard, TableSpec
from deltasync.storage.layouts import Layouts
from deltasync.storage.lmdb_store import LmdbStore
from deltasync.storage.log_store import LogOptions
from deltasync.storage.records import pack_layout

TIMEOUT = 20
TABLES = [TableSpec(f"table {number}", 10, 4) for number in range(4)]
SHARDS = [[Shard.whole(table)] for table in TABLES]
RECORDS = [pack_layout(TABLES, shards) for shards in SHARDS]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[LmdbStore]:
    log = LmdbStore(LogOptions(directory=tmp_path / "log", max_bytes=1 << 20))
    yield log
    log.close()


def numbers(log: LmdbStore | MemoryStore) -> set[int]:
    return {record.number for record in log.read("layouts/m")}


def test_a_layout_is_written_once(log: LmdbStore) -> None:
    layouts = Layouts(log, "m")
    first, again, other = (layouts.use(RECORDS[each], SHARDS[each], 1) for each in (0, 0, 1))
    for use in (first, again, other):
        use.written.result(TIMEOUT)
    assert first.number == again.number != other.number
    assert (first.log_bytes, again.log_bytes, other.log_bytes) == (len(RECORDS[0]), 0, len(RECORDS[1]))
    assert [bytes(record.payload) for record in log.read("layouts/m", first.number, first.number)] == [RECORDS[0]]
    assert numbers(log) == {first.number, other.number}
    assert layouts.shards(other.number) == SHARDS[1]
    layouts.forget(1)
    with pytest.raises(StorageFailed, match=f"the log's layout {first.number} of model 'm' is missing"):
        layouts.shards(first.number)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
def test_the_log_has_what_rows_after_the_last_flush_name_and_nothing_else(steps: list[tuple[int, bool]]) -> None:
    log = MemoryStore(MemoryDisk(), 1 << 20)
    layouts, named = Layouts(log, "m"), dict[int, int]()
    for version, (each, flushes) in enumerate(steps, 1):
        named[layouts.use(RECORDS[each], SHARDS[each], version).number] = version
        if flushes:
            layouts.forget(version - 1)
            named = {number: newest for number, newest in named.items() if newest >= version}
        assert numbers(log) == set(named)


def test_one_that_could_not_be_written_is_written_by_the_next_part(
    log: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else rows would name a layout that nobody has."""
    layouts = Layouts(log, "m")
    with monkeypatch.context() as patch:
        failing: Future[None] = Future()
        patch.setattr(LmdbStore, "append", lambda *_: failing)
        uses = [layouts.use(RECORDS[0], SHARDS[0], 1) for _ in range(2)]  # Of two ranks that hold the same.
        failing.set_exception(StorageFailed("the log is full"))
        for use in uses:
            assert use.written.exception(TIMEOUT)
    use = layouts.use(RECORDS[0], SHARDS[0], 1)
    use.written.result(TIMEOUT)
    assert use.log_bytes == len(RECORDS[0])
    assert numbers(log) == {use.number}


def test_a_flush_does_not_forget_what_a_part_begins_with_meanwhile(
    log: LmdbStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    layouts, drop = Layouts(log, "m"), LmdbStore.drop
    layouts.use(RECORDS[0], SHARDS[0], 1).written.result(TIMEOUT)
    beginning = threading.Thread(target=lambda: layouts.use(RECORDS[0], SHARDS[0], 2))

    def slow(store: LmdbStore, stream: str, number: int, part: int | None = None) -> Future[None]:
        beginning.start()
        beginning.join(0.1)  # It either overtakes what is forgotten here, or has to wait for it.
        return drop(store, stream, number, part)

    monkeypatch.setattr(LmdbStore, "drop", slow)
    layouts.forget(1)
    beginning.join(TIMEOUT)
    log.put("done", b"").result(TIMEOUT)
    (number,) = numbers(log)
    assert layouts.shards(number) == SHARDS[0]

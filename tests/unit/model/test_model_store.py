"""What a model's cuts and the layouts that they name cost the log, and what it has of them after a restart."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support import versions
from tests.support.folders import fast_folder
from tests.support.memory_store import MemoryDisk, MemoryStore
from tests.support.seals import sealed

from deltasync.base.errors import StorageFailed
from deltasync.core.rows import RowBatch
from deltasync.core.seal import Seal
from deltasync.core.tables import Shard, TableSpec
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions, LogStore
from deltasync.log.records import pack_layout, pack_rows
from deltasync.model.model_store import Layouts, ModelStore, recorded_models

TIMEOUT = 20
TABLES = [TableSpec(f"model.sparse.embedding_{number}.weight", 1000, 8) for number in range(2000)]
SHARDS = [Shard.whole(table) for table in TABLES]
LAYOUT = pack_layout(TABLES, SHARDS)


@pytest.fixture(params=["lmdb", "memory"])
def opened(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Callable[[], LogStore]]:
    """Opens the log again, after closing it."""
    disk, logs = MemoryDisk(), list[LogStore]()

    def open_log() -> LogStore:
        for log in logs:
            log.close()
        options = LogOptions(directory=tmp_path / "log", max_bytes=1 << 24)
        logs[:] = [MemoryStore(disk, 1 << 24) if request.param == "memory" else LmdbStore(options)]
        return logs[0]

    yield open_log
    logs[0].close()


def publish(store: ModelStore, version: int, *batches: RowBatch, layout: bytes = LAYOUT, **fields: Any) -> None:
    """A cut of one rank, from its first part to its seal."""
    store.drop_part(version, 0)
    use = store.use_layout(layout, SHARDS, version)
    for index, rows in enumerate(batches):
        slot = SHARDS.index(rows.shard)
        store.append(version, 0, index, pack_rows(slot, rows, use.number))
    rows_in_all = sum(map(len, batches))
    seals, _ = store.seals()
    seal = replace(sealed(version, world_size=1), rows=rows_in_all, **fields).after(seals[-1] if seals else None)
    store.seal(seal).result(TIMEOUT)


def rows_of(shard: Shard, *ids: int) -> RowBatch:
    """Rows that hold a number each, in every column."""
    values = np.full((len(ids), shard.cols), 1, shard.table.dtype) + np.arange(len(ids))[:, None]
    return RowBatch(shard, np.array(ids), values.astype(shard.table.dtype))


def recovered(log: LogStore) -> ModelStore:
    """A store that has read the log, as a model does."""
    store = ModelStore(log, "m")
    store.load(recorded_models(log).get("m", {"history": "h", "tables": [], "removed": {}}))
    seals, _ = store.seals()
    store.drop_unsealed(seals[-1].version if seals else 0)
    return store


def payload_bytes(log: LogStore) -> int:
    return sum(len(record.payload) for stream in log.streams() for record in log.read(stream))


def test_many_tables_cost_small_cuts_nothing(opened: Callable[[], LogStore]) -> None:
    """They were in every part of every cut: 2,000 tables took 11 MB of log for 21 cuts of a few rows."""
    log = opened()
    store = ModelStore(log, "m")
    publish(store, 1, rows_of(SHARDS[0], 1, 2, 3))
    first = payload_bytes(log)
    assert first > len(LAYOUT) > 100_000
    for version in range(2, 22):
        publish(store, version, rows_of(SHARDS[version], 7))
    assert payload_bytes(log) - first < 20 * 500
    # Of a service that starts anew before a checkpoint.
    log = opened()
    store = recovered(log)
    for seal in store.seals()[0]:
        (rows,) = store.rows(seal)
        expected = rows_of(SHARDS[seal.version], 7) if seal.version > 1 else rows_of(SHARDS[0], 1, 2, 3)
        assert (rows.shard, rows.ids.tolist()) == (expected.shard, expected.ids.tolist())
        assert rows.values.tobytes() == expected.values.tobytes()


def test_layouts_do_not_pile_up_over_runs(opened: Callable[[], LogStore]) -> None:
    log = opened()
    for run in range(1, 6):
        store = recovered(log)
        layout = pack_layout(TABLES[run : run + 3], SHARDS[run : run + 3])
        for version in (2 * run - 1, 2 * run):
            publish(store, version, layout=layout)
        assert len(list(log.read("layouts/m"))) <= 2
        if run % 2:
            store.truncate(2 * run - 1)
            assert len(list(log.read("layouts/m"))) == 1, "rows of the newest version name it"
            log = opened()
        else:
            store.truncate(2 * run)
            assert not list(log.read("layouts/m"))


def test_records_of_an_abandoned_cut_are_ignored_and_dropped(
    opened: Callable[[], LogStore],
) -> None:
    log = opened()
    store = ModelStore(log, "m")
    number = store.use_layout(LAYOUT, SHARDS, 1).number
    for rank in range(4):
        store.append(1, rank, 0, pack_rows(rank, rows_of(SHARDS[rank], 5), number))
    seal = replace(sealed(1, world_size=2), rows=2)
    store.seal(seal).result(TIMEOUT)
    assert [rows.shard for rows in store.rows(seal)] == SHARDS[:2]
    store.truncate(1)
    assert log.streams() == ["seals/m"]


def test_a_cut_that_lacks_rows_is_an_error(opened: Callable[[], LogStore]) -> None:
    """A record that is gone leaves no checksum behind."""
    log = opened()
    store = ModelStore(log, "m")
    publish(store, 1, rows_of(SHARDS[0], 1), rows_of(SHARDS[1], 1, 2))
    ((seal,), _) = store.seals()
    number = store.use_layout(LAYOUT, SHARDS, 1).number
    store.append(1, 0, 1, pack_rows(1, rows_of(SHARDS[1], 1), number))
    log.put("later", b"").result(TIMEOUT)
    with pytest.raises(StorageFailed, match="the log has 2 rows of version 1 of model 'm', expected 3: restore"):
        list(store.rows(seal))


@pytest.mark.parametrize("kept", [1, 4, 100])
def test_seals_outlive_their_rows(opened: Callable[[], LogStore], kept: int) -> None:
    log = opened()
    store = ModelStore(log, "m", kept)
    for version in range(1, 8):
        publish(store, version, rows_of(SHARDS[0], version))
    store.truncate(6)
    assert [record.number for record in log.read("cuts/m")] == [7]
    assert [seal.version for seal in store.seals()[0]] == list(range(max(1, 7 - kept), 8))


class RefusingStore(MemoryStore):
    """A log in memory whose volume refuses to drop records for a while."""

    refuses = False

    def drop(self, stream: str, number: int, part: int | None = None, *, patient: bool = False) -> Future[None]:
        if not self.refuses:
            return super().drop(stream, number, part, patient=patient)
        done: Future[None] = Future()
        done.set_exception(StorageFailed("no space left"))
        return done


def test_cuts_replace_lost_versions_once_the_volume_accepts_writes_again() -> None:
    log = RefusingStore(MemoryDisk(), 1 << 24)
    store = recovered(log)
    for version in (1, 2, 3):
        publish(store, version, rows_of(SHARDS[0], version))
    store.go_back(1)
    log.refuses = True
    with pytest.raises(StorageFailed, match="no space left"):
        publish(store, 2, rows_of(SHARDS[0], 7))
    store.drop_cut(2)
    assert [seal.version for seal in store.seals()[0]] == [1], "a checkpoint gets no lost seal"
    log.refuses = False
    publish(store, 2, rows_of(SHARDS[0], 8))
    seals, problem = store.seals()
    assert ([seal.version for seal in seals], problem) == ([1, 2], "")
    assert [batch.ids.tolist() for batch in store.rows(seals[1])] == [[8]]


def test_a_log_that_is_full_of_seals_goes_on(tmp_path: Path) -> None:
    log = LmdbStore(LogOptions(directory=tmp_path / "log", max_bytes=1 << 20))
    store, newest = ModelStore(log, "m"), list[Seal]()

    def is_sealed() -> bool:
        seal = replace(sealed(len(newest) + 1, world_size=1), run="r" * 1000).after(newest[-1] if newest else None)
        done = store.seal(seal).exception(TIMEOUT) is None
        newest.extend([seal] if done else [])
        return done

    while is_sealed():
        if len(newest) % 50 == 0:
            store.truncate(len(newest))
    store.truncate(len(newest))
    while log.refusing:  # As housekeeping does.
        store.keep_fewer_seals(len(newest))
        log.refusing = False
        is_sealed()
    kept = [each.version for each in store.seals()[0]]
    assert len(kept) > 100
    assert kept == list(range(kept[0], len(newest) + 1))
    log.close()


def test_a_data_directory_does_not_grow_with_its_versions() -> None:
    with fast_folder() as folder:
        sizes = list(versions.publish(Path(folder), 4_000, looks=8, kept_seals=250))
    assert [each.version for each in sizes] == list(range(500, 4_001, 500))
    assert len({each.files for each in sizes}) == 1
    assert max(each.bytes for each in sizes[2:]) <= 1.5 * sizes[1].bytes
    assert sizes[-1].log_bytes < 2 << 20


FOUR_TABLES = [TableSpec(f"table {number}", 10, 4) for number in range(4)]
FOUR_SHARDS = [[Shard.whole(table)] for table in FOUR_TABLES]
RECORDS = [pack_layout(FOUR_TABLES, shards) for shards in FOUR_SHARDS]


@pytest.fixture
def log(tmp_path: Path) -> Iterator[LmdbStore]:
    log = LmdbStore(LogOptions(directory=tmp_path / "log", max_bytes=1 << 20))
    yield log
    log.close()


def numbers(log: LmdbStore | MemoryStore) -> set[int]:
    return {record.number for record in log.read("layouts/m")}


def test_a_layout_is_written_once(log: LmdbStore) -> None:
    layouts = Layouts(log, "m")
    first, again, other = (layouts.use(RECORDS[each], FOUR_SHARDS[each], 1) for each in (0, 0, 1))
    for use in (first, again, other):
        use.written.result(TIMEOUT)
    assert first.number == again.number != other.number
    assert (first.log_bytes, again.log_bytes, other.log_bytes) == (len(RECORDS[0]), 0, len(RECORDS[1]))
    assert [bytes(record.payload) for record in log.read("layouts/m", first.number, first.number)] == [RECORDS[0]]
    assert numbers(log) == {first.number, other.number}
    assert layouts.shards(other.number) == FOUR_SHARDS[1]
    layouts.forget(1)
    with pytest.raises(StorageFailed, match=f"the log's layout {first.number} of model 'm' is missing"):
        layouts.shards(first.number)


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), max_size=30))
def test_the_log_has_exactly_the_layouts_that_its_rows_name(steps: list[tuple[int, bool]]) -> None:
    log = MemoryStore(MemoryDisk(), 1 << 20)
    layouts, named = Layouts(log, "m"), dict[int, int]()
    for version, (each, cuts) in enumerate(steps, 1):
        named[layouts.use(RECORDS[each], FOUR_SHARDS[each], version).number] = version
        if cuts:
            layouts.forget(version - 1)
            named = {number: newest for number, newest in named.items() if newest >= version}
        assert numbers(log) == set(named)


class FailingAppends(MemoryStore):
    """A log in memory that takes no records for a while."""

    failing: Future[None] | None = Future()

    def append(self, *arguments: Any, **named: Any) -> Future[None]:
        return self.failing or super().append(*arguments, **named)


def test_a_layout_that_could_not_be_written_is_written_by_the_next_part() -> None:
    """Else rows would name a layout that nobody has."""
    log, failing = FailingAppends(MemoryDisk(), 1 << 20), Future[None]()
    layouts, log.failing = Layouts(log, "m"), failing
    uses = [layouts.use(RECORDS[0], FOUR_SHARDS[0], 1) for _ in range(2)]  # Of two ranks that hold the same.
    failing.set_exception(StorageFailed("the log is full"))
    for use in uses:
        assert use.written.exception(TIMEOUT)
    log.failing = None
    use = layouts.use(RECORDS[0], FOUR_SHARDS[0], 1)
    use.written.result(TIMEOUT)
    assert use.log_bytes == len(RECORDS[0])
    assert numbers(log) == {use.number}


class Overtaken(MemoryStore):
    """A log in memory that begins something else when it is told to drop records."""

    meanwhile: threading.Thread

    def drop(self, *arguments: Any, **named: Any) -> Future[None]:
        self.meanwhile.start()
        self.meanwhile.join(0.1)  # It either overtakes what is forgotten here, or has to wait for it.
        return super().drop(*arguments, **named)


def test_truncating_the_log_keeps_the_layout_of_a_part_under_way() -> None:
    log = Overtaken(MemoryDisk(), 1 << 20)
    layouts = Layouts(log, "m")
    layouts.use(RECORDS[0], FOUR_SHARDS[0], 1).written.result(TIMEOUT)
    log.meanwhile = threading.Thread(target=lambda: layouts.use(RECORDS[0], FOUR_SHARDS[0], 2))
    layouts.forget(1)
    log.meanwhile.join(TIMEOUT)
    (number,) = numbers(log)
    assert layouts.shards(number) == FOUR_SHARDS[0]

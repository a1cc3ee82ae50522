"""Logs of format 1 are brought to format 2, whenever that is cut short and however full they are."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import lmdb
import numpy as np
import pytest
from tests.support.damage import entries
from tests.support.data_directory import unpack
from tests.support.format_1 import Format1Log, rows_of

from deltasync.core.errors import StorageFailed
from deltasync.core.rows import RowBatch
from deltasync.core.tables import Shard, TableSpec
from deltasync.storage import format_1
from deltasync.storage.lmdb_store import LmdbStore
from deltasync.storage.log_store import LogOptions
from deltasync.storage.model_records import recorded_models
from deltasync.storage.model_store import ModelStore

USER, ITEM = TableSpec("user", 1000, 4), TableSpec("item", 500, 3, np.dtype("<f2"))
HALVES = [Shard(USER, 0, 500, 0, 4), Shard(USER, 500, 500, 0, 4)]
MAX_BYTES = 1 << 24


def opened(directory: Path, max_bytes: int = MAX_BYTES) -> LmdbStore:
    return LmdbStore(LogOptions(directory=directory, max_bytes=max_bytes))


def store_of(log: LmdbStore, folder: Path) -> ModelStore:
    """The model's store without its tables' files: what it has of the log."""
    store = ModelStore(log, "m", folder)
    store.recover(dict(recorded_models(log)["m"]) | {"tables": []})
    return store


def replayed(store: ModelStore) -> list[tuple[int, str, list[int], bytes]]:
    cuts = [(seal, rows) for seal in store.seals() if seal.version > store.flushed for rows in store.rows(seal)]
    return [(seal.version, rows.table.name, rows.ids.tolist(), rows.values.tobytes()) for seal, rows in cuts]


class _Death(Exception):
    pass


class _DiesAfter:
    """Ends a migration after so many transactions."""

    def __init__(self, transactions: int) -> None:
        self._left = transactions

    @contextmanager
    def __call__(self, env: lmdb.Environment) -> Iterator[lmdb.Transaction]:
        if not self._left:
            raise _Death
        self._left -= 1
        with env.begin(write=True) as txn:
            yield txn


def test_one_that_is_cut_short_again_and_again_ends_as_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unpack("5ad1623", tmp_path / "data")
    log = tmp_path / "data" / "log"
    monkeypatch.setattr(format_1, "_MOVED_BYTES", 1)
    shutil.copytree(log, tmp_path / "whole")
    opened(tmp_path / "whole").close()
    expected = {name: entries(tmp_path / "whole", name) for name in ("meta", "records")}
    deaths = 0
    while True:
        with monkeypatch.context() as patch:
            patch.setattr(format_1, "_transaction", _DiesAfter(2 + deaths % 3))
            try:
                opened(log).close()
                break
            except _Death:
                deaths += 1
        for value in entries(log, "meta").values():  # Of an older service, started now, the first one is the end.
            with pytest.raises(ValueError):  # noqa: PT011  # Whichever of these json says.
                json.loads(value)
    assert deaths > 10
    assert {name: entries(log, name) for name in ("meta", "records")} == expected


def test_no_more_room_is_taken_than_a_few_records_need(tmp_path: Path) -> None:
    """The log may be full to its cap."""
    shard, ids, version = Shard.whole(USER), list(range(1000)), 0
    with Format1Log(tmp_path / "log", 4 << 20) as log:
        log.model("m", [USER])
        with suppress(lmdb.MapFullError):
            while version := version + 1:
                log.cut("m", version, [rows_of(shard, *ids, value=version) for _ in range(10)])
    size = (tmp_path / "log" / "data.mdb").stat().st_size
    assert size > 3 << 20
    migrated = opened(tmp_path / "log", 4 << 20)
    assert (tmp_path / "log" / "data.mdb").stat().st_size < size + (3 << 20)
    assert migrated.used_bytes() < size
    found = replayed(store_of(migrated, tmp_path))
    assert [each[0] for each in found] == [each for each in range(1, version) for _ in range(10)]
    assert found[-1][3] == rows_of(shard, *ids, value=version - 1).values.tobytes()
    migrated.append("s", 1, 0, 0, bytes(100)).exception(20)  # The cap is the one it was opened with.
    migrated.close()


def test_rows_that_nobody_would_read_stay_behind(tmp_path: Path) -> None:
    with Format1Log(tmp_path / "log") as log:
        log.model("m", [USER], flushed=2)
        log.small("view/v", {"flushed": 5, "tables": [{"mode": "embeddings"}]})
        for version in range(1, 5):
            log.cut("m", version, [rows_of(HALVES[0], version)])
        log.opening("m", 5, HALVES)  # Of a cut that was never finished.
        log.part("m", 5, 0, 1, bytes(16))
        log.part("m", 5, 1, 1, bytes(16))  # Its opening did not fit the log.
        log.opening("gone", 1, HALVES)
        for view, number in (("v", 5), ("gone", 6)):
            log.part(f"view/{view}", number, 0, 0, bytes(8))
    migrated = opened(tmp_path / "log")
    assert migrated.streams() == ["cuts/m", "layouts/m", "seals/m"]
    assert [version for version, *_ in replayed(store_of(migrated, tmp_path))] == [3, 4]
    migrated.close()


def test_what_an_abandoned_cut_of_a_larger_run_has_left_is_not_read(tmp_path: Path) -> None:
    with Format1Log(tmp_path / "log") as log:
        log.model("m", [USER])
        log.cut("m", 1, [rows_of(HALVES[1], 700)], rank=1)
        log.cut("m", 1, [rows_of(HALVES[0], 3)], rank=0)
    migrated = opened(tmp_path / "log")
    assert [ids for _, _, ids, _ in replayed(store_of(migrated, tmp_path))] == [[3]]
    migrated.close()


def test_rows_of_several_ranks_and_tables_come_back_bit_by_bit(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    cuts: list[list[RowBatch]] = []
    with Format1Log(tmp_path / "log") as log:
        log.model("m", [USER, ITEM])
        for version in range(1, 6):
            ids = np.unique(rng.integers(0, 500, 20))
            values = rng.normal(size=(len(ids), 3)).astype("<f2")
            cuts.append([rows_of(HALVES[1], 500 + version, 900), RowBatch(Shard.whole(ITEM), ids, values)])
            log.cut("m", version, cuts[-1])
    migrated = opened(tmp_path / "log")
    expected = [
        (version, rows.table.name, rows.ids.tolist(), rows.values.tobytes())
        for version, batches in enumerate(cuts, 1)
        for rows in batches
    ]
    store = store_of(migrated, tmp_path)
    assert replayed(store) == expected
    assert len(list(migrated.read("layouts/m"))) == 1
    migrated.close()


@pytest.mark.parametrize("kept", [3, 9])
def test_a_log_that_was_cut_behind_the_flush_that_is_written_down_opens(tmp_path: Path, kept: int) -> None:
    """A table that was added during a flush wrote down the flush before."""
    with Format1Log(tmp_path / "log") as log:
        log.model("m", [USER], flushed=0)
        for version in range(1, 6):
            log.seal("m", version)
            if version >= kept:
                log.cut("m", version, [rows_of(HALVES[0], version)])
    migrated = opened(tmp_path / "log")
    store = store_of(migrated, tmp_path)
    assert store.flushed == min(kept - 1, 5)
    assert [version for version, *_ in replayed(store)] == list(range(kept, 6))
    migrated.close()


def test_what_is_damaged_is_an_error_that_names_it_and_nothing_is_lost(tmp_path: Path) -> None:
    with Format1Log(tmp_path / "log") as log:
        log.model("m", [USER])
        log.cut("m", 1, [rows_of(HALVES[0], 3)])
        log.small("offset/a/b", {"version": 4})
    file = tmp_path / "log" / "data.mdb"
    whole = file.read_bytes()
    for old, new, said in [
        (b'{"version": 4}', b'["version": 4}', "record offset/a/b cannot be understood"),
        (
            b'{"version": 1, "step"',
            b'{"versiom": 1, "step"',
            "seal of version 1 of model 'm' cannot be understood",
        ),
        (b'"flushed": 0', b'"fluched": 0', "record model/m cannot be understood"),
        (
            rows_of(HALVES[0], 3).values.tobytes(),
            bytes(16),
            "record 1 of rank 0 of version 1 of model 'm' is damaged",
        ),
    ]:
        assert whole.count(old) >= 1
        file.write_bytes(whole.replace(old, new))
        with pytest.raises(StorageFailed, match=said):
            opened(tmp_path / "log")
    file.write_bytes(whole)
    migrated = opened(tmp_path / "log")
    assert [ids for _, _, ids, _ in replayed(store_of(migrated, tmp_path))] == [[3]]
    migrated.close()


def test_an_older_service_fails_before_it_has_written_anything(tmp_path: Path) -> None:
    """Also where there is no small record yet at which it would."""
    unpack("5ad1623", tmp_path / "data")
    for log in tmp_path / "new", tmp_path / "data" / "log":
        for _ in range(2):
            opened(log).close()
            before = {name: entries(log, name) for name in ("meta", "records")}
            with pytest.raises(lmdb.IncompatibleError):
                Format1Log(log)
            assert {name: entries(log, name) for name in ("meta", "records")} == before


def test_a_log_of_format_2_that_an_older_service_could_still_look_at_opens(tmp_path: Path) -> None:
    """It made its databases, and failed at the first small record."""
    log = opened(tmp_path)
    log.put("format", b"2")
    log.append("s", 1, 0, 0, b"x").result(20)
    log.close()
    with lmdb.open(str(tmp_path), max_dbs=3) as environment, environment.begin(write=True) as txn:
        txn.delete(b"parts")
    Format1Log(tmp_path).__exit__(None, None, None)
    log = opened(tmp_path)
    assert (log.items(""), log.streams()) == ({"format": b"2"}, ["s"])
    log.close()

"""Damage on disk costs the damaged chunk: its rows come from elsewhere, and nothing is removed or said wrongly."""

import os
import re
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from tests.support.command import deltasync
from tests.support.damage import change_value, entries
from tests.support.damaged import (
    REMEDY,
    Resending,
    Written,
    base_of,
    check_replicas,
    files,
    flip,
    manifests_of,
    trouble,
)
from tests.support.fleet import ITEM, WAIT, Recorder, admin_of, follow
from tests.support.process import ServiceProcess
from tests.support.server import TOKEN, RunningService

from deltasync.client import Contradiction, NotFound, ServiceUnavailable, TableSpec
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions
from deltasync.log.records import key_of

USER = TableSpec("user", 12_000, 32)  # Two chunks.
TABLES = [USER, ITEM]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    written = Written(tmp_path_factory.mktemp("damage") / "whole", TABLES)
    written.write()
    return written


def running(data_dir: Path, **settings: Any) -> RunningService:
    """A service that writes no checkpoint by itself."""
    return RunningService(data_dir, checkpoint_seconds=10_000.0, **settings)


@pytest.fixture
def data_dir(written: Written, tmp_path: Path) -> Path:
    return written.copy(tmp_path / "data")


def test_a_flipped_bit_in_the_base_costs_the_rows_of_its_chunk(
    written: Written, data_dir: Path, tmp_path: Path
) -> None:
    flip(base_of(data_dir), 700_000)
    before, log = files(data_dir / "checkpoints"), entries(data_dir / "log", "records")
    with running(data_dir) as service:
        said = trouble(service)
        assert "model 'clicks' is still recovering: it lacks" in said
        assert "rows of table 'user'" in said
        assert base_of(data_dir).name in said
        assert REMEDY in said
        status, lag = service.get("/consumers/plain")
        assert (status, "it lacks" in lag) == (503, True)
        assert "it lacks" in service.get("/consumers")[1]
        with follow(service, "plain", "waiting", target := Recorder()) as waiting:
            with Resending(service, written) as trainer:
                head = trainer.go_on()
                assert not trainer.full
                assert trainer.asked.keys() == {"user"}
                lost = trainer.asked["user"]
                assert 0 < len(lost) < USER.rows
                assert lost[-1] - lost[0] < len(lost) + 200, "one chunk, without rows that came later"
                waiting.wait_for(head, WAIT)
                assert trouble(service) == ""
                check_replicas(service, written, lambda _: trainer.rows)
                newest = {name: rows.copy() for name, rows in trainer.rows.items()}
            np.testing.assert_array_equal(target.tables["user"], newest["user"])
    assert files(data_dir / "checkpoints") == before
    assert log.keys() <= entries(data_dir / "log", "records").keys()
    for last in (False, True):
        with running(data_dir) as service:
            assert trouble(service) == "", "the log has the rows, and then a checkpoint with a base of its own"
            check_replicas(service, written, lambda _: newest)
            if not last:
                admin_of(service).make_checkpoint("clicks")


def test_a_copy_at_a_url_has_the_rows(written: Written, data_dir: Path, tmp_path: Path) -> None:
    copies = str(tmp_path / "copies")
    with running(data_dir, checkpoints=copies) as service:
        admin_of(service).make_checkpoint("clicks")
    right = files(data_dir / "checkpoints")
    flip(base_of(data_dir), 700_000)
    with running(data_dir, checkpoints=copies) as service:
        assert trouble(service) == ""
        check_replicas(service, written, lambda _: written.newest)
    assert files(data_dir / "checkpoints") == right


def test_a_model_without_a_readable_checkpoint_stays_until_it_is_given_up(
    written: Written, data_dir: Path, tmp_path: Path
) -> None:
    right, log = files(data_dir / "checkpoints"), entries(data_dir / "log", "records")
    manifests = manifests_of(data_dir)
    for each in manifests:
        flip(each, 300)
    damaged = files(data_dir / "checkpoints")
    with running(data_dir) as service:
        said = trouble(service)
        assert "the log has no rows of model 'clicks' up to version 2, and no checkpoint is usable" in said
        assert all(each.name in said for each in manifests)
        assert REMEDY in said
        assert "not published" not in service.get("/consumers")[1]
        with pytest.raises(ServiceUnavailable, match="no checkpoint is usable"):
            admin_of(service).make_checkpoint("clicks")
    assert files(data_dir / "checkpoints") == damaged
    assert entries(data_dir / "log", "records") == log
    for name, content in right.items():
        (data_dir / "checkpoints" / name).write_bytes(content)
    with running(data_dir) as service:
        assert trouble(service) == ""
        check_replicas(service, written, lambda _: written.newest)
        with pytest.raises(Contradiction, match="is recovered: to remove it, use deltasync models delete"):
            admin_of(service).give_up_model("clicks")
    for each in manifests:
        flip(each, 300)
    with ServiceProcess(data_dir, log=tmp_path / "said") as service:
        assert trouble(service)
        with pytest.raises(NotFound):
            admin_of(service).give_up_model("others")
        assert deltasync("models", "give-up", "clicks", "--service", service.http, token=TOKEN)[0] == 0
        assert trouble(service) == ""
        with Resending(service, written) as trainer:
            trainer.go_on()
            assert trainer.full
            check_replicas(service, written, lambda _: trainer.rows)
        assert service.lines(
            "audit done: role=admin .* call=POST /models/clicks/give-up: model deleted: .*given up: "
        )


def test_a_damaged_log_record_stays_until_the_trainer_replaces_it(
    written: Written, data_dir: Path, tmp_path: Path
) -> None:
    directory, right = data_dir / "log", entries(data_dir / "log", "records")
    record = key_of("cuts/clicks", 5, 0, 0)
    change_value(directory, "records", record, 99)
    for mended in (False, True):
        with ServiceProcess(data_dir, log=tmp_path / "said") as service:
            assert trouble(service) == ""
            assert check_replicas(service, written, written.rows.__getitem__) == (6 if mended else 4)
            assert service.lines("the log is damaged after version 4, and continues from there: .* of version 5")
            assert service.terminate() == 0
        if not mended:
            assert {key for key in right if key.startswith((b"cuts", b"seals"))} <= entries(
                directory, "records"
            ).keys()
            change_value(directory, "records", record, 99)
    change_value(directory, "records", record, 99)
    with running(data_dir) as again, Resending(again, written) as trainer:
        assert trouble(again) == ""
        assert trainer.go_on().number == 5
        assert check_replicas(again, written, lambda _: trainer.rows) == 5
    with running(data_dir) as last:
        assert check_replicas(last, written, lambda _: trainer.rows) == 5


def as_later_manifest(data_dir: Path) -> str:
    path = manifests_of(data_dir)[-1]
    _, _, body = path.read_bytes().partition(b"\n")
    path.write_bytes(f"deltasync checkpoint 2 {xxhash.xxh3_128_hexdigest(body, 2)}\n".encode() + body)
    return f"{path.name} has format 2, this version reads 1: update deltasync"


def as_later_chunk(data_dir: Path) -> str:
    path = base_of(data_dir)
    content = bytearray(path.read_bytes())
    _, _, _, rows, size = struct.unpack_from("<4sIIIQ", content)
    end = 24 + 8 * rows + size
    struct.pack_into("<I", content, 4, 2)
    checksum = xxhash.xxh3_64_intdigest(content[:end], xxhash.xxh3_64_intdigest(f"{path.name} 0".encode()))
    struct.pack_into("<Q", content, end, checksum)
    path.write_bytes(content)
    return f"{path.name} has format 2, this version reads 1: update deltasync"


def as_later_log(data_dir: Path) -> str:
    log = LmdbStore(LogOptions(directory=data_dir / "log"))
    log.put("data-format", b"2").result()
    log.close()
    return "the log has format 2, this version reads 1: update deltasync"


def as_cut_log(data_dir: Path) -> str:
    path = data_dir / "log" / "data.mdb"
    size = path.stat().st_size // 2
    os.truncate(path, size)
    return f"{path} was cut short: it has {size} bytes, but needs .*: restore a backup"


def as_lost_log(data_dir: Path) -> str:
    shutil.rmtree(data_dir / "log")
    return "has checkpoints, but the log beside it is missing"


@pytest.mark.parametrize(
    "change",
    [
        as_later_manifest,
        as_cut_log,
        *(pytest.param(each, marks=pytest.mark.nightly) for each in (as_later_chunk, as_later_log, as_lost_log)),
    ],
)
def test_a_start_that_is_refused_touches_nothing(data_dir: Path, change: Callable[[Path], str]) -> None:
    wanted = change(data_dir)
    before = files(data_dir)
    ended = ServiceProcess(data_dir).run_to_end()
    assert ended.returncode == 1, ended.stderr
    assert re.search(wanted, ended.stderr), ended.stderr
    assert files(data_dir) == before

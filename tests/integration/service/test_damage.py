"""Damage on disk costs the damaged chunk: its rows come from elsewhere, and nothing is removed or said wrongly."""

import json
import os
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from tests.support.command import deltasync
from tests.support.damage import entries
from tests.support.fleet import ITEM, WAIT, Recorder, Trainer, admin_of, as_sent, follow, wait_for_lag
from tests.support.process import ServiceProcess
from tests.support.server import TOKEN
from tests.support.waiting import wait_for

from deltasync.client import (
    Contradiction,
    NotFound,
    Policy,
    Position,
    ResyncRequired,
    ServiceUnavailable,
    TableSpec,
    ValueType,
)
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions

USER = TableSpec("user", 12_000, 32)  # Two chunks.
TABLES = [USER, ITEM]
TYPES = {"plain": ValueType.FP32, "small": ValueType.INT8}
REMEDY = "deltasync models give-up clicks"


class Resending(Trainer):
    """A trainer that sends rows again if the service asks for them, as `DeltaSync` does.

    Attributes:
        asked: the rows that the service named, by table.
        full: whether the service asked for every row.
    """

    def __init__(self, service: ServiceProcess, before: "Written | None" = None) -> None:
        super().__init__(service.grpc, TABLES, continues=before.position if before else None)
        self.asked, self.full = dict[str, list[int]](), False
        if before:
            self.rows = {name: rows.copy() for name, rows in before.newest.items()}
            self._step = before.position.number

    def go_on(self) -> Position:
        """Change a row of each table, and publish it with what the service asks for."""
        ids = [np.array([3]) for _ in self.tables]
        for table in self.tables:
            self.rows[table.name][3] += 1
        try:
            return self._publish(ids)
        except ResyncRequired as error:
            if error.changed is None:
                self.full = True
                return self.publish_all()
            self.asked = {name: rows.tolist() for name, rows in error.changed}
            return self._publish(
                [
                    np.union1d(each, self.asked.get(table.name, [])).astype(np.int64)
                    for table, each in zip(self.tables, ids, strict=True)
                ]
            )


@dataclass
class Written:
    """A data directory with checkpoints of several versions on one base, and the rows at each version."""

    folder: Path
    position: Position = field(default_factory=Position)
    rows: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def newest(self) -> dict[str, Any]:
        return self.rows[self.position.number]

    def note(self, position: Position, trainer: Trainer) -> None:
        self.position = position
        self.rows[position.number] = {name: rows.copy() for name, rows in trainer.rows.items()}

    def copy(self, folder: Path) -> Path:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(self.folder, folder)
        return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """Versions 1 to 6; checkpoints of 2 and 4, whose base is 2; the log begins after version 2."""
    written = Written(tmp_path_factory.mktemp("damage") / "whole")
    with ServiceProcess(written.folder) as service, Resending(service) as trainer:
        admin = admin_of(service)
        written.note(trainer.publish_all(), trainer)
        for name, value_type in TYPES.items():
            admin.create_consumer(name, "clicks", Policy(value_type=value_type))
        with follow(service, "plain", "first", Recorder()), follow(service, "small", "first", Recorder()):
            for _ in range(5):
                written.note(trainer.change(20), trainer)
                for name in TYPES:
                    wait_for_lag(service, name, lambda lag: lag["lag"]["versions"] == lag["lag"]["rows"] == 0)
                if written.position.number % 2 == 0 and written.position.number < 6:
                    admin.make_checkpoint("clicks")
        assert service.terminate() == 0
    return written


@pytest.fixture
def data_dir(written: Written, tmp_path: Path) -> Path:
    return written.copy(tmp_path / "data")


def flip(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 16
    path.write_bytes(content)


def base_of(data_dir: Path) -> Path:
    """The file that all checkpoints share."""
    return max((data_dir / "checkpoints" / "clicks" / "data").iterdir(), key=lambda path: path.stat().st_size)


def stored(data_dir: Path) -> dict[str, bytes]:
    """All files of checkpoints."""
    return {
        str(path.relative_to(data_dir)): path.read_bytes()
        for path in (data_dir / "checkpoints").rglob("*")
        if path.is_file()
    }


def trouble(service: ServiceProcess) -> str:
    """Why the service is not ready once it has recovered what it can; empty if it is."""

    def found() -> tuple[str, ...]:
        status, said = service.get("/readyz")
        text = "" if status == 200 else json.loads(said)["message"]
        return () if text == "still recovering: clicks" or "compiling" in text else (text,)

    return wait_for(found)[0]


def check_replicas(service: ServiceProcess, rows: dict[str, Any], head: Position) -> None:
    """Check that new replicas of each consumer get these rows, and prove it."""
    for consumer, value_type in TYPES.items():
        with follow(service, consumer, "new", target := Recorder()):
            wait_for_lag(
                service,
                consumer,
                lambda lag: (
                    any(
                        each["replica"] == "new"
                        and each["checked"]
                        and not each["lag"]["rows"]
                        and not each["lag"]["versions"]
                        for each in lag["replicas"]
                    )
                    and lag["head"] >= head.number
                ),
            )
            expected = {each.name: as_sent(each, rows[each.name], value_type) for each in TABLES}
            for name, wanted in expected.items():
                np.testing.assert_array_equal(target.tables[name], wanted)


def test_a_flipped_bit_in_the_base_costs_the_rows_of_its_chunk(
    written: Written, data_dir: Path, tmp_path: Path
) -> None:
    flip(base_of(data_dir), 700_000)
    before, log = stored(data_dir), entries(data_dir / "log", "records")
    with ServiceProcess(data_dir, log=tmp_path / "said") as service:
        said = trouble(service)
        assert "model 'clicks' is still recovering: it lacks" in said
        assert "rows of table 'user'" in said
        assert base_of(data_dir).name in said
        assert REMEDY in said
        status, lag = service.get("/consumers/plain/lag")
        assert (status, "it lacks" in lag) == (503, True)
        assert "it lacks" in service.get("/lag")[1]
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
                check_replicas(service, trainer.rows, head)
                newest = {name: rows.copy() for name, rows in trainer.rows.items()}
            np.testing.assert_array_equal(target.tables["user"], newest["user"])
        assert service.terminate() == 0
    assert stored(data_dir) == before
    assert log.keys() <= entries(data_dir / "log", "records").keys()
    for last in (False, True):
        with ServiceProcess(data_dir) as service:
            assert trouble(service) == "", "the log has the rows, and then a checkpoint with a base of its own"
            check_replicas(service, newest, head)
            if not last:
                admin_of(service).make_checkpoint("clicks")
            assert service.terminate() == 0


def test_a_copy_at_a_url_has_the_rows(written: Written, data_dir: Path, tmp_path: Path) -> None:
    copies = "--checkpoints", str(tmp_path / "copies")
    with ServiceProcess(data_dir, *copies) as service:
        admin_of(service).make_checkpoint("clicks")
        assert service.terminate() == 0
    right = stored(data_dir)
    flip(base_of(data_dir), 700_000)
    with ServiceProcess(data_dir, *copies) as service:
        assert trouble(service) == ""
        check_replicas(service, written.newest, written.position)
    assert stored(data_dir) == right


def test_a_model_without_a_readable_checkpoint_is_kept_until_an_operator_gives_it_up(
    written: Written, data_dir: Path, tmp_path: Path
) -> None:
    right, log = stored(data_dir), entries(data_dir / "log", "records")
    manifests = list((data_dir / "checkpoints" / "clicks" / "manifests").iterdir())
    for each in manifests:
        flip(each, 300)
    damaged = stored(data_dir)
    with ServiceProcess(data_dir) as service:
        said = trouble(service)
        assert "the log has no rows of model 'clicks' up to version 2, and no checkpoint is usable" in said
        assert all(each.name in said for each in manifests)
        assert REMEDY in said
        assert "not published" not in service.get("/lag")[1]
        with pytest.raises(ServiceUnavailable, match="no checkpoint is usable"):
            admin_of(service).make_checkpoint("clicks")
        assert service.terminate() == 0
    assert stored(data_dir) == damaged
    assert entries(data_dir / "log", "records") == log
    for name, content in right.items():
        (data_dir / name).write_bytes(content)
    with ServiceProcess(data_dir) as service:
        assert trouble(service) == ""
        check_replicas(service, written.newest, written.position)
        with pytest.raises(Contradiction, match="is recovered: to remove it, use deltasync models delete"):
            admin_of(service).give_up_model("clicks")
        assert service.terminate() == 0
    for each in manifests:
        flip(each, 300)
    with ServiceProcess(data_dir, log=tmp_path / "said") as service:
        assert trouble(service)
        with pytest.raises(NotFound):
            admin_of(service).give_up_model("others")
        assert deltasync("models", "give-up", "clicks", "--service", service.http, token=TOKEN)[0] == 0
        assert trouble(service) == ""
        with Resending(service, written) as trainer:
            head = trainer.go_on()
            assert trainer.full
            check_replicas(service, trainer.rows, head)
        assert service.lines(
            "audit done: role=admin .* call=POST /models/clicks/give-up: model deleted: .*given up: "
        )


def as_later_manifest(data_dir: Path) -> str:
    path = max((data_dir / "checkpoints" / "clicks" / "manifests").iterdir())
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


@pytest.mark.parametrize("change", [as_later_manifest, as_later_chunk, as_later_log, as_cut_log, as_lost_log])
def test_a_start_that_is_refused_touches_nothing(data_dir: Path, change: Callable[[Path], str]) -> None:
    wanted = change(data_dir)
    before = everything(data_dir)
    ended = ServiceProcess(data_dir).run_to_end()
    assert ended.returncode == 1, ended.stderr
    assert re.search(wanted, ended.stderr), ended.stderr
    assert everything(data_dir) == before


def everything(folder: Path) -> dict[str, bytes | None]:
    """All files and folders below a folder."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    }


RANGE_BYTES = 64
BY_DAY = 10


def places(written: Written) -> list[tuple[str, int]]:
    """A byte of each range of each file that is read at a start."""
    rng = random.Random(48)
    files = [path for name in ("checkpoints", "log") for path in (written.folder / name).rglob("*")]
    return [
        (str(path.relative_to(written.folder)), min(first + rng.randrange(RANGE_BYTES), path.stat().st_size - 1))
        for path in sorted(files)
        if path.is_file() and path.name != "lock.mdb"
        for first in range(0, path.stat().st_size, step_of(path))
    ]


def check_damage(written: Written, data_dir: Path, name: str, at: int) -> str:
    """Flip a bit, start a service, let the trainer go on, and check everything; returns what happened."""
    flip(data_dir / name, at)
    before = everything(data_dir)
    service = ServiceProcess(data_dir)
    ...

"""Where the values of a deleted row are left, and what removes them: what sync_service/README.md says of it."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from tests.support.server import RunningService
from tests.support.wire import USER, WHOLE, RankStream, close, full_part, random_rows

from deltasync.core.position import Position
from deltasync.v1 import publish_pb2, tables_pb2

ERASED = np.array([1234.5, -4321.25, 77.125, 0.0625], "<f4")
ROW = 7


def publish(service: RunningService) -> Position:
    """A row, and then its delete."""
    rows = random_rows(0)
    rows[0][ROW] = ERASED
    deleted = tables_pb2.Rows(slot=0, ids=np.array([ROW], "<i8").tobytes(), deleted=True)
    with RankStream(service.grpc) as rank:
        rank.opened()
        rank.send(*full_part(1, rows, WHOLE))
        rank.sealed()
        rank.send(publish_pb2.PublishRequest(chunk=publish_pb2.PartChunk(step=2, rows=deleted)), close(2, 1))
        return rank.sealed()


def holding(folder: Path) -> set[str]:
    """The files in which the row still is."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)) for path in files if ERASED.tobytes() in path.read_bytes()}


def test_after_a_clean_stop_a_compacted_copy_of_the_log_is_without_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with RunningService(data) as service:
        assert publish(service).number == 2
        assert "log/data.mdb" in holding(data), "the log has it until the tables are flushed"
    assert holding(data) <= {"log/data.mdb"}, "the tables' files are overwritten"
    copy = tmp_path / "log"
    compacting = [sys.executable, "-m", "lmdb", "copy", "--compact", "-e", str(data / "log"), str(copy)]
    subprocess.run(compacting, check=True, capture_output=True, timeout=60)
    (copy / "data.mdb").replace(data / "log" / "data.mdb")
    assert holding(data) == set()
    with RunningService(data) as service:
        assert service.get_json("/tables")[0]["head"] == 2
        assert service.get_json("/tables")[0]["table"] == USER.name

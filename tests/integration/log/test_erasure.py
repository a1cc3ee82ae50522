"""Where the values of a deleted row are left, and what removes them: what sync_service/docs/operating.md says."""

import subprocess
import sys
from pathlib import Path

import numpy as np
from tests.support.fleet import admin_of
from tests.support.server import RunningService
from tests.support.wire import USER, WHOLE, RankStream, close, delete_chunk, full_part, part, random_rows

ERASED = np.array([1234.5, -4321.25, 77.125, 0.0625], "<f4")
ROW = 7


def publish(rank: RankStream) -> None:
    """A row, among all others."""
    rows = random_rows(0)
    rows[0][ROW] = ERASED
    rank.opened()
    rank.send(*full_part(1, rows, WHOLE))
    rank.sealed()


def delete(rank: RankStream) -> None:
    rank.send(delete_chunk(2, 0, [ROW]), close(2, 1))
    rank.sealed()


def change_others(rank: RankStream, step: int) -> None:
    others = np.delete(np.arange(USER.rows), ROW)
    rank.send(*part(step, [(0, others, random_rows(step)[0][others])]))
    rank.sealed()


def holding(folder: Path) -> set[str]:
    """The files in which the row still is."""
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)) for path in files if ERASED.tobytes() in path.read_bytes()}


def test_checkpoints_and_then_a_compacted_copy_of_the_log_are_without_it(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with RunningService(data, keep_checkpoints=2) as service, RankStream(service.grpc) as rank:
        admin = admin_of(service)
        publish(rank)
        admin.make_checkpoint("clicks")
        assert {name.partition("/")[0] for name in holding(data)} == {"checkpoints", "log"}
        delete(rank)
        for step in range(3, 8):  # Until a new base has replaced the first one, and another has followed.
            change_others(rank, step)
            admin.make_checkpoint("clicks")
    assert holding(data) <= {"log/data.mdb"}, "its free pages alone may have it"
    copy = tmp_path / "log"
    compacting = [sys.executable, "-m", "lmdb", "copy", "--compact", "-e", str(data / "log"), str(copy)]
    subprocess.run(compacting, check=True, capture_output=True, timeout=60)
    (copy / "data.mdb").replace(data / "log" / "data.mdb")
    assert holding(data) == set()
    with RunningService(data) as service:
        assert service.get_json("/tables")[0]["head"] == 7
        assert service.get_json("/tables")[0]["table"] == USER.name

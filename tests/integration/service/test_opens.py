"""Ranks that open streams and publish nothing: whatever they announce, and however the service ends, it costs
nothing that lasts.
"""

import os
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from tests.support.metrics import LATER_METRICS
from tests.support.process import ServiceProcess
from tests.support.state import rows_of
from tests.support.volumes import small_volume
from tests.support.waiting import wait_for
from tests.support.wire import USER, WHOLE, RankStream, full_part, part, random_rows

from deltasync.core.tables import Shard, TableSpec
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions

CONSUMER = ("--consumer", "predictors=clicks", "--consumer", "probes=clicks")
# With room in the log for every row, so that it is memory that has none.
ENDLESS_LOG = ("--log-max-bytes", str(1 << 44))
TERABYTES = TableSpec("terabytes", 1 << 32, 256)
ROWS = random_rows(0)


def costs(service: ServiceProcess) -> dict[str, Any]:
    """What there is of models: files and folders, and names."""
    checkpoints = service.data_dir / "checkpoints"
    metrics = [line.rpartition(" ")[0] for line in service.get("/metrics")[1].splitlines() if 'model="' in line]
    metrics = [each for each in metrics if each.partition("{")[0] not in LATER_METRICS]
    return {
        "files": sorted(map(str, checkpoints.rglob("*"))),
        "models": [(each["model"], each["head"]) for each in service.get_json("/models")],
        "tables": service.get_json("/tables"),
        "metrics": metrics,
    }


def threads(service: ServiceProcess) -> int:
    return len(list(Path(f"/proc/{service.pid}/task").iterdir()))


def wait_until_it_costs(service: ServiceProcess, wanted: dict[str, Any]) -> None:
    """Once streams that have ended are forgotten, there is what there was."""
    wait_for(lambda: costs(service) == wanted, lambda: (costs(service), wanted))


def free_bytes(volume: Path) -> int:
    found = os.statvfs(volume)
    return found.f_bavail * found.f_frsize


def logged(data_dir: Path) -> tuple[list[str], list[str]]:
    """Streams and small records of models, of a service that has ended."""
    log = LmdbStore(LogOptions(directory=data_dir / "log"))
    try:
        return log.streams(), [each for each in log.items("") if each.startswith(("model/", "removed/"))]
    finally:
        log.close()


def test_opens_that_are_refused_or_followed_by_nothing_leave_nothing() -> None:
    with small_volume(64 << 20) as volume, ServiceProcess(volume / "data", *CONSUMER, *ENDLESS_LOG) as service:
        with RankStream(service.grpc) as stream:
            stream.publish_all()
        before, busy, free = costs(service), threads(service), free_bytes(volume)
        for number in range(210):
            model = f"m{number % 180}"
            kind = number % 3
            if kind == 0:
                with RankStream(service.grpc, model=model, tables=[TERABYTES], shards=[]) as stream:
                    code, text = stream.refusal()
                assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
                assert f"no room for tables of model '{model}'" in text
                assert "bytes of memory are free: give the service more memory" in text
            elif kind == 1:
                other = TableSpec(USER.name, 40, 9)
                with RankStream(service.grpc, tables=[other], shards=[], run="later", started=2) as stream:
                    assert stream.refusal()[0] is grpc.StatusCode.FAILED_PRECONDITION
            else:
                with RankStream(service.grpc, model=model) as stream:
                    stream.opened()
            assert free_bytes(volume) >= free - (4 << 20), "for the log, and nothing else"
        wait_until_it_costs(service, before)
        assert threads(service) <= busy + 8, "pools of a few may have filled; none is of a model"
        np.testing.assert_array_equal(rows_of(service)[USER.name], ROWS[0])
        assert service.get("/readyz") == (200, "ok\n")
        assert service.terminate() == 0
        assert {each.partition("/")[2] for each in logged(service.data_dir)[0]} <= {
            "clicks",
            "predictors",
            "probes",
        }


@pytest.mark.parametrize("messages", [*(pytest.param(n, marks=pytest.mark.nightly) for n in (0, 1)), 2])
def test_a_service_killed_before_a_models_first_seal_starts_without_it(tmp_path: Path, messages: int) -> None:
    """After the open, and after rows and a close of one of two ranks."""
    shard = Shard(USER, 0, 25, 0, 4)
    with ServiceProcess(tmp_path, *CONSUMER) as service:
        with RankStream(service.grpc, world_size=2, tables=[USER], shards=[shard]) as stream:
            stream.opened()
            stream.send(*part(1, [(0, range(25), ROWS[0][:25])], full=True)[:messages])
            if messages:
                with RankStream(service.grpc, model="other") as other:  # Its seal shows that the log has the rows.
                    other.send(*full_part(1, ROWS, WHOLE))
                    other.opened()
                    other.sealed()
            service.kill()
        service.start()
        assert [each["model"] for each in service.get_json("/models")] == (["other"] if messages else [])
        assert not (tmp_path / "checkpoints" / "clicks").exists()
        assert service.terminate() == 0
    streams, records = logged(tmp_path)
    assert not [each for each in (*streams, *records) if each.endswith("/clicks")]

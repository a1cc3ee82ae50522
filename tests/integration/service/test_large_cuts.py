"""A cut that does not fit the log: refused once, with both numbers and what to do, and nobody else's trouble."""

import asyncio
import re
from pathlib import Path

import numpy as np
import pytest
from tests.support.fleet import WAIT, Trainer, follow
from tests.support.local_service import join, run, send
from tests.support.log import log_of
from tests.support.process import ServiceProcess
from tests.support.server import RunningService
from tests.support.wire import chunk, close

from deltasync.client import NumpyTarget, TableSpec
from deltasync.core.errors import Contradiction, StorageFailed
from deltasync.core.tables import Shard
from deltasync.publish.log_room import whole_bytes
from deltasync.service.housekeeping import housekeeping
from deltasync.service.service import Service
from deltasync.v1 import publish_pb2

WIDE = TableSpec("wide", 60_000, 16)  # 4.8 MB in the log
NARROW = TableSpec("narrow", 50_000, 1)
CONSUMER = ("--consumer", "predictors=clicks")
SMALL = ("--log-max-bytes", str(2 << 20))


def test_a_first_cut_that_cannot_fit_is_refused_at_the_open_and_fits_a_log_as_large_as_is_said(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = NumpyTarget()
    with ServiceProcess(tmp_path, *CONSUMER, *SMALL) as service:
        with Trainer(service.grpc, [WIDE]) as trainer, pytest.raises(Contradiction) as refused:
            trainer.publish_all()
        found = re.fullmatch(
            r"model 'clicks': every row of its tables takes (\d+) bytes in the log, which has room for 1835008: "
            r"restart the service with --log-max-bytes (\d+) or more, if .*",
            str(refused.value),
        )
        assert found
        assert int(found[1]) == whole_bytes([WIDE]) == 60_000 * (8 + 64 + 8)
        assert service.get("/readyz") == (200, "ok\n")
        assert service.get_json("/models") == service.get_json("/tables") == []  # Nothing is left of it.
        assert service.terminate() == 0
    assert re.search(r"publisher refused: model=clicks .*restart the service with", capfd.readouterr().err)
    with (
        ServiceProcess(tmp_path, *CONSUMER, "--log-max-bytes", found[2]) as service,
        Trainer(service.grpc, [WIDE]) as trainer,
        follow(service, "predictors", "p", target) as replica,
    ):
        replica.wait_for(trainer.publish_all(), WAIT)
        np.testing.assert_array_equal(target.tables["wide"], trainer.rows["wide"])


def test_a_later_cut_that_cannot_fit_is_refused_once_and_the_next_small_one_goes_on(tmp_path: Path) -> None:
    target, service = NumpyTarget(), RunningService(tmp_path)
    with service, Trainer(service.grpc, [WIDE]) as trainer:
        trainer.publish_all()
    service = RunningService(tmp_path, log_max_bytes=2 << 20)
    with (
        service,
        Trainer(service.grpc, [WIDE], run="later", started=2) as trainer,
        follow(service, "predictors", "p", target) as replica,
    ):
        with pytest.raises(Contradiction, match=r"takes \d+ bytes in the log, which has room for 1835008"):
            trainer.publish_all()
        lag = service.get_json("/consumers/predictors/lag")
        assert lag["state"] == "failed"
        assert "a cut is too large for the log" in lag["reason"]
        assert "--log-max-bytes" in service.get("/readyz")[1]
        replica.wait_for(1, WAIT)
        assert service.get_json("/consumers/predictors/lag")["head"] == 1


def test_a_cut_that_fits_but_for_what_the_log_adds_is_not_tried_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of a little more than half a page take a whole one each."""
    monkeypatch.setattr("deltasync.service.housekeeping._SECONDS", 0.001)

    async def scenario(service: Service) -> None:
        keeper = asyncio.create_task(housekeeping(service))
        error = await _refusal_for_good(service)
        assert "takes" in str(error)
        assert "--log-max-bytes" in str(error)
        assert [coordinator.open_cut for coordinator in service.unpublished] == [None]
        keeper.cancel()

    assert whole_bytes([NARROW]) < 1_835_008
    run(tmp_path, scenario, log_max_bytes=2 << 20)


async def _refusal_for_good(service: Service) -> Contradiction:
    for _ in range(100):
        session = await join(service, tables=[NARROW], shards=[Shard.whole(NARROW)])
        try:
            await send(session, _small_chunks())
        except Contradiction as error:
            return error
        except StorageFailed:
            while log_of(service).refusing:
                await asyncio.sleep(0.001)
    raise AssertionError("tried for ever")


def _small_chunks() -> list[publish_pb2.PublishRequest]:
    ids = [range(first, min(first + 99, NARROW.rows)) for first in range(0, NARROW.rows, 99)]
    chunks = [chunk(1, 0, some, np.ones((len(some), 1), "<f4")) for some in ids]
    return [*chunks, close(1, NARROW.rows, full=True)]

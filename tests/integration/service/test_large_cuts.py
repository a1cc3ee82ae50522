"""A cut that does not fit the log: refused once, with both numbers and what to do, and nobody else's trouble."""

import re
from pathlib import Path

import numpy as np
import pytest
from tests.support.fleet import WAIT, Trainer, admin_of, follow
from tests.support.process import ServiceProcess
from tests.support.server import RunningService

from deltasync.base.errors import Contradiction
from deltasync.client import NumpyTarget, TableSpec
from deltasync.cuts.machine import whole_bytes

WIDE = TableSpec("wide", 60_000, 16)  # 4.8 MB in the log
CONSUMER = ("--consumer", "predictors=clicks")
SMALL = ("--log-max-bytes", str(2 << 20))


def test_a_first_cut_too_large_for_the_log_is_refused_at_the_open(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    target = NumpyTarget()
    with ServiceProcess(tmp_path, *CONSUMER, *SMALL) as service:
        with Trainer(service.grpc, [WIDE]) as trainer, pytest.raises(Contradiction) as refused:
            trainer.publish_all()
        found = re.fullmatch(
            r"model 'clicks': all rows of its tables need (\d+) bytes in the log, which has room for 1835008: "
            r"restart the service with --log-max-bytes (\d+) or more, and .*",
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


def test_a_later_cut_too_large_for_the_log_is_refused_once(tmp_path: Path) -> None:
    target, service = NumpyTarget(), RunningService(tmp_path)
    with service, Trainer(service.grpc, [WIDE]) as trainer:
        trainer.publish_all()
        for _ in range(2):  # The log is kept back to the second newest checkpoint.
            admin_of(service).make_checkpoint("clicks")
    service = RunningService(tmp_path, log_max_bytes=2 << 20)
    with (
        service,
        Trainer(service.grpc, [WIDE], run="later", started=2) as trainer,
        follow(service, "predictors", "p", target) as replica,
    ):
        with pytest.raises(Contradiction, match=r"needs \d+ bytes in the log, which has room for 1835008"):
            trainer.publish_all()
        lag = service.get_json("/consumers/predictors")
        assert lag["state"] == "failed"
        assert "a cut is too large for the log" in lag["reason"]
        assert "--log-max-bytes" in service.get("/readyz")[1]
        replica.wait_for(1, WAIT)
        assert service.get_json("/consumers/predictors")["head"] == 1

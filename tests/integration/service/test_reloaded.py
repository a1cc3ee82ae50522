"""Bits that flip while a service runs, or while it is down: no replica is given one, and nothing is lost."""

from pathlib import Path

import pytest
from tests.support.fleet import ITEM, USER, WAIT, Trainer, follow, wait_until_in_sync
from tests.support.memory_flips import flip_in_memory
from tests.support.process import ServiceProcess
from tests.support.server import TOKEN

from deltasync.client import Admin, Endpoint, NumpyTarget


@pytest.fixture
def service(tmp_path: Path) -> ServiceProcess:
    return ServiceProcess(tmp_path / "data", "--consumer", "plain=clicks", log=tmp_path / "service.log")


def test_a_row_that_flips_in_memory_reaches_no_replica(service: ServiceProcess) -> None:
    old, new = NumpyTarget(), NumpyTarget()
    with service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
        Admin(Endpoint(service.http, TOKEN)).make_checkpoint("clicks")
        head = trainer.change(3, [ITEM])
        with follow(service, "plain", "old", old) as first:
            first.wait_for(head, WAIT)
            assert flip_in_memory(service.pid, trainer.rows[USER.name][7].tobytes())
            with follow(service, "plain", "new", new) as second:
                second.wait_for(head, WAIT)
                service.wait_for_line("model reloaded: model=clicks")
                head = trainer.change(3, [ITEM])
                for each in (first, second):
                    each.wait_for(head, WAIT)
                lag = wait_until_in_sync(service, "plain", head, replicas=2)
                assert [each["damages"] for each in lag["replicas"]] == [0, 0]
        assert service.lines("rows damaged: model=clicks table 'user': bits have changed in row 7")
        for target in (old, new):
            assert {name: rows.tobytes() for name, rows in target.tables.items()} == trainer.expected()

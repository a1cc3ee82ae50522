"""Bits that flip while a service runs, or while it is down: no replica is given one, and nothing is lost."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from tests.support.fleet import ITEM, USER, WAIT, Trainer, follow, wait_until_in_sync
from tests.support.memory_flips import flip_in_memory
from tests.support.process import ServiceProcess
from tests.support.server import TOKEN

from deltasync.cli.verify import fsck
from deltasync.client import Admin, Endpoint, NumpyTarget


@pytest.fixture
def service(tmp_path: Path) -> ServiceProcess:
    return ServiceProcess(tmp_path / "data", "--consumer", "plain=clicks", log=tmp_path / "service.log")


def run_fsck(*arguments: str) -> tuple[int, list[dict[str, Any]]]:
    ended = CliRunner(env={"DELTASYNC_TOKEN": TOKEN}).invoke(fsck, [*arguments, "--json"])
    return ended.exit_code, json.loads(ended.stdout)["checked"] if ended.exit_code < 2 else []


def flip_bit(path: Path, at: int) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 16
    path.write_bytes(content)


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


def test_fsck_finds_a_row_that_nobody_reads(service: ServiceProcess) -> None:
    with service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
        status, found = run_fsck("--service", service.http)
        assert status == 0, found
        assert flip_in_memory(service.pid, trainer.rows[USER.name][7].tobytes())
        status, found = run_fsck("--service", service.http)
        assert (status, "row 7: the service reloads the model" in found[0]["problems"][0]) == (1, True)
        service.wait_for_line("model reloaded: model=clicks")
        assert run_fsck("--service", service.http)[0] == 0


def test_a_checkpoint_that_flips_at_rest_is_passed_over(service: ServiceProcess, tmp_path: Path) -> None:
    target = NumpyTarget()
    with service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
        admin = Admin(Endpoint(service.http, TOKEN))
        admin.make_checkpoint("clicks")
        trainer.change(3, [ITEM])
        admin.make_checkpoint("clicks")
        head = trainer.change(3, [USER])
        assert service.terminate() == 0
        files = (tmp_path / "data" / "checkpoints" / "clicks" / "data").iterdir()
        newest = max(file for file in files if file.name.endswith("-000000"))  # It has rows.
        flip_bit(newest, 60)
        service.start()
        assert service.lines(f"failed: model=clicks .*{newest.name}")
        with follow(service, "plain", "new", target) as replica:
            replica.wait_for(head, WAIT)
        np.testing.assert_array_equal(target.tables[USER.name], trainer.rows[USER.name])
        np.testing.assert_array_equal(target.tables[ITEM.name], trainer.rows[ITEM.name])

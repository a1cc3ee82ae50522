"""One bit of a table's file changes while the service is down: real processes, as a disk would do it."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from click.testing import CliRunner
from tests.support.fleet import ITEM, USER, WAIT, Trainer, follow, wait_for_lag, wait_until_in_sync
from tests.support.process import ServiceProcess

from deltasync.cli.fsck import fsck
from deltasync.client import NumpyTarget, publisher

T = TypeVar("T")
TOKEN = "secret"  # noqa: S105


@pytest.fixture
def service(tmp_path: Path) -> ServiceProcess:
    return ServiceProcess(tmp_path / "data", "--consumer", "plain=clicks")


def run_fsck(*arguments: str) -> tuple[int, dict[str, Any]]:
    ended = CliRunner(env={"DELTASYNC_TOKEN": TOKEN}).invoke(fsck, [*arguments, "--json"])
    return ended.exit_code, json.loads(ended.stdout) if ended.exit_code < 2 else {}


def change(data: Path, row: int) -> None:
    """Change one bit of a row of the first table, of which the others come after it in the same file."""
    (path,) = (data / "models" / "clicks" / "tables").rglob("shared")
    content = bytearray(path.read_bytes())
    content[row * USER.dim * USER.dtype.itemsize + 2] ^= 16
    path.write_bytes(content)


def left(found: dict[str, Any]) -> list[tuple[str, str]]:
    return [(each["table"], each["reason"].split(":")[0]) for each in found["tables"] if each["left"]]


def test_it_is_named_and_not_sent_and_mended_by_a_trainer_while_right_replicas_are_not_blamed(
    service: ServiceProcess, tmp_path: Path
) -> None:
    data, old = tmp_path / "data", NumpyTarget()
    with service, Trainer(service.grpc) as trainer:
        head = trainer.publish_all()
        with follow(service, "plain", "old", old) as subscriber:
            subscriber.wait_for(head, WAIT)
            wait_until_in_sync(service, "plain", head)
        assert service.terminate() == 0
        assert run_fsck("--data-dir", str(data))[0] == 0
        change(data, 7)
        status, found = run_fsck("--data-dir", str(data))
        assert (status, left(found)) == (1, [(USER.name, "other bits than were stored in row 7")])
        status, found = run_fsck("--data-dir", str(data), "--mend")
        assert (status, left(found)) == (1, [(USER.name, "row 7")]), "the log was cut when the service ended"

        service.start()
        assert run_fsck("--data-dir", str(data))[0] == 2, "a service uses it"
        status, found = run_fsck("--service", service.http)
        assert (status, left(found)) == (1, [(USER.name, "row 7")])
        new = NumpyTarget()
        with follow(service, "plain", "old", old) as subscriber, follow(service, "plain", "new", new) as other:
            lag = wait_for_lag(
                service, "plain", lambda lag: len(lag["replicas"]) == 2 and lag["state"] == "failed"
            )
            assert "row 7 of table" in lag["reason"], lag
            assert not new.tables
            head = trainer._publish([np.array([7, 8]), np.array([1])])  # As who is asked for it does.
            for each in (subscriber, other):
                each.wait_for(head, WAIT)
            lag = wait_until_in_sync(service, "plain", head, replicas=2)
            assert [each["damaged"] for each in lag["replicas"]] == [[], []]
            for target in (old, new):
                np.testing.assert_array_equal(target.tables[USER.name], trainer.rows[USER.name])
        assert run_fsck("--service", service.http)[0] == 0


def test_a_rank_that_publishes_nothing_learns_what_is_wanted(
    service: ServiceProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(publisher, "ASK_SECONDS", 0.01)
    with service, Trainer(service.grpc) as trainer:
        trainer.publish_all()
        assert service.terminate() == 0
        change(tmp_path / "data", 7)
        service.start()
        trainer.change(1, [ITEM])  # It connects again, before the row is found perhaps.
        wanted = _wait_for(lambda: trainer.publisher.wanted)
        assert [(name, ids.tolist()) for name, ids in wanted] == [(USER.name, [7])]
        trainer._publish([np.array([7]), np.array([], np.int64)])
        assert not _wait_for(lambda: [trainer.publisher.wanted] if not trainer.publisher.wanted else [])[0]


def _wait_for(wanted: Callable[[], T]) -> T:
    deadline = time.monotonic() + WAIT
    while not (found := wanted()):
        assert time.monotonic() < deadline
        time.sleep(0.002)
    return found

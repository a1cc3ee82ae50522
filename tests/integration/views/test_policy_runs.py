"""Consumers with a policy through full disks, lost files, other runs and other forms."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.fleet import (
    AT_ONCE,
    ITEM,
    USER,
    WAIT,
    Recorder,
    Trainer,
    follow,
    wait_for_lag,
    wait_until_delivered,
    wait_until_in_sync,
)
from tests.support.server import RunningService

from deltasync.client import Position, Release
from deltasync.core.policy import Policy
from deltasync.core.rows import Ids, Values
from deltasync.core.table_form import Mode
from deltasync.core.tables import TableSpec

POLICIES = {
    "top": Policy(top_k=0.1),
    "user": Policy(tables=("user",), top_k=2),
    "ids": Policy(mode=Mode.IDS, top_k=5),
}

# Streams look for changes often.
OPTIONS: dict[str, Any] = {"progress_seconds": 0.02, "releases": AT_ONCE}
ALL_ROWS = USER.rows + ITEM.rows


def rows_of(release: Release) -> int:
    return sum(len(rows.ids) for rows in release.rows)


def test_the_service_starts_without_room_for_the_table_of_a_policy(
    tmp_path: Path,
) -> None:
    policies = {"small": Policy(max_bytes=100)}
    wide = TableSpec("wide", 5, 512)
    with RunningService(tmp_path / "data", policies=policies, **OPTIONS) as service:
        with Trainer(service.grpc, [USER]) as trainer:
            trainer.publish_all()
        with Trainer(service.grpc, [USER, wide], run="r2", started=2) as trainer:
            trainer.publish_all()
    target = Recorder()
    with (
        RunningService(tmp_path / "data", policies=policies, **OPTIONS) as service,
        follow(service, "small", "a", target),
    ):
        wait_for_lag(service, "small", lambda lag: lag["state"] == "in sync")
        assert target.bytes() == trainer.expected()


class Cache:
    """Forgets the rows that have changed, and can be read."""

    def __init__(self) -> None:
        self.changed: list[set[tuple[str, int]]] = []

    def apply(self, release: Release) -> None:
        self.changed.append({(rows.table.name, int(row)) for rows in release.rows for row in rows.ids})

    def read(self, table: TableSpec, ids: Ids) -> Values:
        return np.zeros((len(ids), table.dim), table.dtype)


def test_a_target_that_can_be_read_is_not_asked_for_rows_it_was_not_given(service: RunningService) -> None:
    cache = Cache()
    with Trainer(service.grpc) as trainer, follow(service, "ids", "a", cache):
        trainer.publish_all()
        lag = wait_until_delivered(service, "ids", trainer.change(20))
    assert lag["damages"] == 0
    assert [(replica["checked"], replica["damaged"]) for replica in lag["replicas"]] == [(False, [])]
    assert len(cache.changed[0]) == ALL_ROWS


def test_a_replica_learns_of_a_version_without_changes_of_its_tables(service: RunningService) -> None:
    target = Recorder()
    with Trainer(service.grpc) as trainer, follow(service, "user", "a", target) as replica:
        replica.wait_for(trainer.publish_all(), WAIT)
        for table in (ITEM, USER, ITEM, ITEM):
            head = trainer.change(1, [table])
            replica.wait_for(head, WAIT)
            assert replica.version == head
        assert len(target.releases) == 2
        assert replica.wait_for(head.number, WAIT) == target.releases[-1].position == replica.held
        with pytest.raises(TimeoutError, match=f"is at version {head.number}, not"):
            replica.wait_for(Position(head.history, head.number + 1), 0)


def test_a_number_to_wait_for_is_a_version_not_a_release(service: RunningService) -> None:
    target = Recorder()
    with Trainer(service.grpc) as trainer, follow(service, "user", "a", target) as replica:
        wait_until_in_sync(service, "user", trainer.publish_all())
        head = trainer.change(20)
        lag = wait_until_in_sync(service, "user", head)
        replica.wait_for(Position(lag["history"], lag["offset"]), WAIT)
        assert replica.held.number > head.number + 1
        assert replica.version == head
        with pytest.raises(TimeoutError):
            replica.wait_for(head.number + 1, 0)
        assert {release.version for release in target.releases} == {1, 2}


def test_rows_of_another_run_all_go_out_at_once(service: RunningService) -> None:
    """A predictor must not serve half of one model and half of another."""
    target = Recorder()
    with follow(service, "top", "a", target):
        with Trainer(service.grpc) as trainer:
            wait_until_in_sync(service, "top", trainer.publish_all())
        with Trainer(service.grpc, run="r2", started=2, seed=1) as trainer:
            begun = len(target.releases)
            wait_until_in_sync(service, "top", trainer.publish_all())
            assert [rows_of(release) for release in target.releases[begun:]] == [ALL_ROWS]
            assert target.bytes() == trainer.expected()
            begun = len(target.releases)
            wait_until_in_sync(service, "top", trainer.change(20))
            assert rows_of(target.releases[begun]) == 4  # Of 40 dirty rows.
    assert [release.resync for release in target.releases].count(True) == 1

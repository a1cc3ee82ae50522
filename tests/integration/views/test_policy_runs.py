"""Consumers with a policy through full disks, lost files, other runs and other forms."""

from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.fleet import (
    AT_ONCE,
    ITEM,
    TABLES,
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
from tests.support.wire import RankStream, ReplicaStream, part, random_rows

from deltasync.base.errors import StorageFailed
from deltasync.client import Position, Release, Shard
from deltasync.core.policy import Policy
from deltasync.core.rows import Ids, Values
from deltasync.core.tables import TableSpec
from deltasync.model.model_store import ModelStore

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


def test_a_table_that_comes_while_a_release_is_frozen_raises_no_alarm(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who joins meanwhile is given that release, beside a table that it does not know of: one of a cut that could
    not be sealed.
    """

    def refused(*_: object) -> Future[None]:
        failed: Future[None] = Future()
        failed.set_exception(StorageFailed("no seal"))
        return failed

    late = TableSpec("late", 5, 8)
    tables = [*TABLES, late]
    target = Recorder()
    with Trainer(service.grpc) as trainer:
        trainer.publish_all()
        with ReplicaStream(service.grpc, consumer="predictors", replica="slow", budget=1) as slow:
            slow.until("chunk")
            shards = [Shard.whole(table) for table in tables]
            with RankStream(service.grpc, run="r2", started=2, tables=tables, shards=shards) as rank:
                rank.opened()
                monkeypatch.setattr(ModelStore, "seal", refused)
                rows = enumerate(random_rows(2, tables))
                rank.send(*part(2, [(slot, range(len(some)), some) for slot, some in rows], full=True))
                assert "no seal" in rank.refusal()[1]
                with follow(service, "predictors", "fresh", target) as fresh:
                    fresh.wait_for(1, WAIT)
                    lag = wait_for_lag(service, "predictors", lambda lag: lag["replicas"][0]["checked"])
    assert target.bytes() == {**trainer.expected(), "late": bytes(5 * 8 * 4)}
    assert (lag["damages"], lag["replicas"][0]["replica"]) == (0, "fresh")

"""Consumers with a policy: all replicas of one are given the same releases."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.fleet import (
    AT_ONCE,
    TABLES,
    Recorder,
    Trainer,
    follow,
    wait_for_lag,
    wait_until_delivered,
    wait_until_in_sync,
)
from tests.support.server import RunningService

from deltasync.client import CallbackTarget, Release
from deltasync.core.policy import Policy
from deltasync.core.table_form import Mode
from deltasync.core.value_types import ValueType

OPTIONS: dict[str, Any] = {"releases": AT_ONCE}
POLICIES = {
    "top": Policy(top_k=0.1, value_type=ValueType.INT8),
    "few": Policy(top_k=3, top_k_per_table=True, value_type=ValueType.BF16),
    "small": Policy(max_bytes=400),
    "old": Policy(top_k=1, max_age_seconds=0.05),
    "half": Policy(value_type=ValueType.FP16),
    "tbe": Policy(top_k=0.2, value_type=ValueType.INT8_TBE),
    "packed": Policy(value_type=ValueType.INT4_TBE),
    "ids": Policy(mode=Mode.IDS, top_k=5),
}


@pytest.mark.parametrize("consumer", ["top", "few", "small", "old", "half", "tbe", "packed"])
def test_two_replicas_at_the_same_release_hold_the_same_bits(service: RunningService, consumer: str) -> None:
    """One that joins late is given the union in one release, and then the same."""
    value_type = POLICIES[consumer].value_type
    first, second, late = Recorder(), Recorder(), Recorder()
    with (
        Trainer(service.grpc) as trainer,
        follow(service, consumer, "first", first),
        follow(service, consumer, "second", second),
    ):
        trainer.publish_all()
        for _ in range(3):
            head = trainer.change(20)
        wait_until_in_sync(service, consumer, head, replicas=2)
        with follow(service, consumer, "late", late):
            wait_for_lag(service, consumer, lambda lag: len(lag["replicas"]) == 3 and lag["state"] == "in sync")
            assert [release.resync for release in late.releases] == [True]
            head = trainer.change(15)
            wait_until_in_sync(service, consumer, head)
        assert first.bytes() == second.bytes() == late.bytes() == trainer.expected(value_type)
        for other in (second, late):
            common = first.held.keys() & other.held.keys()
            assert common
            assert all(first.held[position] == other.held[position] for position in common)
    assert len(first.releases) >= 2
    lag = service.get_json(f"/consumers/{consumer}")
    assert all(replica["checked"] for replica in lag["replicas"])


def test_ids_and_norms_alone_are_streamed(service: RunningService) -> None:
    taken: list[Release] = []
    with Trainer(service.grpc) as trainer:
        before = {name: rows.astype(np.float64) for name, rows in trainer.rows.items()}
        with follow(service, "ids", "cache", CallbackTarget(taken.append)):
            head = trainer.publish_all()
            wait_until_delivered(service, "ids", head)
            size = service.get_json("/consumers/ids")["release"]["bytes"]
            assert size == sum(table.rows for table in TABLES) * 12
            begun = len(taken)
            head = trainer.change(7)
            lag = wait_until_delivered(service, "ids", head)
            assert lag["release"]["bytes"] == lag["release"]["rows"] * 12
    found: dict[tuple[str, int], float] = {}
    for release in taken[begun:]:
        assert sum(len(rows.ids) for rows in release.rows) <= 5
        for rows in release.rows:
            assert rows.norms is not None
            assert rows.values.shape == (len(rows.ids), 0)
            found |= zip([(rows.table.name, row) for row in rows.ids.tolist()], rows.norms.tolist(), strict=True)
    for (table, row), norm in found.items():
        delta = trainer.rows[table][row].astype(np.float64) - before[table][row]
        assert norm == pytest.approx(float(np.linalg.norm(delta)), rel=1e-6)
    assert len(found) == 14


def test_a_service_that_has_lost_its_folder_gives_everything_anew(tmp_path: Path) -> None:
    target = Recorder()
    with (
        RunningService(tmp_path / "one", policies=POLICIES, releases=AT_ONCE) as first,
        Trainer(first.grpc) as trainer,
    ):
        port = int(first.grpc.rpartition(":")[2])
        subscriber = follow(first, "top", "a", target)
        wait_until_in_sync(first, "top", trainer.publish_all())
    with (
        subscriber,
        RunningService(tmp_path / "two", grpc_port=port, policies=POLICIES, releases=AT_ONCE) as second,
        Trainer(second.grpc, run="s", started=2, seed=7) as trainer,
    ):
        wait_until_in_sync(second, "top", trainer.publish_all())
        assert [release.resync for release in target.releases].count(True) == 2
        assert target.bytes() == trainer.expected(ValueType.INT8)

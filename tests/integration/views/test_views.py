"""Consumers with a policy: all replicas of one are given the same releases."""

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
    admin_of,
    follow,
    wait_for_lag,
    wait_until_delivered,
    wait_until_in_sync,
)
from tests.support.server import RunningService
from tests.support.wire import ReplicaStream, ack, size_of

from deltasync.client import CallbackTarget, NumpyTarget, Position, Release
from deltasync.core.policy import Policy
from deltasync.core.table_form import Mode
from deltasync.core.value_types import ValueType
from deltasync.views.decision import ReleaseOptions

OPTIONS: dict[str, Any] = {"releases": AT_ONCE}
# Rows that were left do not go out by themselves.
NO_BACKLOG = ReleaseOptions(shortest_seconds=100, longest_seconds=100)
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


def test_one_that_was_away_is_given_the_union_in_one_release(service: RunningService) -> None:
    stays, goes = Recorder(), Recorder()
    with Trainer(service.grpc) as trainer, follow(service, "top", "stays", stays):
        head = trainer.publish_all()
        with follow(service, "top", "goes", goes) as leaving:
            leaving.wait_for(1, WAIT)
            wait_until_in_sync(service, "top", head)
        for _ in range(3):
            head = trainer.change(10, [USER])
            lag = all_released(service, head)
        before = len(goes.releases)
        with follow(service, "top", "goes", goes, held=leaving.held) as back:
            back.wait_for(Position(lag["history"], lag["release"]["number"]), WAIT)
        assert len(goes.releases) == before + 1
        union = goes.releases[-1]
        assert not union.resync
        assert 10 < sum(len(rows.ids) for rows in union.rows) <= 30
        assert {rows.table.name for rows in union.rows} == {"user"}
        assert goes.bytes() == stays.bytes() == trainer.expected(ValueType.INT8)


def test_a_slow_replica_does_not_hold_up_the_others(service: RunningService) -> None:
    quick = Recorder()
    with Trainer(service.grpc) as trainer, follow(service, "top", "quick", quick):
        trainer.publish_all()
        with ReplicaStream(service.grpc, consumer="top", replica="slow", budget=1) as slow:
            slow.until("chunk")
            for _ in range(3):
                head = trainer.change(30)
            # Credit is not given back: the slow one is still in its first release.
            lag = all_released(service, head)
            number = lag["release"]["number"]
            lag = wait_for_lag(service, "top", lambda lag: {"quick": number}.items() <= offsets_of(lag).items())
            assert offsets_of(lag)["slow"] == 0
            assert lag["state"] == "behind"
            assert quick.bytes() == trainer.expected(ValueType.INT8)


def all_released(service: RunningService, head: Position) -> dict[str, Any]:
    """The lag once every row of a version is released, whoever has applied it."""
    return wait_for_lag(
        service, "top", lambda lag: lag["release"]["version"] == head.number and lag["release"]["left_rows"] == 0
    )


def offsets_of(lag: dict[str, Any]) -> dict[str, int]:
    return {line["replica"]: line["offset"] for line in lag["replicas"]}


def test_no_release_is_made_while_nobody_is_there_or_holds_the_last(service: RunningService) -> None:
    with Trainer(service.grpc) as trainer:
        trainer.publish_all()
        assert service.get_json("/consumers/top")["release"] is None
        with ReplicaStream(service.grpc, consumer="top", replica="raw") as replica:
            rows, end = replica.release()
            first = Position(end.position.history, end.position.version)
            # Not acknowledged: nothing more is released, whatever is published.
            other = Recorder()
            with follow(service, "half", "other", other):
                head = trainer.change(20)
                head = trainer.change(20)
                wait_until_in_sync(service, "half", head)
            assert service.get_json("/consumers/top")["release"]["number"] == first.number
            replica.send(ack(size_of(rows), first))
            more, end = replica.release()
            assert (end.position.version, end.version) == (first.number + 1, head.number)
        head = trainer.change(20)
        lag = service.get_json("/consumers/top")
        assert lag["state"] == "away"
        assert lag["release"]["number"] == first.number + 1
        assert size_of(more) == lag["release"]["bytes"]


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


def test_an_old_row_is_released_although_others_change_more(tmp_path: Path) -> None:
    """A row that changes more every time would hold back the one that changed once, for ever."""
    with RunningService(tmp_path / "data", policies={"young": Policy(top_k=1)}, releases=NO_BACKLOG) as service:
        target = Recorder()
        with Trainer(service.grpc) as trainer, follow(service, "young", "a", target):
            trainer.publish_all()
            wait_for_lag(service, "young", lambda lag: lag["offset"] > 0)
            first = trainer.change(2, [USER])
            lag = released(service, "young", first)
            assert (lag["release"]["rows"], lag["release"]["left_rows"], lag["state"]) == (1, 1, "current")
            for value in range(1, 6):
                head = trainer.set(ITEM, 3, 100.0 * value)
                lag = released(service, "young", head)
                assert lag["release"]["left_rows"] == 1
            table = next(each for each in lag["tables"] if each["table"] == "user")
            assert table["rows"] == 1
            assert lag["lag"]["unsent_norm"] == pytest.approx(table["unsent_norm"])
            assert lag["lag"]["rows"] == 1
            left = unsent(trainer, target)
            assert lag["lag"]["unsent_norm"] == pytest.approx(left, rel=1e-6)
            admin_of(service).update_consumer("young", Policy(top_k=1, max_age_seconds=0.001))
            lag = wait_until_in_sync(service, "young", head)
            assert lag["lag"]["unsent_norm"] == 0
        assert target.bytes() == trainer.expected()


def test_rows_that_went_back_leave_no_backlog(tmp_path: Path) -> None:
    target = Recorder()
    with (
        RunningService(tmp_path / "data", policies={"few": Policy(top_k=2)}, releases=NO_BACKLOG) as service,
        Trainer(service.grpc) as trainer,
        follow(service, "few", "a", target),
    ):
        wait_until_in_sync(service, "few", trainer.publish_all())
        lag = released(service, "few", trainer.change(20, [USER]))
        assert lag["release"]["left_rows"] == 18
        for name, rows in target.tables.items():
            trainer.rows[name][:] = rows
        lag = wait_until_in_sync(service, "few", trainer.publish_all())
        assert lag["release"]["left_rows"] == 0


def released(service: RunningService, consumer: str, head: Position) -> dict[str, Any]:
    """The lag once the release of a version is applied by all."""
    return wait_for_lag(
        service,
        consumer,
        lambda lag: lag["release"]["version"] == head.number and lag["offset"] == lag["release"]["number"],
    )


def unsent(trainer: Trainer, target: NumpyTarget) -> float:
    pairs = [(trainer.rows[name].astype(float), rows.astype(float)) for name, rows in target.tables.items()]
    return float(np.sqrt(sum(np.square(wanted - held).sum() for wanted, held in pairs)))


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

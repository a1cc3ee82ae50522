"""Policies that change while replicas follow: nobody loses its place, and what is held stays right."""

import threading
from typing import Any

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

from deltasync.client import Admin, CallbackTarget, Position, Release, TableSpec
from deltasync.core.policy import Policy
from deltasync.core.table_form import Mode
from deltasync.core.value_types import ValueType
from deltasync.views.log import ViewLog

POLICIES = {"top": Policy(top_k=5)}
# Idle streams look for changes often.
OPTIONS: dict[str, Any] = {"progress_seconds": 0.02, "releases": AT_ONCE}


def given_as(
    service: RunningService, consumer: str, policy: Policy, head: Position, state: str = "in sync"
) -> dict[str, Any]:
    """The lag once replicas hold everything by a policy."""
    return wait_for_lag(
        service,
        consumer,
        lambda lag: (
            lag["policy"] == policy.as_dict()
            and lag["head"] >= head.number
            and lag["state"] == state
            and lag["lag"]["versions"] == lag["lag"]["rows"] == 0
            and (lag["release"] is not None or policy.sends_everything)
        ),
    )


def test_more_or_fewer_rows_at_once(service: RunningService, admin: Admin) -> None:
    target = Recorder()
    with Trainer(service.grpc) as trainer, follow(service, "top", "a", target):
        wait_until_in_sync(service, "top", trainer.publish_all())
        history = service.get_json("/consumers/top")["history"]
        for top_k, largest in ((20, 20), (2, 2), (0.5, 20), (None, 40)):
            policy = Policy(top_k=top_k)
            admin.update_consumer("top", policy)
            begun = len(target.releases)
            lag = given_as(service, "top", policy, trainer.change(20))
            assert lag["history"] == history
            sizes = [sum(len(rows.ids) for rows in release.rows) for release in target.releases[begun:]]
            assert max(sizes) == largest
            assert sum(sizes) == 40
            assert target.bytes() == trainer.expected()
    assert [release.resync for release in target.releases].count(True) == 1
    assert not any(release.whole for release in target.releases)


def test_from_no_policy_to_one_and_back_replicas_go_on(service: RunningService, admin: Admin) -> None:
    target, late = Recorder(), Recorder()
    with Trainer(service.grpc) as trainer, follow(service, "predictors", "a", target):
        trainer.publish_all()
        head = trainer.change(5)
        assert given_as(service, "predictors", Policy(), head)["history"] == head.history
        begun = len(target.releases)
        policy = Policy(top_k=3)
        admin.update_consumer("predictors", policy)
        lag = given_as(service, "predictors", policy, head)
        view = lag["history"]
        assert view != head.history
        lag = given_as(service, "predictors", policy, trainer.change(4))
        assert sum(release.bytes for release in target.releases[begun:]) == 4 * (USER.row_bytes + ITEM.row_bytes)
        assert target.bytes() == trainer.expected()
        # Its view stays; it lets everything out at once.
        admin.update_consumer("predictors", Policy())
        lag = given_as(service, "predictors", Policy(), trainer.change(30))
        assert lag["history"] == view
        assert lag["release"]["rows"] == 60
        assert target.bytes() == trainer.expected()
        with follow(service, "predictors", "late", late):
            wait_for_lag(
                service, "predictors", lambda lag: len(lag["replicas"]) == 2 and lag["state"] == "in sync"
            )
    assert late.bytes() == target.bytes()
    assert [release.resync for release in target.releases].count(True) == 1


@pytest.mark.parametrize("consumer", ["top", "predictors"])
def test_values_in_another_type_are_all_sent_anew(service: RunningService, admin: Admin, consumer: str) -> None:
    """In the same history, also to replicas from before there was a policy."""
    target = Recorder()
    with Trainer(service.grpc) as trainer, follow(service, consumer, "a", target):
        wait_until_in_sync(service, consumer, trainer.publish_all())
        for value_type in (ValueType.INT8, ValueType.INT4_TBE, ValueType.BF16, ValueType.FP32, ValueType.FP16):
            begun, policy = len(target.releases), Policy(top_k=7, value_type=value_type)
            admin.update_consumer(consumer, policy)
            head = trainer.change(0)
            given_as(service, consumer, policy, head)
            holds(service, consumer, target, trainer.expected(value_type))
            sent = {rows.table.name for release in target.releases[begun:] for rows in release.rows}
            assert "user" in sent or (consumer, value_type) == ("predictors", ValueType.FP32)
            given_as(service, consumer, policy, trainer.change(6))
            assert target.bytes() == trainer.expected(value_type)
    resyncs = [release.resync for release in target.releases]
    assert resyncs.count(True) == 1


def test_tables_that_are_not_followed_any_more_and_followed_again(service: RunningService, admin: Admin) -> None:
    target = Recorder()
    with Trainer(service.grpc) as trainer, follow(service, "top", "a", target):
        wait_until_in_sync(service, "top", trainer.publish_all())
        for _ in range(2):
            narrow, wide = Policy(tables=("us*",)), Policy(tables=("us*", "item"), top_k=9)
            admin.update_consumer("top", narrow)
            head = trainer.change(6)
            wait_for_lag(service, "top", lambda lag: [each["table"] for each in lag["tables"]] == ["user"])
            given_as(service, "top", narrow, head)
            assert target.bytes() == {"user": trainer.expected()["user"]}
            head = trainer.change(6)
            given_as(service, "top", narrow, head)
            begun = len(target.releases)
            admin.update_consumer("top", wide)
            wait_for_lag(service, "top", lambda lag: len(lag["tables"]) == 2)
            given_as(service, "top", wide, head)
            assert target.bytes() == trainer.expected()
            anew = [rows for release in target.releases[begun:] for rows in release.rows]
            assert {(rows.table.name, len(rows.ids)) for rows in anew} == {("item", ITEM.rows)}
            given_as(service, "top", wide, trainer.change(6))
            assert target.bytes() == trainer.expected()
    assert [release.resync for release in target.releases].count(True) == 1


def test_from_ids_to_values_and_back(service: RunningService, admin: Admin) -> None:
    taken: list[Release] = []
    with Trainer(service.grpc) as trainer, follow(service, "top", "a", CallbackTarget(taken.append)):
        wait_until_delivered(service, "top", trainer.publish_all())
        for mode in (Mode.IDS, Mode.EMBEDDINGS, Mode.IDS):
            begun, policy = len(taken), Policy(mode=mode)
            admin.update_consumer("top", policy)
            given_as(service, "top", policy, trainer.change(5), "delivered")
            new = [rows for release in taken[begun:] for rows in release.rows]
            assert all((rows.norms is not None) == (mode is Mode.IDS) for rows in new)
            assert all(rows.values.shape[1] == (0 if mode is Mode.IDS else rows.table.dim) for rows in new)
            assert {rows.table.name for rows in new} == {"user", "item"}
    assert [release.resync for release in taken].count(True) == 1


def test_a_later_table_that_cannot_be_sent_delays_no_other_table(service: RunningService, admin: Admin) -> None:
    """Nor another consumer, nor a replica that joins; the lag says which table it is, and what to do."""
    tables, why = [*TABLES, TableSpec("odd", 10, 5)], "table 'odd' has dim 5, value type int8-tbe needs"
    admin.create_consumer("tbe", "clicks", Policy(value_type=ValueType.INT8_TBE))
    target, joining, other = Recorder(), Recorder(), Recorder()
    with follow(service, "tbe", "a", target), follow(service, "predictors", "b", other):
        with Trainer(service.grpc) as trainer:
            wait_until_in_sync(service, "tbe", trainer.publish_all())
        with Trainer(service.grpc, tables, run="later", started=2) as trainer:
            trainer.publish_all()
            wait_for_lag(service, "tbe", lambda lag: f"the policy is not in force: {why}" in lag["reason"])
            head = trainer.change(3)
            wait_until_in_sync(service, "predictors", head)
            expected = trainer.expected(ValueType.INT8_TBE)
            with follow(service, "tbe", "c", joining) as replica:
                replica.wait_for(head, WAIT)
                assert joining.bytes() == {name: expected[name] for name in ("user", "item")}
            lag = wait_for_lag(service, "tbe", lambda lag: lag["lag"]["versions"] == 0)
            assert (lag["state"], lag["lag"]["rows"]) == ("current", 10)
            narrow = Policy(tables=("user", "item"), value_type=ValueType.INT8_TBE)
            admin.update_consumer("tbe", narrow)
            given_as(service, "tbe", narrow, head)
    assert target.bytes() == joining.bytes()


def test_a_consumer_made_anew_under_the_same_name_begins_anew(service: RunningService, admin: Admin) -> None:
    target = Recorder()
    with Trainer(service.grpc) as trainer:
        with follow(service, "top", "a", target) as replica:
            head = trainer.publish_all()
            wait_until_in_sync(service, "top", trainer.change(10))
            history = replica.held.history
        for policy in (Policy(top_k=4, value_type=ValueType.INT8), Policy()):
            admin.delete_consumer("top")
            assert service.get("/consumers/top")[0] == 404
            admin.create_consumer("top", "clicks", policy)
            assert service.get_json("/consumers/top")["replicas"] == []
            with follow(service, "top", "a", target, held=replica.held) as replica:
                lag = given_as(service, "top", policy, head)
                assert target.bytes() == trainer.expected(policy.value_type)
            assert target.releases[-1].resync
            assert (lag["history"] == head.history) == policy.sends_everything
            assert lag["history"] != history


def test_a_replica_that_joins_during_a_change_gets_the_announced_tables(
    service: RunningService, admin: Admin, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for what the policy wants to be there."""
    target, joining = Recorder(), Recorder()
    changing, go = threading.Event(), threading.Event()
    write = ViewLog.write

    def held_back(log: ViewLog, *arguments: Any) -> None:
        changing.set()
        assert go.wait(WAIT)
        write(log, *arguments)

    with Trainer(service.grpc) as trainer, follow(service, "top", "a", target):
        head = trainer.publish_all()
        wait_until_in_sync(service, "top", head)
        monkeypatch.setattr(ViewLog, "write", held_back)
        policy = Policy(value_type=ValueType.INT8)
        admin.update_consumer("top", policy)
        assert changing.wait(WAIT)
        with follow(service, "top", "b", joining) as replica:
            go.set()
            replica.wait_for(1, WAIT)
            given_as(service, "top", policy, head)
            wait_for_lag(service, "top", lambda lag: len(lag["replicas"]) == 2 and lag["state"] == "in sync")
            given_as(service, "top", policy, trainer.change(3))
    assert joining.bytes() == target.bytes() == trainer.expected(ValueType.INT8)


def holds(service: RunningService, consumer: str, target: Recorder, expected: dict[str, bytes]) -> None:
    wait_for_lag(service, consumer, lambda _: target.bytes() == expected)

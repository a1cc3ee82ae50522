"""Policies that change while replicas follow: nobody loses its place, and what is held stays right."""

from typing import Any

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
    wait_until_in_sync,
)
from tests.support.server import RunningService

from deltasync.client import Admin, Position, TableSpec
from deltasync.core.policy import Policy
from deltasync.core.value_types import ValueType

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

"""The brake: a paused consumer's replicas stay at what they have, whatever is published."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.command import deltasync
from tests.support.fleet import (
    AT_ONCE,
    ITEM,
    USER,
    Recorder,
    Trainer,
    admin_of,
    follow,
    wait_for_lag,
    wait_until_in_sync,
)
from tests.support.metrics import samples_of
from tests.support.process import ServiceProcess
from tests.support.server import TOKEN, RunningService
from tests.support.waiting import wait_for
from tests.support.wire import ReplicaStream

from deltasync.client import (
    Admin,
    Contradiction,
    Endpoint,
    InvalidInput,
    NotFound,
    NotPermitted,
    NumpyTarget,
    Policy,
)
from deltasync.v1 import subscribe_pb2

TOP = Policy(top_k=3, ready_within_seconds=20)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    options: dict[str, Any] = {"progress_seconds": 0.02, "releases": AT_ONCE}
    with RunningService(tmp_path / "data", policies={"top": TOP}, **options) as service:
        yield service


def news_of(replica: ReplicaStream) -> tuple[int, int]:
    """What a replica is told to hold, without a row, and for how long that has not been the newest."""
    message = replica.until("progress", "chunk", "release_end")
    if isinstance(message, subscribe_pb2.Progress):
        return message.head.version, message.behind_ns
    assert message.rows == 0  # It is asked to show what it holds.
    return message.position.version, message.behind_ns


@pytest.mark.parametrize("consumer", ["predictors", "top"])
def test_replicas_stay_at_what_they_have_and_then_lack_nothing(service: RunningService, consumer: str) -> None:
    target, admin = Recorder(), admin_of(service)
    with Trainer(service.grpc) as trainer, follow(service, consumer, "a", target) as replica:
        wait_until_in_sync(service, consumer, trainer.publish_all())
        admin.pause_consumer(consumer, "nonsense")
        held, before = replica.held, target.bytes()
        for _ in range(3):
            head = trainer.change(20)
        lag = wait_for_lag(service, consumer, lambda lag: lag["head"] == head.number)
        assert re.fullmatch(
            r"paused since \S+Z by admin token \(127.0.0.1:\d+\): nonsense; otherwise (behind|current): .*",
            lag["reason"],
        )
        assert (lag["state"], lag["paused"]["reason"]) == ("paused", "nonsense")
        with ReplicaStream(service.grpc, consumer=consumer, replica="b", held=held) as other:
            other.until("opened")
            assert {news_of(other) for _ in range(3)} == {(held.number, 0)}
        assert replica.held == held
        assert replica.ready
        assert target.bytes() == before
        admin.resume_consumer(consumer)
        admin.resume_consumer(consumer)  # Again: nothing to do.
        replica.wait_for(head, 20)
        wait_for_lag(service, consumer, lambda lag: lag["replicas"][0]["lag"]["rows"] == 0)
        assert target.bytes() == trainer.expected()
        assert len(target.held) == len({release.position for release in target.releases})


@pytest.mark.parametrize("consumer", ["predictors", "top"])
def test_no_table_of_a_paused_consumer_is_deleted(service: RunningService, consumer: str) -> None:
    target, admin = Recorder(), admin_of(service)
    admin.update_consumer("probes", Policy(tables=("item",)))
    with Trainer(service.grpc) as trainer:
        head = trainer.publish_all()
    with follow(service, consumer, "a", target) as replica:
        wait_until_in_sync(service, consumer, head)
        admin.pause_consumer("probes")  # It has no such table, so it does not matter.
        admin.pause_consumer(consumer, "nonsense")
        held, before = replica.held, target.bytes()
        said = rf"table 'user': the replicas of paused consumers keep it \({consumer}\): resume them first"
        with pytest.raises(Contradiction, match=said):
            admin.delete_table("clicks", "user")
        with ReplicaStream(service.grpc, consumer=consumer, replica="b", held=held) as other:
            assert [each.name for each in other.until("opened").tables] == ["user", "item"]
        assert (replica.held, target.bytes()) == (held, before)
        admin.resume_consumer(consumer)
        admin.delete_table("clicks", "user")
        wait_for(lambda: set(target.bytes()) == {"item"})


def test_after_a_pause_replicas_get_the_current_rows(service: RunningService) -> None:
    """Not what another consumer is still being sent of the version that is to be passed over."""
    target, admin = Recorder(), admin_of(service)
    with Trainer(service.grpc) as trainer, follow(service, "predictors", "a", target) as replica:
        good = trainer.publish_all()
        wait_until_in_sync(service, "predictors", good)
        admin.pause_consumer("predictors", "the next one is bad")
        trainer.change(20)
        with ReplicaStream(service.grpc, consumer="probes", held=good, budget=1) as slow:
            slow.until("chunk")
            head = trainer.change(1)
            admin.resume_consumer("predictors")
            replica.wait_for(head, 20)
            assert [at.number for at in target.held] == [good.number, head.number]
            assert target.bytes() == trainer.expected()


def test_a_replica_with_nothing_waits_and_lag_says_why(service: RunningService) -> None:
    admin, target = admin_of(service), NumpyTarget()
    admin.pause_consumer("predictors")
    with Trainer(service.grpc) as trainer, follow(service, "predictors", "new", target) as replica:
        head = trainer.publish_all()
        lag = wait_for_lag(service, "predictors", lambda lag: lag["replicas"] and lag["head"])
        assert lag["state"] == "paused"
        assert not replica.ready
        with ReplicaStream(service.grpc, replica="newer") as other:
            assert other.until("opened").resync
            assert news_of(other)[0] == 0
        assert target.tables == {}
        admin.resume_consumer("predictors")
        replica.wait_for(head, 20)
        assert replica.ready


@pytest.mark.nightly
def test_a_pause_survives_a_restart_with_what_replicas_hold(tmp_path: Path) -> None:
    arguments = ("--consumer", "predictors=clicks")
    target = Recorder()
    with ServiceProcess(tmp_path / "data", *arguments) as service:
        admin = Admin(Endpoint(service.http, TOKEN, by="anna"))
        admin.update_consumer("predictors", Policy(ready_within_seconds=30))
        with Trainer(service.grpc) as trainer, follow(service, "predictors", "a", target) as replica:
            wait_until_in_sync(service, "predictors", trainer.publish_all())
            admin.pause_consumer("predictors", "nonsense")
            held, head = replica.held, trainer.change(5)
            before = wait_for_lag(service, "predictors", lambda lag: lag["head"] == head.number)["paused"]
            service.kill()
            service.start()
            lag = wait_for_lag(service, "predictors", lambda lag: lag["replicas"][0]["connected"])
            assert (lag["state"], lag["paused"], lag["head"]) == ("paused", before, head.number)
            assert re.fullmatch(r"anna as admin token \(127.0.0.1:\d+\)", before["by"])
            with ReplicaStream(service.grpc, replica="b", held=held) as other:
                assert news_of(other) == (held.number, 0)  # As ready as it was.
            assert replica.held == held
            admin.resume_consumer("predictors")
            replica.wait_for(head, 20)
            assert target.bytes() == trainer.expected()


@pytest.mark.parametrize("policy", [Policy(top_k=2), Policy(tables=("user",)), Policy(ready_within_seconds=5)])
@pytest.mark.parametrize("consumer", ["predictors", "top"])
def test_a_policy_set_during_a_pause_counts_after_it(
    service: RunningService, consumer: str, policy: Policy
) -> None:
    target, admin = Recorder(), admin_of(service)
    with Trainer(service.grpc) as trainer, follow(service, consumer, "a", target) as replica:
        wait_until_in_sync(service, consumer, trainer.publish_all())
        admin.pause_consumer(consumer)
        held, before = replica.held, target.bytes()
        admin.update_consumer(consumer, policy)
        head = trainer.change(20)
        with ReplicaStream(service.grpc, consumer=consumer, replica="b", held=held) as other:
            assert {news_of(other) for _ in range(3)} == {(held.number, 0)}
        assert (replica.held, target.bytes()) == (held, before)
        assert replica.readiness.yes or not policy.ready_within_seconds
        admin.resume_consumer(consumer)
        replica.wait_for(head, 20)
        wait_for_lag(service, consumer, lambda lag: lag["replicas"][0]["lag"]["rows"] == 0)
        expected = {name: rows for name, rows in trainer.expected().items() if name in target.tables}
        assert target.bytes() == expected
        assert expected.keys() == ({"user"} if policy.tables == ("user",) else {USER.name, ITEM.name})


def test_a_paused_replica_without_lag_gets_damaged_rows_repaired(service: RunningService) -> None:
    target, admin = Recorder(), admin_of(service)
    with Trainer(service.grpc) as trainer, follow(service, "predictors", "a", target):
        wait_until_in_sync(service, "predictors", trainer.publish_all())
        admin.pause_consumer("predictors")
        target.tables["user"][7] += 1
        wait_for_lag(service, "predictors", lambda lag: lag["damages"] > 0)
        wait_for_lag(service, "predictors", lambda lag: not lag["replicas"][0]["damaged"])
        assert target.bytes() == trainer.expected()


def test_a_pause_is_logged_counted_and_shown(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    consumer, options = (("consumer", "probes"),), ("--service", service.http)
    monkeypatch.setenv("DELTASYNC_TOKEN", TOKEN)
    _, text, _ = deltasync("consumers", "pause", "probes", "--reason", "a bad eval", "--by", "anna", *options)
    at = f"--service {service.http}"
    assert text == f"consumer probes is paused; resume it with: deltasync consumers resume probes {at}\n"
    listed = deltasync("consumers", "list", "--service", service.http)[1]
    assert re.search(
        r"^probes +clicks +paused +0/0 +paused since \S+ by anna as admin token \(127.0.0.1:\d+\): a bad eval; ",
        listed,
        re.MULTILINE,
    )
    shown = deltasync("lag", "probes", "--service", service.http)[1]
    assert re.search(r"paused\npaused since \S+ by anna .*: a bad eval; otherwise empty: ", shown)
    samples = samples_of(service)
    assert samples["deltasync_consumer_paused", consumer] == 1
    assert samples["deltasync_events_total", (("event", "consumer_paused"),)] == 1
    assert deltasync("consumers", "resume", "probes", *options)[1] == "consumer probes is resumed\n"
    samples = samples_of(service)
    assert samples["deltasync_consumer_paused", consumer] == 0
    assert samples["deltasync_events_total", (("event", "consumer_resumed"),)] == 1


def test_an_invalid_request_pauses_nothing(service: RunningService) -> None:
    for change in (Admin.pause_consumer, Admin.resume_consumer):
        with pytest.raises(NotPermitted):
            change(Admin(Endpoint(service.http, "wrong")), "probes")
        with pytest.raises(NotFound):
            change(admin_of(service), "no")
    with pytest.raises(InvalidInput, match="reason"):
        admin_of(service).pause_consumer("probes", "x" * 500)
    assert service.get_json("/consumers/probes")["paused"] is None

"""Who only looks changes nothing of what there is to see: a guest is listed, and counts nowhere."""

import re

import pytest
from tests.support.command import deltasync
from tests.support.fleet import Recorder, Trainer, follow, wait_for_lag, wait_until_in_sync
from tests.support.server import RunningService
from tests.support.wire import ReplicaStream, subscribe_open

from deltasync.client import CallbackTarget
from deltasync.core.policy import Policy

POLICIES = {"top": Policy(top_k=0.5)}


def counts(service: RunningService, consumer: str) -> tuple[int, int, str]:
    (line,) = [each for each in service.get_json("/consumers") if each["consumer"] == consumer]
    return line["fleet"], line["connected"], line["state"]


@pytest.mark.parametrize("consumer", ["predictors", "top"])
def test_a_guest_leaves_state_offset_and_counts_as_they_are(service: RunningService, consumer: str) -> None:
    with Trainer(service.grpc) as trainer, follow(service, consumer, "a", Recorder()):
        before = wait_until_in_sync(service, consumer, trainer.publish_all())
        guest = follow(service, consumer, "looks", CallbackTarget(lambda _: None), guest=True)
        with guest:
            guest.wait_until_ready(20)
            lag = wait_for_lag(service, consumer, lambda lag: len(lag["replicas"]) == 2)
            same = ("state", "reason", "offset", "lag", "tables")
            assert {name: lag[name] for name in same} == {name: before[name] for name in same}
            assert [(each["replica"], each["guest"], each["reason"]) for each in lag["replicas"]] == [
                ("a", False, ""),
                ("looks", True, ""),
            ]
            assert counts(service, consumer) == (1, 1, "in sync")
            assert f'consumer_replicas{{consumer="{consumer}",state="connected"}} 1.0' in metrics(service)
            assert 'replica="looks"' not in metrics(service)
            assert deltasync("lag", consumer, "--max-seconds", "60", "--service", service.http)[0] == 0
            shown = deltasync("replicas", "list", consumer, "--service", service.http)[1].splitlines()
            assert [line.split()[1:3] for line in shown[1:]] == [["a", "connected"], ["looks", "guest"]]
            assert re.search("(?m)^looks +guest ", deltasync("lag", consumer, "--service", service.http)[1])
        wait_for_lag(service, consumer, lambda lag: len(lag["replicas"]) == 1)


def test_a_guest_that_holds_nothing_is_not_behind(service: RunningService) -> None:
    with Trainer(service.grpc) as trainer, follow(service, "predictors", "a", Recorder()):
        wait_until_in_sync(service, "predictors", trainer.publish_all())
        opening = subscribe_open(replica="looks")
        opening.open.guest = True
        with ReplicaStream(service.grpc, bare=True) as stream:
            stream.send(opening)
            lag = wait_for_lag(service, "predictors", lambda lag: len(lag["replicas"]) == 2)
            assert [each["offset"] for each in lag["replicas"]] == [1, 0]
            assert (lag["state"], lag["offset"], lag["lag"]["seconds"]) == ("in sync", 1, 0)


def test_a_consumer_that_only_guests_follow_is_empty(service: RunningService) -> None:
    with Trainer(service.grpc) as trainer, follow(service, "predictors", "looks", Recorder(), guest=True) as guest:
        guest.wait_for(trainer.publish_all(), 20)
        lag = wait_for_lag(service, "predictors", lambda lag: lag["replicas"][0]["offset"] == 1)
        assert (lag["state"], lag["offset"]) == ("empty", 0)
        assert counts(service, "predictors") == (0, 0, "empty")


def metrics(service: RunningService) -> str:
    return service.get("/metrics")[1]

"""A fleet that follows a canary at a distance, objections, and what consumers served when."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.fleet import Trainer, follow, held, wait_for_lag
from tests.support.server import TOKEN, RunningService
from tests.support.waiting import wait_for

from deltasync.base.errors import Contradiction, InvalidInput, NotFound
from deltasync.client import Admin, Endpoint, NumpyTarget
from deltasync.core.policy import Policy

BEHIND = 0.5  # Seconds.


@pytest.fixture
def service(tmp_path: Path) -> Iterator[RunningService]:
    with RunningService(tmp_path / "data", policies={"canary": Policy(), "ranked": Policy(top_k=3)}) as service:
        yield service


@pytest.fixture
def admin(service: RunningService) -> Admin:
    return Admin(Endpoint(service.http, TOKEN))


def at(service: RunningService, consumer: str, version: int) -> dict[str, Any]:
    return wait_for_lag(service, consumer, lambda lag: (lag["head"], lag["state"]) == (version, "in sync"))


def test_a_fleet_follows_a_canary_stops_at_an_objection_and_goes_back(
    service: RunningService, admin: Admin
) -> None:
    canary, fleet, ranked = NumpyTarget(), NumpyTarget(), NumpyTarget()
    with (
        Trainer(service.grpc) as trainer,
        follow(service, "canary", "c", canary),
        follow(service, "predictors", "p", fleet),
        follow(service, "ranked", "r", ranked),
    ):
        trainer.publish_all()
        first = trainer.expected()
        admin.keep_version("clicks")
        admin.follow_version("predictors", 1)
        admin.follow_consumer("predictors", "canary", BEHIND, "back")
        admin.follow_consumer("ranked", "predictors", BEHIND, version=1)
        trainer.change(10)
        second = trainer.expected()
        admin.keep_version("clicks", "second")
        trainer.change(10)
        assert "version 2 (second) since" in at(service, "predictors", 2)["follows"]
        assert held(fleet) == second
        at(service, "ranked", 2)
        assert held(ranked) == second, "it follows the follower"

        admin.object("canary", "its AUC fell")
        lag = at(service, "predictors", 1)
        assert "0.5 s behind consumer 'canary'" in lag["follows"]
        assert held(fleet) == first
        lag = wait_for_lag(service, "predictors", lambda lag: "stays" in lag["follows"])
        assert "stays, because consumer 'canary' objects since" in lag["follows"]
        assert lag["follows"].endswith(": its AUC fell")
        assert "its AUC fell" in admin.consumer("canary")["objects"]
        assert "its AUC fell" in service.get_json("/consumers/canary")["objects"]
        trainer.change(10)
        third = trainer.expected()
        admin.keep_version("clicks")
        admin.object("canary", "another reason")  # The first one stays in force.
        assert "its AUC fell" in admin.consumer("canary")["objects"]
        at(service, "ranked", 2)

        admin.withdraw_objection("canary")
        text = "no version has been kept since consumer 'canary' withdrew its objection"
        wait_for_lag(service, "predictors", lambda lag: text in lag["follows"])
        admin.keep_version("clicks")
        at(service, "predictors", 4)
        assert held(fleet) == third
        assert service.get_json("/consumers/canary")["objects"] == ""
        at(service, "ranked", 4)
    events = [
        (each["subject"]["consumer"], each["text"])
        for each in service.get_json("/events")
        if each["event"] == "consumer_objects"
    ]
    assert events == [("canary", "its AUC fell"), ("canary", "withdrawn: its AUC fell")]


def test_what_cannot_be_followed_at_a_distance_is_refused(service: RunningService, admin: Admin) -> None:
    with Trainer(service.grpc) as trainer:
        trainer.publish_all()
        with pytest.raises(NotFound, match="'predictors': no later version is kept; wait, or name the first one"):
            admin.follow_consumer("predictors", "canary", BEHIND)
        admin.keep_version("clicks", "good")
        with pytest.raises(NotFound, match="consumer 'canary' has no connected replica"):
            admin.follow_consumer("predictors", "canary", BEHIND)
        with pytest.raises(NotFound, match="no consumer 'nobody'"):
            admin.follow_consumer("predictors", "nobody", BEHIND, version="good")
        with pytest.raises(InvalidInput, match="increase --history-seconds"):
            admin.follow_consumer("predictors", "canary", 86_400, version="good")
        with pytest.raises(Contradiction, match="in a circle: canary after canary"):
            admin.follow_consumer("canary", "canary", BEHIND, version="good")
        admin.follow_consumer("predictors", "canary", BEHIND, version="good")
        with pytest.raises(Contradiction, match="in a circle: canary after predictors after canary"):
            admin.follow_consumer("canary", "predictors", BEHIND, version="good")
        with pytest.raises(Contradiction, match="is followed by predictors"):
            admin.release_version("clicks", "good")
        with pytest.raises(InvalidInput, match="reason: use 1 to 400"):
            admin.object("canary", "")
    admin.create_consumer("other", "views", Policy())
    with pytest.raises(Contradiction, match="only one of its own model"):
        admin.follow_consumer("predictors", "other", BEHIND, version="good")


@pytest.mark.parametrize("consumer", ["predictors", "ranked"])
def test_the_history_has_each_release_and_who_proved_it(
    service: RunningService, admin: Admin, consumer: str
) -> None:
    with Trainer(service.grpc) as trainer, follow(service, consumer, "a", NumpyTarget()):
        trainer.publish_all()
        wait_for(lambda: [line["replicas"] for line in admin.history(consumer)][-1:] == [{"a": 1}])
        with follow(service, consumer, "b", NumpyTarget()):
            trainer.change(5)
            wait_for(lambda: admin.history(consumer)[-1]["replicas"] == {"a": 2, "b": 2})
            line = admin.history(consumer)[-1]
            assert (line["version"], line["step"], line["rows"] > 0, line["bytes"] > 0) == (2, 2, True, True)
            assert line["follows"] == ""
            admin.keep_version("clicks", "good")
            admin.follow_version(consumer, "good")
            wait_for(lambda: admin.history(consumer)[-1]["follows"] == "good")
            trainer.change(5)
            at(service, consumer, 2)
        times = [each["unix_ns"] for each in admin.history(consumer)]
        assert times == sorted(set(times))
        assert len(admin.history(consumer, last=1)) == 1
        with pytest.raises(InvalidInput, match="since_seconds"):
            admin.history(consumer, float("inf"))

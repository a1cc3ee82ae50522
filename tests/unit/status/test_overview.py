"""What a process says of consumers, models and volumes, also of those that it cannot answer for yet."""

import json
import re
from collections.abc import Collection
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import get_args

from prometheus_client import Metric
from tests.unit.support.async_tests import in_service

from deltasync.base.errors import Owner
from deltasync.cli.output import urgency
from deltasync.cli.status import _HOLDING
from deltasync.cluster.bucket import Member
from deltasync.cluster.owners import Owners
from deltasync.log.brokers import BrokerVolume
from deltasync.log.volume import Volume
from deltasync.service.service import Service
from deltasync.status.metrics import Figures, families
from deltasync.status.overview import consumer_statuses, model_statuses, unowned_models
from deltasync.status.records import ReplicaState, State


class Owning(Owners):
    """Process `a` is about to take `coming`, `b` owns `elsewhere`, and nobody has `lost`."""

    def owner_of(self, model: str) -> Owner | None:
        owner = self.me.owner()
        return {"coming": owner, "elsewhere": replace(owner, process="b")}.get(model)

    def models(self) -> Collection[str]:
        return ("coming", "elsewhere", "lost")

    def consumers_of(self, model: str) -> Collection[str]:
        return (f"{model}-1", f"{model}-2")


@in_service()
async def test_consumers_of_a_model_that_is_being_taken_over_wait(service: Service) -> None:
    service.join(Owning(Member("a", "", "")))
    lines = consumer_statuses(service.models, service.registry, [])
    assert [(each.consumer, each.model, each.state, each.head) for each in lines] == [
        ("coming-1", "coming", "waiting", None),
        ("coming-2", "coming", "waiting", None),
    ]
    assert {each.reason for each in lines} == {"model 'coming' is not available: this process is taking it over"}


@in_service()
async def test_a_model_that_nobody_has_is_named_by_every_process(service: Service) -> None:
    service.join(Owning(Member("a", "", "")))
    assert unowned_models(service.models) == ["lost"]
    (line,) = model_statuses(service.models)
    assert (line.model, line.head) == ("lost", None)
    assert line.trouble == "no live process owns this model"


def test_brokers_are_not_full_because_they_do_not_say_what_is_left(tmp_path: Path) -> None:
    brokers = BrokerVolume("b0:4222")
    free, failed = volumes_of(brokers, Volume("models", tmp_path))
    assert [(each.labels["volume"], each.value > 0) for each in free.samples] == [("models", True)]
    assert [(each.labels["volume"], each.value) for each in failed.samples] == [("log", 0), ("models", 0)]
    brokers.troubles["clicks"] = "they do not answer"
    _, failed = volumes_of(brokers)
    assert [each.value for each in failed.samples] == [1]


def volumes_of(*volumes: Volume) -> list[Metric]:
    return [each for each in families(Figures(volumes=volumes), 0) if "volume" in each.name]


STATES = set(get_args(State))


def words_of(name: str) -> list[str]:
    """A list of words of the page's."""
    text = (files("deltasync.api") / "page" / "text.js").read_text()
    found = re.search(rf"const {name} = (?:new Set\()?(\[[^\]]*\])", text)
    assert found
    return list(json.loads(found[1]))


def test_the_page_and_the_command_have_the_same_order_of_all_states() -> None:
    order = words_of("ORDER")
    assert set(order) == STATES
    assert order == sorted(STATES, key=urgency)


def test_no_state_is_misspelt() -> None:
    of_replicas = set(get_args(ReplicaState))  # The page has moods for these too.
    assert {*words_of("GOOD"), *words_of("FINE")} | {"failed", "damaged", "away"} == STATES | of_replicas
    assert _HOLDING <= STATES

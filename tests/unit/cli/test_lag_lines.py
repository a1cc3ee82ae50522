"""Lines of all consumers, as `lag` and `status` print them."""

from dataclasses import asdict
from typing import Any

from deltasync.cli.status import consumer_lines
from deltasync.status.records import ConsumerStatus, Freshness, Lag


def line(consumer: str, *wrong: str) -> dict[str, Any]:
    known = ConsumerStatus(
        consumer=consumer,
        model="clicks",
        state="in sync",
        reason="all hold the newest version",
        lag=Lag(0, 0, 0, 0.0),
        freshness=Freshness([], 0),
    )
    replicas = [{"replica": each, "reason": "something else writes to it"} for each in wrong]
    return {**asdict(known), "replicas": replicas}


def test_a_consumer_in_sync_has_its_wrong_replicas_named() -> None:
    text = consumer_lines([line("predictors", "a"), line("fine")])
    assert len(text) == 4
    assert text[-1] == "replica a of predictors: something else writes to it"
    assert len(consumer_lines([line("fine")])) == 2


def test_of_many_wrong_replicas_some_are_named() -> None:
    text = consumer_lines([line("predictors", *map(str, range(12)))])
    assert [each.split()[0] for each in text[2:]] == ["replica"] * 10 + ["and"]
    assert text[-1] == "and 2 more: deltasync replicas list"

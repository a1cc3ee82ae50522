"""Lines of all consumers, as `lag` and `status` print them."""

from typing import Any

from deltasync.cli.lag import consumer_lines


def line(consumer: str, *wrong: str) -> dict[str, Any]:
    amounts = dict.fromkeys(("versions", "rows", "bytes", "seconds", "replicas", "connected"), 0)
    return {
        "consumer": consumer,
        "model": "clicks",
        "state": "in sync",
        "reason": "all hold the newest version",
        "unsent_share": None,
        "freshness": {"p50": None, "p99": None},
        "wrong": [{"replica": each, "reason": "something else writes to it"} for each in wrong],
        **amounts,
    }


def test_a_consumer_in_sync_has_its_wrong_replicas_named() -> None:
    text = consumer_lines([line("predictors", "a"), line("fine")])
    assert len(text) == 4
    assert text[-1] == "replica a of predictors: something else writes to it"
    assert len(consumer_lines([line("fine")])) == 2


def test_of_many_wrong_replicas_some_are_named() -> None:
    text = consumer_lines([line("predictors", *map(str, range(12)))])
    assert [each.split()[0] for each in text[2:]] == ["replica"] * 10 + ["and"]
    assert text[-1] == "and 2 more: deltasync replicas list"

"""Whose deliveries tell how long the way from the trainer takes."""

from pathlib import Path

import pytest
from tests.support.local_model import LocalModel
from tests.support.view_scenarios import USER, changed, run

from deltasync.api.delivery_times import DeliveryTimes
from deltasync.api.sent_releases import SentRelease
from deltasync.consumers.consumer import Consumer
from deltasync.core.steady_clock import steady_ns


def deliver(times: DeliveryTimes, local: LocalModel, version: int) -> None:
    times.note_held(SentRelease(version, version, (), frozenset(), 0, steady_ns()), local.model)


def counts(consumer: Consumer) -> tuple[int, int]:
    found = consumer.durations
    return (sum(found.ack.read()[0]), len(found.recent))


def test_who_comes_later_says_nothing_of_how_long_the_way_of_earlier_versions_is(tmp_path: Path) -> None:
    """Of a trainer that has been idle for an hour a new replica would count as one that took an hour."""

    async def scenario(local: LocalModel) -> None:
        consumer = Consumer("predictors", "clicks", 0)
        times = DeliveryTimes(consumer, guest=False)
        deliver(times, local, 1)
        assert counts(consumer) == (0, 0)
        await local.cut(changed(1, USER, 3))
        deliver(times, local, 2)
        assert counts(consumer) == (1, 1)

    run(tmp_path, scenario)


def test_what_is_held_already_is_delivered_once(tmp_path: Path) -> None:
    """What repairs a release brings no other version."""

    async def scenario(local: LocalModel) -> None:
        consumer = Consumer("predictors", "clicks", 0)
        times = DeliveryTimes(consumer, guest=False)
        await local.cut(changed(1, USER, 3))
        for _ in range(2):
            deliver(times, local, 2)
        assert counts(consumer) == (1, 1)
        assert times.held == 2

    run(tmp_path, scenario)


@pytest.mark.parametrize("guest", [False, True])
def test_guests_count_nowhere(tmp_path: Path, guest: bool) -> None:
    async def scenario(local: LocalModel) -> None:
        consumer = Consumer("predictors", "clicks", 0)
        times = DeliveryTimes(consumer, guest=guest)
        await local.cut(changed(1, USER, 3))
        deliver(times, local, 2)
        assert counts(consumer) == ((0, 0) if guest else (1, 1))

    run(tmp_path, scenario)

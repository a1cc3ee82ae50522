"""Whose deliveries tell how long the way from the trainer takes."""

from pathlib import Path

import pytest
from tests.support.local_model import LocalModel
from tests.support.view_scenarios import USER, changed, run

from deltasync.api.sent_releases import AHEAD, SentReleases
from deltasync.consumers.consumer import Consumer, Replica


def deliver(sent: SentReleases, local: LocalModel, version: int) -> None:
    sent.note_sent(version, version)
    sent.note_ack(version, local.model, held=True)


def counts(consumer: Consumer) -> tuple[int, int]:
    found = consumer.durations
    return (sum(found.ack.read()[0]), len(found.recent))


def test_who_comes_later_says_nothing_of_how_long_the_way_of_earlier_versions_is(tmp_path: Path) -> None:
    """Of a trainer that has been idle for an hour a new replica would count as one that took an hour."""

    async def scenario(local: LocalModel) -> None:
        consumer = Consumer("predictors", "clicks", 0)
        sent = SentReleases(consumer, Replica("a"))
        deliver(sent, local, 1)
        assert counts(consumer) == (0, 0)
        await local.cut(changed(1, USER, 3))
        deliver(sent, local, 2)
        assert counts(consumer) == (1, 1)

    run(tmp_path, scenario)


def test_what_is_acknowledged_is_not_under_way_also_where_it_is_damaged(tmp_path: Path) -> None:
    async def scenario(local: LocalModel) -> None:
        consumer, replica = Consumer("predictors", "clicks", 0), Replica("a")
        sent = SentReleases(consumer, replica)
        for version in range(1, AHEAD + 1):
            assert not sent.full
            sent.note_sent(version, version)
        assert (sent.full, replica.unacked, replica.unacked_ns > 0) == (True, AHEAD, True)
        sent.note_ack(1, local.model, held=False)
        assert (sent.full, replica.unacked, sent.held) == (False, AHEAD - 1, 0)
        sent.note_sent(1, 1)  # What repairs it has the number of what it repairs.
        sent.note_ack(AHEAD, local.model, held=False)
        assert (replica.unacked, replica.unacked_ns, sum(consumer.durations.ack.read()[0])) == (0, 0, 0)

    run(tmp_path, scenario)


@pytest.mark.parametrize("guest", [False, True])
def test_guests_count_nowhere(tmp_path: Path, guest: bool) -> None:
    async def scenario(local: LocalModel) -> None:
        consumer = Consumer("predictors", "clicks", 0)
        sent = SentReleases(consumer, Replica("a", guest=guest))
        await local.cut(changed(1, USER, 3))
        deliver(sent, local, 2)
        assert counts(consumer) == ((0, 0) if guest else (1, 1))

    run(tmp_path, scenario)

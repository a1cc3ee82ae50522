"""The time of the newest event, from the ranks that know it to a predictor, lag and metrics."""

import time
from typing import Any

import numpy as np
import pytest
from tests.support.fleet import admin_of, lost, wait_for_lag
from tests.support.metrics import EVENT_METRICS, samples_of
from tests.support.server import RunningService
from tests.support.wire import TABLES, WHOLE, RankStream, ReplicaStream, ack, full_part, part, random_rows, size_of

from deltasync.client import NumpyTarget, Policy, Subscriber, SubscriberOptions
from deltasync.wire.messages import position_from_message

SECOND = 10**9
CONSUMER = (("consumer", "predictors"),)
SAMPLES = {
    ("deltasync_head_event_time_seconds", (("model", "clicks"),)),
    ("deltasync_consumer_seconds_behind_events", CONSUMER),
    ("deltasync_replica_seconds_behind_events", (*CONSUMER, ("replica", "p0"))),
}


def at(requests: list[Any], event_time_unix_ns: int | None) -> list[Any]:
    """The same part, with this event time."""
    if event_time_unix_ns is not None:
        requests[-1].close.event_time_unix_ns = event_time_unix_ns
    return requests


def changes(step: int) -> list[Any]:
    return part(step, [(0, [1], random_rows(step)[0][:1])])


def subscriber(running: RunningService, target: NumpyTarget, consumer: str = "predictors") -> Subscriber:
    return Subscriber(SubscriberOptions(service=running.grpc, consumer=consumer, replica="p0"), target)


def test_the_newest_time_of_all_ranks_reaches_a_predictor(running: RunningService) -> None:
    target = NumpyTarget()
    with (
        RankStream(running.grpc, world_size=2, shards=WHOLE[:1]) as first,
        RankStream(running.grpc, world_size=2, rank=1, shards=WHOLE[1:]) as second,
        subscriber(running, target) as replica,
    ):
        first.opened()
        second.opened()
        rows = random_rows(0)
        first.send(*at(full_part(1, rows, WHOLE[:1]), 7))
        second.send(*at(part(1, [(0, np.arange(30), rows[1])], full=True), None))
        replica.wait_for(first.sealed(), 20)
        assert replica.event_time_unix_ns == 7, "a rank that does not know takes nothing from one that does"
        for step, times in {2: (9, 8), 3: (8, 8), 4: (None, None)}.items():
            first.send(*at(changes(step), times[0]))
            second.send(*at(part(step, []), times[1]))
            position = replica.wait_for(first.sealed(), 20)
            with target.reading() as reading:
                assert reading.tables.keys() == {table.name for table in TABLES}
                assert (reading.position, reading.event_time_unix_ns) == (position, 9), "a run forgets no event"


def test_lag_and_metrics_tell_how_old_the_newest_event_is(running: RunningService) -> None:
    now = time.time_ns()
    with RankStream(running.grpc) as rank:
        rank.opened()
        with lost(subscriber(running, NumpyTarget())) as replica:
            rank.send(*at(full_part(1, random_rows(0), WHOLE), now - 100 * SECOND))
            replica.wait_for(rank.sealed(), 20)
        rank.send(*at(changes(2), now - 40 * SECOND))
        rank.sealed()
        lag = wait_for_lag(running, "predictors", lambda lag: lag["head"] == 2)
        assert lag["lag"]["seconds_behind_events"] == pytest.approx(100, abs=30)
        assert lag["replicas"][0]["lag"]["seconds_behind_events"] == pytest.approx(100, abs=30)
        assert lag["head_seconds_behind_events"] == pytest.approx(40, abs=30)
        samples = samples_of(running)
        assert samples["deltasync_head_event_time_seconds", (("model", "clicks"),)] * SECOND == pytest.approx(
            now - 40 * SECOND
        )
        assert {name for name, _ in SAMPLES} == EVENT_METRICS.keys()
        behind = [samples[name] for name in SAMPLES if "behind" in name[0]]
        assert behind == [pytest.approx(100, abs=30)] * 2


def test_releases_of_a_policy_and_progress_after_them_tell_it(running: RunningService) -> None:
    admin_of(running).create_consumer("item", "clicks", Policy(tables=("*item",)))
    with RankStream(running.grpc) as rank, ReplicaStream(running.grpc, consumer="item") as replica:
        rank.opened()
        rank.send(*at(full_part(1, random_rows(0), WHOLE), 5))
        rank.sealed()
        rows, end = replica.release()
        assert end.event_time_unix_ns == 5
        replica.send(ack(size_of(rows), position_from_message(end.position)))
        rank.send(*at(changes(2), 6))  # Of another table: there is nothing to release.
        rank.sealed()
        while (progress := replica.until("progress")).version != 2:
            pass
        assert progress.event_time_unix_ns == 6

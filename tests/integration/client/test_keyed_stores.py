"""Keyed targets of a real service: in this process, and in a Redis that outlives it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.fleet import (
    ITEM,
    USER,
    WAIT,
    Trainer,
    as_sent,
    follow,
    wait_until_delivered,
    wait_until_in_sync,
)
from tests.support.redis_server import PROGRAM, RedisServer
from tests.support.server import RunningService

from deltasync.client import Policy, Position, Release, TableKind, TableSpec, ValueType
from deltasync.client.targets.keyed_target import KeyedTarget
from deltasync.client.targets.redis_target import RedisRows, RedisTarget
from deltasync.core.rows import Ids, Values
from deltasync.core.tables import FREE_ID

RAW_IDS = TableSpec("user.raw_ids", USER.rows, 1, np.dtype("<i8"), TableKind.ID_MAP, USER.name)
TABLES = [USER, ITEM, RAW_IDS]
POLICIES = {
    "half": Policy(value_type=ValueType.FP16),
    "quantised": Policy(value_type=ValueType.INT8_TBE),
    "top": Policy(top_k=3, value_type=ValueType.INT4_TBE),
}
VALUE_TYPES = {"predictors": ValueType.FP32, **{name: policy.value_type for name, policy in POLICIES.items()}}
needs_redis = pytest.mark.skipif(PROGRAM is None, reason="no redis-server or valkey-server is installed")


@pytest.fixture
def trainer(service: RunningService) -> Iterator[Trainer]:
    """One whose map gives a raw id to every second row."""
    with Trainer(service.grpc, TABLES) as trainer:
        trainer.rows[RAW_IDS.name] = np.zeros((USER.rows, 1), np.int64)
        trainer.rows[RAW_IDS.name][::2, 0] = 1 + (np.arange(0, USER.rows, 2) << 40)
        trainer.publish_all()
        yield trainer


def expected(trainer: Trainer, value_type: ValueType) -> tuple[Ids, Values, Values]:
    """The raw ids, their rows, and the rows of the table without a map."""
    entries = trainer.rows[RAW_IDS.name][:, 0]
    users = as_sent(USER, trainer.rows[USER.name], value_type)[entries != 0]
    return entries[entries != 0] ^ FREE_ID, users, as_sent(ITEM, trainer.rows[ITEM.name], value_type)


def hand_over(trainer: Trainer) -> Position:
    """Row 0 loses its raw id to row 1, row 2 gets a new one; of these rows only the first two have changed."""
    entries = trainer.rows[RAW_IDS.name]
    entries[[0, 1, 2], 0] = [0, entries[0, 0], 77]
    trainer.rows[USER.name][[0, 1]] += 1
    ids = [np.array([0, 1]), np.array([4]), np.array([0, 1, 2])]
    trainer.rows[ITEM.name][4] += 1
    return trainer._publish(ids)


def check(rows: Any, trainer: Trainer, value_type: ValueType) -> None:
    """`lookup(table, keys)` finds what the trainer has, in a value type, and nothing else."""
    raw_ids, users, items = expected(trainer, value_type)
    for table, keys, values in ((USER, raw_ids, users), (ITEM, np.arange(ITEM.rows), items)):
        found, known = rows(table.name, keys)
        assert known.all()
        assert found.tobytes() == values.tobytes()
    assert not rows(USER.name, np.array([1, -1]))[1].any()


@pytest.mark.parametrize("consumer", ["predictors", "half"])
def test_a_keyed_target_is_in_sync(service: RunningService, trainer: Trainer, consumer: str) -> None:
    target = KeyedTarget()

    def lookup(table: str, keys: Ids) -> Any:
        with target.reading() as now:
            return now.tables[table].lookup(keys)

    with follow(service, consumer, "a", target):
        wait_until_in_sync(service, consumer, Position("", 1))
        check(lookup, trainer, VALUE_TYPES[consumer])
        wait_until_in_sync(service, consumer, hand_over(trainer))
        check(lookup, trainer, VALUE_TYPES[consumer])
        wait_until_in_sync(service, consumer, trainer.delete(ITEM, [3]))
        assert lookup(ITEM.name, np.array([2, 3, 4]))[1].tolist() == [True, False, True]


@needs_redis
@pytest.mark.parametrize("consumer", list(VALUE_TYPES))
def test_a_store_goes_on_where_it_was(
    service: RunningService, trainer: Trainer, tmp_path: Path, consumer: str
) -> None:
    (tmp_path / "redis").mkdir()
    with RedisServer(tmp_path / "redis") as server, server.client() as client:
        rows = RedisRows(client, "clicks")
        target = RedisTarget(client, "clicks")
        with follow(service, consumer, "a", target, held=target.position) as subscriber:
            subscriber.wait_for(1, WAIT)
            wait_until_delivered(service, consumer, Position("", 1))
            check(rows.lookup, trainer, VALUE_TYPES[consumer])
            assert target.position == rows.newest().position == subscriber.held
        head = hand_over(trainer)
        again, releases = RedisTarget(client, "clicks"), list[Release]()
        apply = again.apply

        def record(release: Release) -> None:
            releases.append(release)
            apply(release)

        again.apply = record  # type: ignore[method-assign]
        with follow(service, consumer, "a", again, held=again.position) as subscriber:
            wait_until_delivered(service, consumer, head)
            check(rows.lookup, trainer, VALUE_TYPES[consumer])
            wait_until_delivered(service, consumer, trainer.delete(ITEM, [3]))
            assert rows.lookup(ITEM.name, np.array([2, 3, 4]))[1].tolist() == [True, False, True]
        assert not any(release.resync for release in releases)
        assert sum(len(each) for release in releases for each in release.rows) <= 10
        assert client.hget("clicks:meta", "model") == b"clicks"

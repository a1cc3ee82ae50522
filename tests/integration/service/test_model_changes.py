"""A model that changes from run to run: its tables grow, and replicas that follow lose nothing."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.support.fleet import (
    ITEM,
    USER,
    WAIT,
    Recorder,
    Trainer,
    follow,
    wait_for_lag,
    wait_until_in_sync,
)
from tests.support.server import RunningService
from tests.support.wire import random_rows
from torch import nn

from deltasync.base.errors import Contradiction
from deltasync.client import Part, Policy, Position, Publisher, PublisherOptions, RowBatch, Shard, TableSpec
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.core.value_types import ValueType

LARGER = [replace(USER, rows=500), ITEM, TableSpec("context", 20, 4)]
POLICIES = {"ranked": Policy(value_type=ValueType.INT8)}


@pytest.fixture
def ranked(tmp_path: Path) -> Iterator[RunningService]:
    with RunningService(tmp_path / "data", policies=POLICIES) as service:
        yield service


def later_run(
    service: RunningService, tables: Sequence[TableSpec], continues: Position, number: int = 2
) -> Publisher:
    options = PublisherOptions(
        service=service.grpc, model="clicks", run=f"run-{number}", run_started_unix_ns=number, continues=continues
    )
    return Publisher(options, list(tables), [Shard.whole(table) for table in tables])


def part_of(tables: Sequence[TableSpec], rows: Sequence[np.ndarray], changed: dict[int, np.ndarray]) -> Part:
    """Some rows of some tables, by slot."""
    batches = [RowBatch(Shard.whole(tables[slot]), ids, rows[slot][ids]) for slot, ids in changed.items()]
    return Part(step=1, step_end_unix_ns=time.time_ns(), rows=batches)


def test_only_what_a_larger_run_publishes_travels(ranked: RunningService) -> None:
    plain, coded, rows = Recorder(), Recorder(), random_rows(7, LARGER)
    new = {0: np.array([3, *range(USER.rows, 500)]), 2: np.arange(20)}
    with follow(ranked, "predictors", "a", plain), follow(ranked, "ranked", "b", coded):
        with Trainer(ranked.grpc) as trainer:
            head = trainer.publish_all()
        for consumer in ("predictors", "ranked"):
            wait_until_in_sync(ranked, consumer, head)
        received, held = (plain.received_rows, coded.received_rows), plain.bytes()
        assert received == (USER.rows + ITEM.rows,) * 2
        with later_run(ranked, LARGER, head) as publisher:
            head = publisher.publish(part_of(LARGER, rows, new)).result(WAIT)
            assert head.number == 2
            for consumer in ("predictors", "ranked"):
                lag = wait_until_in_sync(ranked, consumer, head)
                assert lag["replicas"][0]["checked"], "by the checksums of the larger tables"
                assert lag["damages"] == 0
    fewer = sum(map(len, new.values()))
    # A table that is new in a view goes out by a release of its own, which may come again as it is filled.
    assert plain.received_rows - received[0] == fewer
    assert coded.received_rows - received[1] == fewer
    assert not any(release.resync for release in plain.releases[1:])
    user = plain.tables[USER.name]
    assert user.shape == (500, USER.dim)
    np.testing.assert_array_equal(user[new[0]], rows[0][new[0]])
    before = np.frombuffer(held[USER.name], USER.dtype).reshape(USER.rows, USER.dim)
    others = np.setdiff1d(np.arange(USER.rows), new[0])
    np.testing.assert_array_equal(user[others], before[others])
    assert plain.tables[ITEM.name].tobytes() == held[ITEM.name]
    np.testing.assert_array_equal(plain.tables["context"], rows[2])


def test_who_was_away_meanwhile_gets_what_it_lacks(ranked: RunningService) -> None:
    target = Recorder()
    with Trainer(ranked.grpc) as trainer:
        head = trainer.publish_all()
    with follow(ranked, "predictors", "a", target) as replica:
        replica.wait_for(head, WAIT)
        held = replica.held
    ids = np.arange(USER.rows, 500)
    rows = random_rows(7, LARGER[:1])[0]
    with later_run(ranked, LARGER[:1], head) as publisher:
        head = publisher.publish(part_of(LARGER, [rows], {0: ids})).result(WAIT)
    before = target.received_rows
    with follow(ranked, "predictors", "a", target, held=held) as replica:
        replica.wait_for(head, WAIT)
        lag = wait_until_in_sync(ranked, "predictors", head)
        assert lag["replicas"][0]["checked"]
    assert target.received_rows - before == len(ids)
    np.testing.assert_array_equal(target.tables[USER.name][ids], rows[ids])


def test_a_smaller_run_is_refused_and_replicas_go_on(ranked: RunningService) -> None:
    target = Recorder()
    with Trainer(ranked.grpc) as trainer, follow(ranked, "predictors", "a", target) as replica:
        replica.wait_for(trainer.publish_all(), WAIT)
        with later_run(ranked, [replace(USER, rows=59), ITEM], Position()) as publisher:
            refused = publisher.publish(Part(step=1, step_end_unix_ns=1, full=True))
            with pytest.raises(
                Contradiction, match=r"publish it under another model \(SyncOptions\(model=...\), --model NAME\)"
            ):
                refused.result(WAIT)
        head = trainer.change(5)
        replica.wait_for(head, WAIT)
        assert target.bytes() == trainer.expected()


def test_a_module_that_lacks_what_is_new_follows_the_rest_and_lag_names_it(ranked: RunningService) -> None:
    """A module of before: of a table that has grown it keeps what it has."""
    user, item = nn.EmbeddingBag(USER.rows, USER.dim), nn.EmbeddingBag(ITEM.rows, ITEM.dim, dtype=torch.float16)
    target, rows = TorchTarget(nn.ModuleDict({"user": user, "item": item})), random_rows(7, LARGER)
    with Trainer(ranked.grpc) as trainer, follow(ranked, "predictors", "a", target) as replica:
        head = trainer.publish_all()
        replica.wait_for(head, WAIT)
        wait_until_in_sync(ranked, "predictors", head)
        held = user.weight.detach().clone()
        with later_run(ranked, LARGER, head) as publisher:
            changed = {0: np.array([3, *range(USER.rows, 500)]), 1: np.array([2, 30]), 2: np.arange(20)}
            head = publisher.publish(part_of(LARGER, rows, changed)).result(WAIT)
            replica.wait_for(head, WAIT)
            lag = wait_for_lag(ranked, "predictors", lambda lag: lag["offset"] == head.number)
    assert lag["state"] == "partial"
    assert sorted(lag["replicas"][0]["unbound"]) == ["context", USER.name]
    with target.reading():
        np.testing.assert_array_equal(item.weight[[2, 30]].detach().numpy(), rows[1][[2, 30]])
        assert torch.equal(user.weight, held)

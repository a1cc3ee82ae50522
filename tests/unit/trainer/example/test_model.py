"""Batches of the click model: each rank's share of the events."""

import numpy as np
import pytest

from deltasync.trainer.example.features import SPARSE_FEATURES, Features, Featurizer
from deltasync.trainer.example.model import ClickBatch, click_batch
from deltasync.trainer.example.options import ModelOptions
from deltasync.trainer.example.stream import EVENT


@pytest.fixture
def features() -> Features:
    rows = [(100 + n, n % 3, n, n * 5000, n % 4 != 1) for n in range(11)]
    return Featurizer(ModelOptions(users=10, items=20, cross_buckets=30)).features(np.array(rows, EVENT))


def rows_of(features: Features, key: str) -> list[list[int]]:
    if key != "history":
        return [[row] for row in features.ids[key].tolist()]
    ends = np.cumsum(features.history_lengths)
    return [part.tolist() for part in np.split(features.history, ends)[:-1]]


def lists(batch: ClickBatch, key: str) -> list[list[int]]:
    return [ids.tolist() for ids in batch.sparse[key].to_dense()]


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 2), (1, 2), (2, 3), (3, 4), (12, 13)])
def test_rank_gets_every_world_size_th_event(features: Features, rank: int, world_size: int) -> None:
    batch = click_batch(features, rank, world_size)
    mine = list(range(len(features)))[: 11 - 11 % world_size][rank::world_size]
    assert batch.index.tolist() == [100 + row for row in mine]
    np.testing.assert_array_equal(batch.label.numpy(), features.label[mine])
    np.testing.assert_array_equal(batch.dense.numpy(), features.dense[mine])
    assert tuple(batch.sparse.keys()) == SPARSE_FEATURES
    assert {0, 1, 2} <= set(features.history_lengths.tolist()), "histories are ragged"
    for key in SPARSE_FEATURES:
        expected = rows_of(features, key)
        assert lists(batch, key) == [expected[row] for row in mine], key

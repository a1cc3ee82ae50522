"""Batches of the click model, and the model with quantised tables."""

from unittest.mock import Mock

import numpy as np
import pytest
import torch

from deltasync.client import ValueType
from deltasync.trainer.example.compare import unequal_rows
from deltasync.trainer.example.features import SPARSE_FEATURES, Features, Featurizer
from deltasync.trainer.example.model import ClickBatch, ClickModel, click_batch, quantised, served_rows
from deltasync.trainer.example.options import ModelOptions
from deltasync.trainer.example.stream import RatingEvents

pytestmark = pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")


@pytest.fixture
def features() -> Features:
    n = 11
    events = RatingEvents(
        index=np.arange(100, 100 + n, dtype=np.int64),
        user=np.arange(n, dtype=np.int64) % 3,
        item=np.arange(n, dtype=np.int64),
        timestamp=np.arange(n, dtype=np.int64) * 5000,
        label=(np.arange(n) % 4 != 1).astype(np.float32),
    )
    return Featurizer(ModelOptions(users=10, items=20, cross_buckets=30)).features(events)


def rows_of(features: Features, key: str) -> list[list[int]]:
    if key != "history":
        return [[row] for row in features.ids[key].tolist()]
    ends = np.cumsum(features.history_lengths)
    return [part.tolist() for part in np.split(features.history, ends)[:-1]]


def lists(batch: ClickBatch, key: str) -> list[list[int]]:
    return [ids.tolist() for ids in batch.sparse[key].to_dense()]


@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (0, 2), (1, 2), (2, 3), (3, 4), (12, 13)])
def test_a_rank_gets_every_world_sizeth_event(features: Features, rank: int, world_size: int) -> None:
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


def test_types(features: Features) -> None:
    batch = click_batch(features)
    assert batch.dense.dtype == batch.label.dtype == torch.float32
    assert batch.dense.shape == (11, 4)
    assert batch.index.dtype == batch.sparse.values().dtype == torch.int64
    assert batch.sparse.lengths().dtype == torch.int32
    assert batch.sparse.stride() == 11


def test_a_batch_shares_no_memory_with_the_features(features: Features) -> None:
    batch = click_batch(features)
    arrays = (features.dense, features.label, features.index, features.ids["user"], features.history)
    before = [array.copy() for array in arrays]
    for tensor in (batch.dense, batch.label, batch.index, batch.sparse.values()):
        tensor.fill_(7)
    for array, unchanged in zip(arrays, before, strict=True):
        np.testing.assert_array_equal(array, unchanged)


def test_moving_keeps_everything(features: Features) -> None:
    batch = click_batch(features)
    moved = batch.to(torch.device("meta"), non_blocking=True)
    assert {moved.dense.device.type, moved.label.device.type, moved.index.device.type} == {"meta"}
    assert moved.sparse.device().type == "meta"
    stayed = batch.to(torch.device("cpu"))
    assert torch.equal(stayed.dense, batch.dense)
    assert lists(stayed, "history") == lists(batch, "history")


@pytest.mark.parametrize("method", ["record_stream", "pin_memory"])
def test_all_parts_are_pinned_and_kept(features: Features, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    batch = click_batch(features)
    parts = {name: Mock(return_value=part) for name, part in vars(batch).items()}
    for name, reached in parts.items():
        monkeypatch.setattr(getattr(batch, name), method, reached)
    if method == "pin_memory":
        assert batch.pin_memory() is not batch
    else:
        batch.record_stream(torch.Stream(device="cpu"))
    for reached in parts.values():
        reached.assert_called_once()


TYPES = [ValueType.INT8_TBE, ValueType.INT4_TBE]


def model(*, managed: bool, dim: int = 8) -> ClickModel:
    torch.manual_seed(0)
    return ClickModel(
        ModelOptions(users=40, items=32, cross_buckets=10, dim=dim, hidden=4, managed=managed)
    ).eval()


@pytest.mark.parametrize("value_type", TYPES)
@pytest.mark.parametrize("managed", [False, True])
def test_rows_of_tables_are_scale_and_bias_and_then_the_codes(value_type: ValueType, managed: bool) -> None:
    plain = {
        name.split(".")[-2]: each.detach().numpy().copy()
        for name, each in model(managed=managed).named_parameters()
        if "embedding_bags" in name
    }
    found = served_rows(quantised(model(managed=managed), value_type))
    for name, rows in plain.items():
        # Of no table a row is zeros, which would not be encoded as TorchRec does.
        encoded = value_type.encode(rows)
        assert np.array_equal(found[name], encoded)


def test_one_bit_of_a_quantised_table_is_told() -> None:
    ours, theirs = (quantised(model(managed=True), ValueType.INT8_TBE) for _ in range(2))
    assert unequal_rows(served_rows(ours), served_rows(theirs)) == {}
    theirs.get_buffer("managed._embedding_module.embedding_bags.user.weight")[3, 5] ^= 1
    assert unequal_rows(served_rows(ours), served_rows(theirs)) == {"user": 1}


def test_what_pads_a_row_is_not_served() -> None:
    ours, theirs = (quantised(model(managed=False), ValueType.INT8_TBE) for _ in range(2))
    theirs.get_buffer("sparse.embedding_bags.user.weight")[3, 12] ^= 1  # 4 + 8 bytes of 16.
    assert unequal_rows(served_rows(ours), served_rows(theirs)) == {}


def test_parameters_outside_of_tables_are_served_too() -> None:
    served = quantised(model(managed=True), ValueType.INT8_TBE)
    names = {name for name, _ in served.named_parameters()}
    assert served_rows(served).keys() == {"user", "item", "cross", "hour"} | names
    assert "top.0.weight" in names

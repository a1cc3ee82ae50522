"""What a model with quantised tables serves from, bit by bit."""

import numpy as np
import pytest
import torch

from deltasync.client import ValueType
from deltasync.trainer.clicks.model import ClickModel
from deltasync.trainer.clicks.model_options import ModelOptions
from deltasync.trainer.demo.compare import unequal_rows
from deltasync.trainer.demo.quantised import quantised, served_rows, tbe_rows

pytestmark = pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")

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
    found = tbe_rows(quantised(model(managed=managed), value_type))
    assert found.keys() == plain.keys()
    for name, rows in plain.items():
        # Of no table a row is zeros, which would not be encoded as TorchRec does.
        encoded = value_type.encode(rows)
        assert np.array_equal(found[name], np.hstack([encoded[:, -4:], encoded[:, :-4]]))


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

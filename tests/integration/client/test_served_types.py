"""Predictors whose tables are not as the trainer's, over a real service: quantised, or of half precision."""

import numpy as np
import pytest
import torch
from tests.support.fleet import Trainer, admin_of, follow, wait_until_in_sync
from tests.support.quantised_model import TYPES, Model, outputs, quantised, tbe_bytes
from tests.support.server import RunningService
from torch import nn

from deltasync.client import Policy, TableKind, TableSpec
from deltasync.client.torch_target import TorchTarget
from deltasync.core.value_types import ValueType

HALVES = {ValueType.FP16: torch.float16, ValueType.BF16: torch.bfloat16}
TABLES = [
    *(
        TableSpec(f"sparse.embedding_bags.{name}", rows, 16)
        for name, rows in (("user", 5), ("item", 9), ("shop", 3))
    ),
    TableSpec("over.weight", 1, 2, kind=TableKind.PARAMETER),
    TableSpec("over.bias", 1, 1, kind=TableKind.PARAMETER),
]

pytestmark = [
    pytest.mark.usefixtures("watchful"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
]
POLICIES: dict[str, Policy] = {}


def as_trained(trainer: Trainer) -> Model:
    """A model with the trainer's rows."""
    model = Model()
    state = model.state_dict()
    for table in TABLES:
        name = table.name if table.kind is TableKind.PARAMETER else f"{table.name}.weight"
        state[name].copy_(torch.from_numpy(trainer.rows[table.name]).view(state[name].shape))
    return model


@pytest.mark.parametrize("value_type", HALVES)
def test_a_predictor_of_half_precision_is_in_sync(service: RunningService, value_type: ValueType) -> None:
    admin_of(service).create_consumer("halves", "clicks", Policy(value_type=value_type))
    model = Model().to(HALVES[value_type])
    with Trainer(service.grpc, TABLES) as trainer, follow(service, "halves", "a", TorchTarget(model)):
        for publish in (trainer.publish_all, lambda: trainer.change(3), lambda: trainer.delete(TABLES[1], [2, 4])):
            wait_until_in_sync(service, "halves", publish())
            expected = as_trained(trainer).to(HALVES[value_type]).state_dict()
            for name, tensor in model.state_dict().items():
                assert torch.equal(tensor, expected[name])


@pytest.mark.parametrize("bits", TYPES)
def test_a_quantised_predictor_is_in_sync_with_the_model_quantised_anew(
    service: RunningService, bits: int
) -> None:
    value_type, _ = TYPES[bits]
    admin_of(service).create_consumer("quantised", "clicks", Policy(value_type=value_type))
    module = quantised(Model(), bits)
    target = TorchTarget(module)
    with Trainer(service.grpc, TABLES) as trainer, follow(service, "quantised", "a", target):
        for publish in (trainer.publish_all, lambda: trainer.change(3), lambda: trainer.delete(TABLES[1], [2, 4])):
            wait_until_in_sync(service, "quantised", publish())
            fresh = quantised(as_trained(trainer), bits)
            assert tbe_bytes(module) == tbe_bytes(fresh)
            assert all(torch.equal(found, outputs(fresh)[name]) for name, found in outputs(module).items())
            assert torch.equal(module.get_parameter("over.weight"), fresh.get_parameter("over.weight"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_dense_part_of_a_quantised_predictor_may_be_of_half_precision(
    service: RunningService, dtype: torch.dtype
) -> None:
    admin_of(service).create_consumer("quantised", "clicks", Policy(value_type=ValueType.INT8_TBE))
    module = quantised(Model()).to(dtype)
    with Trainer(service.grpc, TABLES) as trainer, follow(service, "quantised", "a", TorchTarget(module)):
        wait_until_in_sync(service, "quantised", trainer.publish_all())
        wait_until_in_sync(service, "quantised", trainer.change(3))
        expected = as_trained(trainer).over.to(dtype)
    over = module.get_submodule("over")
    assert isinstance(over, nn.Linear)
    assert torch.equal(over.weight, expected.weight)
    assert np.array_equal(tbe_bytes(module)["user"], tbe_bytes(quantised(as_trained(trainer)))["user"])

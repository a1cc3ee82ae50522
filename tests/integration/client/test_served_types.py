"""Predictors whose tables are not as the trainer's, over a real service: quantised, or of half precision."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.fleet import Trainer, admin_of, follow, wait_until_in_sync
from tests.support.quantised_model import Model, outputs, quantised, tbe_bytes, tbes_of
from tests.support.server import RunningService
from torch import nn

from deltasync.client import Policy, TableKind, TableSpec
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.core.value_types import ValueType

TABLES = [
    *(
        TableSpec(f"sparse.embedding_bags.{name}", rows, 16)
        for name, rows in (("user", 5), ("item", 9), ("shop", 3))
    ),
    TableSpec("over.weight", 1, 2, kind=TableKind.PARAMETER),
    TableSpec("over.bias", 1, 1, kind=TableKind.PARAMETER),
]

pytestmark = pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
POLICIES: dict[str, Policy] = {}
# Idle streams look for changes often.
OPTIONS: dict[str, Any] = {"progress_seconds": 0.02}


def as_trained(trainer: Trainer) -> Model:
    """A model with the trainer's rows."""
    model = Model()
    state = model.state_dict()
    for table in TABLES:
        name = table.name if table.kind is TableKind.PARAMETER else f"{table.name}.weight"
        state[name].copy_(torch.from_numpy(trainer.rows[table.name]).view(state[name].shape))
    return model


def half(dtype: torch.dtype) -> Callable[[Model], nn.Module]:
    return lambda model: model.to(dtype)


def of_bits(bits: int, dense: torch.dtype = torch.float32) -> Callable[[Model], nn.Module]:
    return lambda model: quantised(model, bits).to(dense)


def contents(module: nn.Module) -> dict[str, Any]:
    """What a predictor holds, and what it gives where its tables are quantised."""
    if not tbes_of(module):
        return {name: tensor.tolist() for name, tensor in module.state_dict().items()}
    over = {name: module.get_parameter(f"over.{name}").tolist() for name in ("weight", "bias")}
    given = {name: tensor.tolist() for name, tensor in outputs(module).items()}
    return {**over, **tbe_bytes(module), "outputs": given}


@pytest.mark.parametrize(
    ("value_type", "served"),
    [
        (ValueType.BF16, half(torch.bfloat16)),
        (ValueType.INT4_TBE, of_bits(4)),
        (ValueType.INT8_TBE, of_bits(8, torch.float16)),
    ],
    ids=["bf16", "int4", "int8 and fp16"],
)
def test_a_predictor_holds_what_converting_the_trainers_model_gives(
    service: RunningService, value_type: ValueType, served: Callable[[Model], nn.Module]
) -> None:
    admin_of(service).create_consumer("converted", "clicks", Policy(value_type=value_type))
    module = served(Model())
    with Trainer(service.grpc, TABLES) as trainer, follow(service, "converted", "a", TorchTarget(module)):
        for publish in (trainer.publish_all, lambda: trainer.change(3), lambda: trainer.delete(TABLES[1], [2, 4])):
            wait_until_in_sync(service, "converted", publish())
            assert contents(module) == contents(served(as_trained(trainer)))

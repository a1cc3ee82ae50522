"""Predictors of half precision whose trainer's tables are fp32, and the reverse."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from tests.support.targets import read_rows
from torch import nn

from deltasync.base.errors import Contradiction
from deltasync.client import Position, Release, RowBatch, TableKind, TableSpec
from deltasync.client.targets.checksums import TargetChecksums
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.core.digests import checksum_of
from deltasync.core.rows import Ids, Values
from deltasync.core.table_form import Mode, TableForm
from deltasync.core.value_types import ValueType

HALVES = {ValueType.FP16: torch.float16, ValueType.BF16: torch.bfloat16}
ROWS, DIM = 6, 4


class Model(nn.Module):
    """An embedding table, and what goes with it."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(ROWS, DIM)
        self.over = nn.Linear(DIM, 2)
        self.level: torch.Tensor
        self.register_buffer("level", torch.tensor([1 / 3, -torch.inf, torch.nan, 1e9, 1e-9, -0.0]))
        self.register_buffer("count", torch.tensor(2**40 + 1))
        self.register_buffer("wide", torch.tensor([1 / 3], dtype=torch.float64))


KINDS = {
    "user": TableKind.EMBEDDING,
    "over.weight": TableKind.PARAMETER,
    "over.bias": TableKind.PARAMETER,
    "level": TableKind.BUFFER,
    "count": TableKind.BUFFER,
    "wide": TableKind.BUFFER,
}


def rows_of(model: Model, value_type: ValueType | None) -> dict[str, tuple[TableSpec, Values]]:
    """What replicas hold of a model, by table."""
    held = {}
    for name, kind in KINDS.items():
        tensor = model.state_dict()[f"{name}.weight" if kind is TableKind.EMBEDDING else name]
        rows = tensor.reshape(1, -1).numpy() if tensor.dim() < 2 else tensor.numpy()
        spec = TableSpec(name, rows.shape[0], rows.shape[1], rows.dtype, kind)
        embedding = kind is TableKind.EMBEDDING and value_type
        form = TableForm(spec, value_type, Mode.EMBEDDINGS) if embedding else TableForm.unchanged(spec)
        held[name] = form.replica_spec, form.held(form.encode(rows))
    return held


def release_of(
    number: int, rows: dict[str, tuple[TableSpec, Values]], ids: dict[str, Ids] | None = None
) -> Release:
    """Some rows, or all in a first release."""
    changed = {name: np.arange(len(values)) for name, (_, values) in rows.items()} if ids is None else ids
    batches = [RowBatch.of_table(rows[name][0], each, rows[name][1][each]) for name, each in changed.items()]
    return Release(Position("h", number), number, 0, ids is None, [table for table, _ in rows.values()], batches)


def proven(target: TorchTarget, release: Release, held: TargetChecksums) -> dict[str, int]:
    target.apply(release)
    return held.after(release)


def checksums(rows: dict[str, tuple[TableSpec, Values]]) -> dict[str, int]:
    return {name: checksum_of(np.arange(len(values)), values) for name, (_, values) in rows.items()}


@pytest.mark.parametrize("value_type", HALVES)
def test_a_half_precision_model_equals_the_converted_model(value_type: ValueType) -> None:
    trainer, model = Model(), Model().to(HALVES[value_type])
    target = TorchTarget(model)
    held = TargetChecksums(target)
    rows = rows_of(trainer, value_type)
    assert proven(target, release_of(1, rows), held) == checksums(rows)
    with torch.no_grad():
        trainer.user.weight[2] = torch.tensor([1 / 7, 0, -1e-8, 60000])
        trainer.over.weight[1] = 1 / 9
        trainer.level[0] = 2 / 3
    rows = rows_of(trainer, value_type)
    changed = {"user": np.array([2]), "over.weight": np.array([1]), "level": np.array([0])}
    assert proven(target, release_of(2, rows, changed), held) == checksums(rows)
    expected = copy.deepcopy(trainer).to(HALVES[value_type]).state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(bits(tensor), bits(expected[name])), name


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """NaNs are one another's equal here."""
    return torch.nan_to_num(tensor, 12.5, torch.inf, -torch.inf)


@pytest.mark.parametrize("value_type", HALVES)
def test_a_change_in_a_half_precision_model_changes_the_checksum(value_type: ValueType) -> None:
    model = Model().to(HALVES[value_type])
    target, rows = TorchTarget(model), rows_of(Model(), value_type)
    right = proven(target, release_of(1, rows), TargetChecksums(target))
    for name, tensor in model.state_dict().items():
        integers = tensor.view(torch.int16 if tensor.itemsize == 2 else torch.int64).flatten()
        integers[0] ^= 1
        held = TargetChecksums(target)
        assert found(held, rows) == {name.removesuffix(".weight") if name == "user.weight" else name}
        integers[0] ^= 1
    assert found(TargetChecksums(target), rows) == set()
    assert right == checksums(rows)


def found(held: TargetChecksums, rows: dict[str, tuple[TableSpec, Values]]) -> set[str]:
    """Names of the tables that are not held as they were sent."""
    shown, right = held.after(release_of(2, rows, {})), checksums(rows)
    return {name for name in right if shown[name] != right[name]}


def test_another_target_over_the_same_model_knows_what_was_rounded() -> None:
    model, rows = Model().half(), rows_of(Model(), ValueType.FP16)
    TorchTarget(model).apply(release_of(1, rows))
    for each in (model, copy.deepcopy(model)):
        assert found(TargetChecksums(TorchTarget(each)), rows) == set()


@pytest.mark.parametrize(
    ("dtype", "sent", "advised"),
    [
        (torch.float16, ValueType.FP32, "fp16"),
        (torch.bfloat16, ValueType.FP32, "bf16"),
        (torch.float16, ValueType.BF16, "fp16"),
        (torch.bfloat16, ValueType.FP16, "bf16"),
        (torch.float16, ValueType.INT8, "fp16"),
    ],
)
def test_rounding_that_no_policy_asks_for_is_refused(dtype: torch.dtype, sent: ValueType, advised: str) -> None:
    model = Model().to(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(Contradiction) as refused:
        TorchTarget(model).apply(release_of(1, rows_of(Model(), sent)))
    for name in ("user", "over.weight", "level"):
        has = f"the module has {name}{'.weight' * (name == 'user')} of shape"
        assert f"table {name!r} is" in str(refused.value)
        assert has in str(refused.value)
    assert f"type {dtype}: set value_type {advised} in the consumer's policy" in str(refused.value)
    assert all(torch.equal(bits(tensor), bits(before[name])) for name, tensor in model.state_dict().items())


def test_of_another_shape_no_value_type_is_advised() -> None:
    model, rows = Model().half(), rows_of(Model(), ValueType.FP16)
    model.user = nn.Embedding(ROWS, DIM // 2).half()
    with pytest.raises(Contradiction, match=r"shape \[6, 2\] and type torch.float16\. Nothing was written"):
        TorchTarget(model).apply(release_of(1, rows))


def test_what_goes_with_tables_for_a_tbe_may_be_rounded() -> None:
    model, trainer = nn.Sequential(nn.Linear(3, 1)).half(), nn.Linear(3, 1)
    bias = TableSpec("0.bias", 1, 1, kind=TableKind.PARAMETER)
    left_out = TableForm(TableSpec("user", 4, 8), ValueType.INT8_TBE, Mode.EMBEDDINGS).replica_spec
    value = trainer.bias.detach().numpy()[None]
    release = Release(
        Position("h", 1), 1, 0, True, [bias, left_out], [RowBatch.of_table(bias, np.array([0]), value)]
    )
    target = TorchTarget(model, leave_out=["user"])
    target.apply(release)
    held = read_rows(target, bias, np.array([0]))
    assert held.tobytes() == value.tobytes()
    assert model.get_parameter("0.bias").item() == trainer.bias.half().item()


@given(hnp.arrays(np.uint16, (ROWS, DIM)))
def test_an_fp16_table_in_a_wider_tensor_is_held_to_the_last_bit(bits: NDArray[np.uint16]) -> None:
    model: Any = nn.ModuleDict({"user": nn.Embedding(ROWS, DIM)})
    table = TableSpec("user", ROWS, DIM, np.dtype("<f2"))
    rows = bits.view(np.float16)
    rows[np.isnan(rows)] = 0
    target = TorchTarget(model)
    target.apply(release_of(1, {"user": (table, rows)}))
    assert model["user"].weight.detach().numpy().tobytes() == rows.astype(np.float32).tobytes()
    held = read_rows(target, table, np.arange(ROWS))
    assert held.tobytes() == rows.tobytes()
    model["user"].weight.data.view(torch.int32)[3, 1] ^= 1
    held = read_rows(target, table, np.arange(ROWS))
    assert np.argwhere(held.view(np.int16) != rows.view(np.int16)).tolist() == [[3, 1]]

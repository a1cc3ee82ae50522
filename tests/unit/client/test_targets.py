import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.targets import read_rows
from torch import nn

from deltasync.base.errors import Contradiction, InvalidInput
from deltasync.client import CallbackTarget, NumpyTarget, Position, Release, RowBatch, TableSpec
from deltasync.client.targets.keyed_target import KeyedTarget
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.core.table_form import Mode, TableForm
from deltasync.core.value_types import ValueType
from deltasync.wire.messages import table_from_message, table_to_message

USER = TableSpec("sparse.embedding_bags.user", 5, 2)
HALF = TableSpec("sparse.embedding_bags.small", 4, 3, np.dtype("<f2"))


def release_of(version: int, *rows: tuple[TableSpec, list[int], float], resync: bool = False) -> Release:
    changed = [
        RowBatch.of_table(table, np.array(ids), np.full((len(ids), table.dim), value, table.dtype))
        for table, ids, value in rows
    ]
    for each in changed:
        each.ids.setflags(write=False)
        each.values.setflags(write=False)
    return Release(Position("h", version), version, 0, resync, [USER, HALF], changed)


class Bags(nn.Module):
    def __init__(self, half: torch.dtype = torch.float16, rows: int = 5) -> None:
        super().__init__()
        self.user = nn.EmbeddingBag(rows, 2)
        self.small = nn.EmbeddingBag(4, 3, dtype=half)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sparse = nn.ModuleDict({"embedding_bags": Bags()})


def rows_of(target: NumpyTarget | TorchTarget) -> list[list[float]]:
    if isinstance(target, NumpyTarget):
        with target.reading() as reading:
            return [reading.tables[USER.name][:, 0].tolist(), reading.tables[HALF.name][:, 0].tolist()]
    with target.reading() as reading:
        return [p[:, 0].tolist() for p in reading.module.parameters()]


@pytest.mark.parametrize(
    "target", [NumpyTarget(), TorchTarget(Bags()), TorchTarget(Nested())], ids=["numpy", "bag", "model"]
)
def test_rows_are_written_and_reset(target: NumpyTarget | TorchTarget) -> None:
    target.apply(release_of(1, (USER, [1, 3], 2.0), (HALF, [0], 3.0), resync=True))
    assert rows_of(target) == [[0, 2, 0, 2, 0], [3, 0, 0, 0]]
    target.apply(release_of(2, (USER, [3], 4.0), (USER, [4], 5.0)))
    assert rows_of(target) == [[0, 2, 0, 4, 5], [3, 0, 0, 0]]
    target.apply(release_of(3, (HALF, [3], 1.0), resync=True))
    assert rows_of(target) == [[0, 0, 0, 0, 0], [0, 0, 0, 1]]
    whole = release_of(4, (USER, [4], 5.0), (HALF, [1], 1.0))
    target.apply(dataclasses.replace(whole, whole=frozenset({HALF.name})))
    assert rows_of(target) == [[0, 0, 0, 0, 5], [0, 1, 0, 0]]


def test_a_callback_is_given_the_release() -> None:
    seen: list[Release] = []
    release = release_of(1, (USER, [0], 1.0))
    CallbackTarget(seen.append).apply(release)
    assert seen == [release]


@pytest.mark.parametrize("target", [NumpyTarget(), TorchTarget(Bags())], ids=["numpy", "torch"])
def test_ids_without_values_are_refused(target: NumpyTarget | TorchTarget) -> None:
    norms = RowBatch.of_table(USER, np.array([1]), np.empty((1, 0), "<f4"), np.ones(1, np.float32))
    release = dataclasses.replace(release_of(1, resync=True), rows=[norms])
    with pytest.raises(Contradiction, match="use a CallbackTarget"):
        target.apply(release)


@pytest.mark.parametrize("target", [NumpyTarget(), TorchTarget(Nested())], ids=["numpy", "torch"])
def test_rows_are_read_back_as_they_are(target: NumpyTarget | TorchTarget) -> None:
    target.apply(release_of(1, (USER, [1, 3], 2.0), (HALF, [0], 3.0), resync=True))
    user, half = target.read(USER, np.array([0, 3])), target.read(HALF, np.array([0]))
    assert user is not None
    assert half is not None
    assert (user.tolist(), user.dtype) == ([[0, 0], [2, 2]], np.dtype("<f4"))
    assert (half.tolist(), half.dtype) == ([[3, 3, 3]], np.dtype("<f2"))
    no_rows = read_rows(target, USER, np.empty(0, np.int64))
    assert no_rows.shape == (0, 2)
    assert target.read(TableSpec("other", 5, 2), np.array([0])) is None


def test_a_module_with_earlier_rows_can_be_read_before_any_release() -> None:
    module = Bags()
    TorchTarget(module).apply(release_of(1, (USER, [1], 2.0), resync=True))
    rows = TorchTarget(module).read(USER, np.array([0, 1]))
    assert rows is not None
    assert rows.tolist() == [[0, 0], [2, 2]]


@pytest.mark.parametrize("target", [NumpyTarget(), KeyedTarget()], ids=["numpy", "keyed"])
@pytest.mark.parametrize("value_type", [ValueType.INT8_TBE, ValueType.INT4_TBE])
def test_array_targets_refuse_rows_for_a_quantised_module(
    target: NumpyTarget | KeyedTarget, value_type: ValueType
) -> None:
    form = TableForm(TableSpec("user", 3, 8), value_type, Mode.EMBEDDINGS)
    rows = RowBatch.of_table(form.replica_spec, np.arange(3), form.encode(np.ones((3, 8), np.float32)))
    with pytest.raises(Contradiction, match=f"rows are sent as {value_type.value}, the bytes of a module"):
        target.apply(Release(Position("h", 1), 1, 0, True, [form.replica_spec], [rows], version=1))
    assert target.position == Position()


@pytest.mark.parametrize("dtype", [np.float16, "float16", "<f2", np.dtype(np.float16)])
def test_a_table_takes_every_name_of_its_type(dtype: Any) -> None:
    assert TableSpec("user", 5, 2, dtype).dtype == np.dtype("<f2")
    assert table_from_message(table_to_message(TableSpec("user", 5, 2, dtype))) == TableSpec("user", 5, 2, dtype)


@pytest.mark.parametrize("dtype", [None, "bfloat16", "half precision", np.float64, ">f4", torch.float16])
def test_a_table_refuses_other_types_at_once(dtype: Any) -> None:
    with pytest.raises(InvalidInput, match=r"table 'user': .*expected"):
        TableSpec("user", 5, 2, dtype)


FREEZES: dict[str, Callable[[], Any]] = {
    "a module compiled with it": lambda: compiled(freezing=True),
    "one that compiles itself with it": lambda: compiled_in_place(Bags()),
    "a part of a module": lambda: nn.ModuleDict({"in": compiled(freezing=True)}),
}


def compiled(*, freezing: bool) -> Any:
    return torch.compile(Bags(), options={"freezing": freezing})


def compiled_in_place(module: nn.Module) -> Any:
    module.compile(options={"freezing": True})
    return module


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("made", FREEZES.values(), ids=FREEZES.keys())
def test_a_module_whose_weights_the_compiler_freezes_is_refused(made: Callable[[], Any]) -> None:
    target = TorchTarget(made())
    with pytest.raises(Contradiction, match="is compiled with the option freezing: the compiler writes values"):
        target.apply(release_of(1, (USER, [1], 2.0), resync=True))


def test_no_module_is_served_while_freezing_is_on_for_all() -> None:
    target, release = TorchTarget(Bags()), release_of(1, (USER, [1], 2.0), resync=True)
    with (
        torch._inductor.config.patch(freezing=True),
        pytest.raises(Contradiction, match=r"torch._inductor.config.freezing is on: the compiler writes values"),
    ):
        target.apply(release)
    target.apply(release)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_a_module_compiled_without_freezing_is_written() -> None:
    target = TorchTarget(compiled(freezing=False))
    target.apply(release_of(1, (USER, [1], 2.0), resync=True))
    assert rows_of(target)[0] == [0, 2, 0, 0, 0]

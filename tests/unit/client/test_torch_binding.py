"""Every table has a place in the module, or is left out by name: nothing is dropped in silence."""

import dataclasses
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.targets import read_rows
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

from deltasync.base.errors import Contradiction, DeltasyncError, InvalidInput, NotFound
from deltasync.client import Position, Release, RowBatch, TableKind, TableSpec
from deltasync.client.targets.checksums import TargetChecksums
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.core.digests import checksum_of

USER = TableSpec("sparse.embedding_bags.user", 5, 8)
ITEM = TableSpec("sparse.embedding_bags.item", 4, 8)
TYPES = ["float32", "float16", "float64", "int64", "int32", "int16", "uint8", "bool"]


def table_of(name: str, tensor: torch.Tensor, kind: TableKind) -> TableSpec:
    """As the trainer shapes what is outside of tables: a matrix by its rows, a vector as one row."""
    rows, dim = (tensor.shape[0], tensor[0].numel()) if tensor.dim() > 1 else (1, tensor.numel())
    return TableSpec(name, rows, dim, tensor.numpy().dtype, kind)


def rows_of(table: TableSpec, values: Any) -> RowBatch:
    values = np.broadcast_to(np.asarray(values, table.dtype), (table.rows, table.dim))
    return RowBatch.of_table(table, np.arange(table.rows), values)


def release_of(
    number: int, *rows: RowBatch, tables: list[TableSpec] | None = None, resync: bool = False
) -> Release:
    tables = tables if tables is not None else [each.table for each in rows]
    return Release(Position("h", number), number, 0, resync, tables, list(rows))


class Model(nn.Module):
    def __init__(self, **buffers: torch.Tensor) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=name, embedding_dim=8, num_embeddings=rows, feature_names=[name])
            for name, rows in (("user", 5), ("item", 4))
        ]
        self.sparse = EmbeddingBagCollection(tables=configs)
        self.norm = nn.BatchNorm1d(3)
        for name, buffer in buffers.items():
            self.register_buffer(name, buffer)

    def state(self) -> dict[str, bytes]:
        return {name: tensor.numpy().tobytes() for name, tensor in self.state_dict().items()}


def whole_state(model: Model) -> list[TableSpec]:
    """The tables that a trainer of this model publishes."""
    parameters, buffers = dict(model.named_parameters()), dict(model.named_buffers())
    dense = [
        table_of(name, each.detach(), TableKind.PARAMETER) for name, each in parameters.items() if "norm" in name
    ]
    return [USER, ITEM, *dense, *(table_of(name, each, TableKind.BUFFER) for name, each in buffers.items())]


def test_a_table_without_a_place_is_refused_with_a_remedy() -> None:
    model = Model()
    before, target = model.state(), TorchTarget(model)
    more = [dataclasses.replace(USER, name=f"sparse.embedding_bags.{name}") for name in ("shop", "town")]
    with pytest.raises(NotFound) as refused:
        target.apply(release_of(1, *(rows_of(each, 2) for each in (USER, ITEM, *more)), resync=True))
    names = ", ".join(repr(table.name) for table in more)
    assert f"tables {names}: the module has no parameter or buffer of that name." in str(refused.value)
    assert all(str(refused.value).count(table.name) == 1 for table in more)
    assert "leave them out: TorchTarget(module, leave_out=[...])" in str(refused.value)
    assert USER.name not in str(refused.value)
    assert (model.state(), target.bound()) == (before, frozenset())


def test_an_error_about_many_tables_names_the_first_ones() -> None:
    more = [dataclasses.replace(USER, name=f"sparse.embedding_bags.shop{number:03}") for number in range(400)]
    other = [TableSpec(f"norm.weight{number:03}", 1, 2, kind=TableKind.PARAMETER) for number in range(400)]
    model = Model(**{f"norm_weight{number:03}": torch.zeros(3) for number in range(400)})
    shaped = [dataclasses.replace(each, name=each.name.replace(".", "_")) for each in other]
    with pytest.raises(Contradiction) as refused:
        TorchTarget(model).apply(release_of(1, *(rows_of(each, 2) for each in (*more, *shaped)), resync=True))
    said = str(refused.value)
    shops = ", ".join(repr(f"sparse.embedding_bags.shop{number:03}") for number in range(5))
    assert said.startswith(
        f"tables {shops} ... and 395 more: the module has no parameter or buffer of that name; "
    )
    assert "table 'norm_weight000' is" in said
    assert "and 396 other problems. Nothing was written" in said
    assert len(said) < 1500


class Wrapper(nn.Module):
    """A predictor's module that has the trainer's model inside."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.head = nn.Linear(3, 1)
        self.inner = inner


@pytest.mark.parametrize(
    ("module", "part"),
    [
        (lambda: Wrapper(Model()), "model.inner"),
        (lambda: Wrapper(Wrapper(Model())), "model.inner.inner"),
        (lambda: nn.Sequential(nn.Identity(), Model()), "model.get_submodule('1')"),
        (lambda: Wrapper(nn.Sequential(Model())), "model.get_submodule('inner.0')"),
        (lambda: Wrapper(torch.compile(Model(), backend="eager")), "model.inner"),
    ],
)
@pytest.mark.parametrize("outside", ["", "ranker."], ids=["as in the trainer", "wrapped in the trainer, too"])
def test_an_error_about_a_wrapper_names_the_part_to_pass(
    module: Callable[[], nn.Module], part: str, outside: str
) -> None:
    tables = [dataclasses.replace(table, name=outside + table.name) for table in whole_state(Model())]
    release = release_of(1, *(rows_of(each, 2) for each in tables), resync=True)
    with pytest.raises(NotFound) as refused:
        TorchTarget(model := module()).apply(release)
    assert f"Nothing was written: all tables have places in a part of the module: TorchTarget({part})" in str(
        refused.value
    )
    TorchTarget(eval(part, {"model": model})).apply(release)  # noqa: S307  # It is what a user would write.


def test_a_part_that_lacks_a_table_is_not_recommended() -> None:
    shop = dataclasses.replace(USER, name="sparse.embedding_bags.shop")
    release = release_of(1, *(rows_of(each, 2) for each in (USER, ITEM, shop)), resync=True)
    with pytest.raises(NotFound, match="use a module with places for them"):
        TorchTarget(Wrapper(Model())).apply(release)


def test_a_part_fits_without_what_is_left_out() -> None:
    shop = dataclasses.replace(USER, name="sparse.embedding_bags.shop")
    release = release_of(1, *(rows_of(each, 2) for each in (USER, ITEM, shop)), resync=True)
    with pytest.raises(NotFound, match=r"TorchTarget\(model.inner\)"):
        TorchTarget(Wrapper(Model()), leave_out=["*.shop"]).apply(release)


def test_tables_left_out_by_name_stay_unchanged() -> None:
    model = Model()
    before = model.state()
    target = TorchTarget(model, leave_out=["*.user", "*.shop"])
    shop = dataclasses.replace(USER, name="sparse.embedding_bags.shop")
    target.apply(release_of(1, rows_of(USER, 2), rows_of(ITEM, 3), rows_of(shop, 4), resync=True))
    changed = {name for name, state in model.state().items() if state != before[name]}
    assert changed == {"sparse.embedding_bags.item.weight"}
    assert target.bound() == {ITEM.name}
    assert target.read(USER, np.arange(5)) is None


def test_a_pattern_without_a_table_causes_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    TorchTarget(Model(), leave_out=["*.usre", "*.user"]).apply(release_of(1, rows_of(USER, 2), resync=True))
    assert [record.message for record in caplog.records if "leave_out" in record.message] == [
        "leave_out: no table matches *.usre"
    ]


def test_leave_out_refuses_a_string() -> None:
    with pytest.raises(InvalidInput, match="expected a list of patterns"):
        TorchTarget(Model(), leave_out="*.user")


@pytest.mark.parametrize(
    ("table", "has"),
    [
        (dataclasses.replace(USER, rows=8, dim=5), "user' is 8 x 5 torch.float32, the module has"),
        (
            TableSpec("small", 2, 3),
            "small' is 2 x 3 torch.float32, the module has small of shape [2, 3] and type torch.f",
        ),
        (TableSpec("norm.running_mean", 3, 1, kind=TableKind.BUFFER), "norm.running_mean of shape [3]"),
        (TableSpec("norm.num_batches_tracked", 1, 1, kind=TableKind.BUFFER), "of shape [] and type torch.int64"),
    ],
    ids=["transposed", "half", "column", "float count"],
)
def test_another_shape_or_type_is_an_error_that_names_both_sides(table: TableSpec, has: str) -> None:
    model = Model(small=torch.zeros(2, 3, dtype=torch.float16))
    before = model.state()
    with pytest.raises(Contradiction) as refused:
        TorchTarget(model).apply(release_of(1, rows_of(ITEM, 2), rows_of(table, 2), resync=True))
    assert has in str(refused.value)
    assert model.state() == before


def test_a_module_without_memory_of_its_own_is_an_error() -> None:
    with pytest.raises(Contradiction, match="on the meta device"):
        TorchTarget(Model().to("meta")).apply(release_of(1, rows_of(USER, 2), resync=True))
    strided = nn.ParameterDict({"user": nn.Parameter(torch.zeros(8, 5).t())})
    with pytest.raises(Contradiction, match="that is not contiguous"):
        TorchTarget(strided).apply(release_of(1, rows_of(USER, 2), resync=True))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (2, 3, 2)], ids=str)
def test_buffers_are_written_bit_by_bit(dtype: str, shape: tuple[int, ...]) -> None:
    model = Model(level=torch.zeros(shape, dtype=getattr(torch, dtype)))
    table = table_of("level", model.get_buffer("level"), TableKind.BUFFER)
    random = np.random.default_rng(len(shape))
    bits = random.integers(
        0, 2 if dtype == "bool" else 256, (table.rows, table.dim * table.dtype.itemsize), np.uint8
    )
    values = bits.view(table.dtype)
    target = TorchTarget(model)
    target.apply(release_of(1, rows_of(table, values), resync=True))
    assert model.get_buffer("level").numpy().tobytes() == values.tobytes()
    held = read_rows(target, table, np.arange(table.rows))
    assert (held.dtype, held.tobytes()) == (table.dtype, values.tobytes())


@given(st.data())
def test_all_of_a_models_state_follows(data: st.DataObject) -> None:
    """Against a plain dictionary: any rows of any tables in any order, whole tables, and reading back."""
    model = Model(count=torch.zeros((), dtype=torch.int64), mask=torch.zeros(2, 3, dtype=torch.bool))
    tables = whole_state(model)
    target = TorchTarget(model)
    held = TargetChecksums(target)
    expected = {table.name: np.zeros((table.rows, table.dim), table.dtype) for table in tables}
    for number in range(1, data.draw(st.integers(2, 5))):
        changed = []
        for table in data.draw(st.lists(st.sampled_from(tables), unique=True)):
            ids = np.array(sorted(data.draw(st.sets(st.integers(0, table.rows - 1), min_size=1))))
            values = np.full((len(ids), table.dim), data.draw(st.integers(0, 1)) or number, table.dtype)
            changed.append(RowBatch.of_table(table, ids, values))
        whole = frozenset(data.draw(st.sets(st.sampled_from([table.name for table in tables]))))
        release = dataclasses.replace(release_of(number, *changed, tables=tables, resync=number == 1), whole=whole)
        for table in tables:
            if release.resets(table):
                expected[table.name][:] = 0
        for each in changed:
            expected[each.table.name][each.ids] = each.values
        target.apply(release)
        assert held.after(release) == {
            name: checksum_of(np.arange(len(rows)), rows) for name, rows in expected.items()
        }
    for name, rows in expected.items():
        state = model.state_dict().get(name, model.state_dict().get(f"{name}.weight"))
        assert state is not None
        assert state.numpy().tobytes() == rows.tobytes()


@pytest.mark.parametrize("leave_out", [(), ("*.user", "norm.*")])
def test_no_warning_if_all_state_is_updated_or_left_out(
    leave_out: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    model = Model().eval()
    target = TorchTarget(model, leave_out=leave_out)
    target.apply(release_of(1, *(rows_of(table, 1) for table in whole_state(model)), resync=True))
    assert caplog.records == []


def test_training_mode_causes_a_warning_if_forwards_change_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Again with every repair: what something else has changed is often this."""
    model = Model()
    mean = TableSpec("norm.running_mean", 1, 3, kind=TableKind.BUFFER)
    target, said = TorchTarget(model), "in training mode, where a forward may change"
    release = release_of(1, rows_of(USER, 1), rows_of(mean, 1), resync=True)
    target.apply(release)
    assert f"{said} synchronised values: norm; call eval()" in caplog.text
    caplog.clear()
    target.apply(release_of(2, rows_of(mean, 2), tables=[USER, mean]))
    assert caplog.records == []
    target.apply(dataclasses.replace(release, resync=False, whole=frozenset({mean.name})))
    assert said in caplog.text
    caplog.clear()
    model.eval()
    target.apply(release)
    assert caplog.records == []


def test_state_without_a_table_causes_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    model.register_buffer("scratch", torch.zeros(2), persistent=False)
    tables = [table for table in whole_state(model) if table.kind is not TableKind.BUFFER]
    target = TorchTarget(model)
    target.apply(release_of(1, *(rows_of(table, 1) for table in tables), resync=True))
    target.apply(release_of(2, rows_of(USER, 2)))
    assert [record.message for record in caplog.records] == [
        "no table updates these parts of the module: norm.running_mean, norm.running_var, norm.num_batches_tracked"
    ]


def test_a_later_table_without_a_place_does_not_stop_the_others(caplog: pytest.LogCaptureFixture) -> None:
    target = TorchTarget(Model())
    target.apply(release_of(1, rows_of(USER, 1), rows_of(ITEM, 1), resync=True))
    caplog.clear()
    shop = dataclasses.replace(USER, name="sparse.embedding_bags.shop")
    grown = dataclasses.replace(ITEM, rows=9)
    held = TargetChecksums(target)
    for number in (2, 3):
        release = release_of(number, rows_of(USER, number), rows_of(grown, number), rows_of(shop, number))
        target.apply(release)
        assert held.after(release).keys() == {USER.name}
    assert target.bound() == {USER.name}
    assert set(target.tables()[USER.name].flatten().tolist()) == {3}
    assert (target.read(shop, np.arange(1)), target.read(grown, np.arange(1))) == (None, None)
    assert [record.levelno for record in caplog.records] == 2 * [logging.WARNING]
    assert f"not updated: table {grown.name!r} is 9 x 8" in caplog.text
    assert f"not updated: table {shop.name!r}: the module has no" in caplog.text


@pytest.mark.parametrize(
    ("first", "later"),
    [("norm.bias", "tower.norm.bias"), ("tower.norm.bias", "other.norm.bias")],
    ids=["exact", "the first"],
)
def test_a_later_table_does_not_take_an_occupied_place(
    first: str, later: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Both end alike: a model grew by a part that has a layer of the same name."""
    model, bias = Model(), TableSpec(first, 1, 3, kind=TableKind.PARAMETER)
    target, other = TorchTarget(model), dataclasses.replace(bias, name=later)
    target.apply(release_of(1, rows_of(bias, 1), resync=True))
    target.apply(release_of(2, rows_of(bias, 2), rows_of(other, 9)))
    assert target.bound() == {first}
    assert model.norm.bias.tolist() == [2, 2, 2]
    assert f"not updated: tables {first}, {later} all fit norm.bias" in caplog.text


def test_tables_that_fit_one_place_equally_are_refused() -> None:
    both = [TableSpec(f"{name}.norm.bias", 1, 3, kind=TableKind.PARAMETER) for name in ("tower", "other")]
    with pytest.raises(Contradiction, match=r"all fit norm\.bias"):
        TorchTarget(Model()).apply(release_of(1, *(rows_of(each, 1) for each in both), resync=True))


def test_a_module_that_was_made_in_inference_mode_is_written() -> None:
    with torch.inference_mode():
        model = Model()
    tables = whole_state(model)
    TorchTarget(model).apply(release_of(1, *(rows_of(table, 1) for table in tables), resync=True))
    assert {value for each in model.state_dict().values() for value in each.flatten().tolist()} == {1}


def test_autograd_notices_a_release() -> None:
    model = Model()
    weight = model.sparse.embedding_bags["user"].weight
    squared = (weight * weight).sum()
    TorchTarget(model).apply(release_of(1, rows_of(USER, 2)))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squared.backward()


def test_a_release_is_written_to_the_current_memory_of_a_module() -> None:
    model = Model()
    target = TorchTarget(model)
    target.apply(release_of(1, rows_of(USER, 1), resync=True))
    model.double()
    model.float()  # In other memory now.
    target.apply(release_of(2, rows_of(USER, 2)))
    assert model.sparse.embedding_bags["user"].weight.unique().tolist() == [2]
    held = read_rows(target, USER, np.arange(5))
    assert np.unique(held).tolist() == [2]


@pytest.mark.parametrize("later", [False, True], ids=["the same tables", "one more"])
def test_a_module_that_no_longer_fits_is_an_error(later: bool) -> None:
    model = Model()
    target = TorchTarget(model)
    target.apply(release_of(1, rows_of(USER, 1), resync=True))
    model.half()
    with pytest.raises(DeltasyncError, match=r"type torch\.float16"):
        target.apply(release_of(2, rows_of(USER, 2), tables=[USER, ITEM] if later else None))


@pytest.mark.parametrize("whole", [True, False], ids=["the model", "a part of it"])
def test_modules_wrapped_by_torch_compile_follow(whole: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).eval()
    tables = [table_of(name, each, TableKind.PARAMETER) for name, each in model.state_dict().items()]
    features = torch.ones(4, 3)
    compiled: Any = torch.compile(model if whole else model[0], backend="eager")
    if not whole:
        model[0] = compiled
    served = compiled if whole else model
    target = TorchTarget(served)
    for version in (1, 2):
        target.apply(release_of(version, *(rows_of(table, version) for table in tables), resync=version == 1))
        with target.reading() as reading, torch.inference_mode():
            hidden = 3 * version + version
            assert reading.module(features).tolist() == [[2 * hidden * version + version]] * 4
    assert target.bound() == {table.name for table in tables}
    assert not [each for each in caplog.records if each.name.startswith("deltasync")]

"""Quantised tables in place: a TBE's bytes are those of quantising the trainer's model anew."""

import copy
import dataclasses
import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.quantised_model import (
    SIZES,
    TYPES,
    Model,
    on_cpu,
    outputs,
    quantised,
    release_of,
    rows_of,
    sharded,
    tbe_bytes,
    tbes_of,
    whole,
    with_other_rows,
)
from tests.support.targets import read_rows
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.fx import symbolic_trace
from torchrec.inference.modules import quantize_embeddings, quantize_inference_model, set_pruning_data
from torchrec.modules.feature_processor_ import PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

from deltasync.base.errors import Contradiction
from deltasync.client import RowBatch, TableKind, TableSpec
from deltasync.client.targets.checksums import TargetChecksums
from deltasync.client.targets.target import Reads
from deltasync.client.targets.torch_binding import bind
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.core.digests import checksum_of
from deltasync.core.table_form import Mode, TableForm
from deltasync.core.value_types import ValueType

pytestmark = pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated", "ignore::DeprecationWarning")


@pytest.fixture
def among_cpus() -> Iterator[None]:
    with on_cpu():
        yield


def assert_like_fresh(module: nn.Module, model: Model, bits: int = 8, alignment: int = 16) -> None:
    fresh = quantised(model, bits, alignment)
    assert tbe_bytes(module) == tbe_bytes(fresh)
    assert_equal(outputs(module), outputs(fresh))


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert {name: each.tolist() for name, each in found.items()} == {
        name: each.tolist() for name, each in expected.items()
    }


ROWS = st.sampled_from([0.0, -0.0, 1.0, -1.0, 3e-6, 1e-30, 500.0]) | st.floats(-100, 100, width=32)


@st.composite
def changes(draw: st.DrawFn, dim: int) -> list[tuple[dict[str, dict[int, list[float]]], set[str]]]:
    """Releases: by table and row, its values, where all zeros are a delete; and what is sent whole."""
    row = st.lists(ROWS, min_size=dim, max_size=dim) | st.just([0.0] * dim) | st.just([2.5] * dim)
    tables = {name: st.dictionaries(st.integers(0, SIZES[name] - 1), row, max_size=4) for name in ("user", "item")}
    return draw(
        st.lists(st.tuples(st.fixed_dictionaries(tables), st.sets(st.sampled_from(["user", "item"]))), max_size=4)
    )


@given(
    st.sampled_from([8, 4]),
    st.sampled_from([4, 8, 12, 16, 60]),
    st.sampled_from([1, 16]),
    st.booleans(),
    st.data(),
)
def test_releases_give_the_bytes_and_outputs_of_quantising_anew(
    bits: int, dim: int, alignment: int, sequences: bool, data: st.DataObject
) -> None:
    model = Model(dim, sequences=sequences)
    module = quantised(model, bits, alignment)
    target, value_type = TorchTarget(module), TYPES[bits][0]
    target.apply(whole(model, value_type))
    for number, (tables, reset) in enumerate(data.draw(changes(dim)), 2):
        with torch.no_grad():
            for name in reset:
                model.table(name).zero_()
            for name, rows in tables.items():
                for row, values in rows.items():
                    model.table(name)[row] = torch.tensor(values)
        changed = {name: np.array(sorted(rows), np.int64) for name, rows in tables.items()}
        names = frozenset(rows_of(model, value_type)[name][0].name for name in reset)
        target.apply(release_of(number, model, changed, value_type, whole=names))
        assert_like_fresh(module, model, bits, alignment)


@pytest.mark.usefixtures("among_cpus")
def test_columns_that_were_quantised_apart_are_refused() -> None:
    module = sharded(quantised(Model()), "column_wise")
    with pytest.raises(Contradiction, match="so each piece is quantised separately"):
        TorchTarget(module).apply(whole(Model()))


@pytest.mark.parametrize("bits", [8, 4])
def test_scale_and_bias_are_put_where_the_tbe_wants_them(bits: int) -> None:
    """`reverse_qparam`: at the end. TorchRec makes no such TBEs, others do."""
    model, module = Model(), quantised(Model(), bits, alignment=1)
    for tbe in tbes_of(module):
        tbe.reverse_qparam = True
    TorchTarget(module).apply(whole(model, TYPES[bits][0]))
    user, fresh = tbe_bytes(module)["user"], tbe_bytes(quantised(model, bits, alignment=1))["user"]
    width = len(user) // SIZES["user"]
    rows, expected = (np.frombuffer(each, np.uint8).reshape(-1, width) for each in (user, fresh))
    assert np.array_equal(rows, np.roll(expected, -4, axis=1))


def test_what_happens_to_a_module_between_releases_does_no_harm() -> None:
    model = Model()
    module = quantised(with_other_rows(model))
    target = TorchTarget(module)
    target.apply(whole(model))
    module.load_state_dict(quantised(with_other_rows(model)).state_dict())
    target.apply(whole(model))
    assert_like_fresh(module, model)
    for tbe in tbes_of(module):  # As `to(...)` and others that give it other memory.
        tbe.weights_host = tbe.weights_host.clone()
    module.to("cpu").half()
    with torch.no_grad():
        model.table("item")[3] = 7
    target.apply(release_of(2, model, {"item": np.array([3])}, ValueType.INT8_TBE))
    assert_like_fresh(module, model)


def test_a_replaced_collection_is_refused() -> None:
    """Its memory would be written, and proven, while another one's is looked up."""
    model = Model()
    module: Any = quantised(model)
    target = TorchTarget(module)
    target.apply(whole(model))
    before, module.sparse = module.sparse, quantised(with_other_rows(model)).sparse
    table, _ = rows_of(model, ValueType.INT8_TBE)["user"]
    said = f"table '{table.name}': {table.name}.weight was replaced in the module"
    with pytest.raises(Contradiction, match=said):
        target.read(table, np.arange(5))
    with pytest.raises(Contradiction, match=said):
        target.apply(whole(model))
    module.sparse = before
    target.apply(whole(model))
    assert_like_fresh(module, model)


@pytest.mark.parametrize(("bits", "registered"), [(8, True), (4, False)])
def test_what_no_table_brings_is_warned_of(bits: int, registered: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    module = quantised(model, bits)
    if registered:
        module = quantize_inference_model(copy.deepcopy(model), quantization_dtype=TYPES[bits][1])
    with caplog.at_level(logging.WARNING):
        TorchTarget(module).apply(whole(model, TYPES[bits][0]))
    assert [record.message.rpartition(": ")[2] for record in caplog.records] == [
        "over.weight, over.bias, sparse.embedding_bags.shop.weight"
    ]


def test_what_a_tbe_holds_is_proven_and_damage_shows() -> None:
    model, module = Model(), quantised(Model())
    target = TorchTarget(module)
    held, release = TargetChecksums(target), whole(model)
    target.apply(release)
    right = {
        table.name: checksum_of(np.arange(table.rows), rows)
        for table, rows in rows_of(model, ValueType.INT8_TBE).values()
    }
    assert held.after(release) == right
    (tbe,) = tbes_of(module)
    for byte in (0, 3, 4, 19):
        row = tbe.split_embedding_weights_with_scale_bias(0)[0][0][2]
        row[byte] ^= 1
        looked = TargetChecksums(target)
        found = looked.after(dataclasses.replace(release, resync=False, rows=[]))
        assert {name for name in right if found[name] != right[name]} == {release.tables[0].name}
        row[byte] ^= 1


def refused(module: nn.Module, model: Model, value_type: ValueType = ValueType.INT8_TBE) -> str:
    """What is said of the tables of a model that a module does not hold, in which nothing changes."""
    before = tbe_bytes(module)
    with pytest.raises(Contradiction) as error:
        TorchTarget(module).apply(whole(model, value_type))
    assert tbe_bytes(module) == before
    said, _, _ = str(error.value).partition(". Nothing was written")
    return said


BOTH = "tables 'sparse.embedding_bags.user', 'sparse.embedding_bags.item':"


@pytest.mark.parametrize(
    ("bits", "sent", "name"),
    [
        (8, ValueType.FP32, "fp32"),
        (4, ValueType.FP16, "fp16"),
        (8, ValueType.INT8, "int8"),
        (8, ValueType.INT4_TBE, "int4-tbe"),
        (4, ValueType.INT8_TBE, "int8-tbe"),
    ],
)
def test_rows_of_another_type_are_refused(bits: int, sent: ValueType, name: str) -> None:
    said = f"the module's TBE has int{bits}: set value_type int{bits}-tbe in the consumer's policy"
    assert refused(quantised(Model(), bits), Model(), sent) == f"{BOTH} rows are sent as {name}, {said}"


def test_a_tbe_of_other_types_is_refused() -> None:
    module = quantize_embeddings(Model(), dtype=torch.float16, inplace=True)
    said = "rows are sent as int8-tbe, the module's TBE has fp16: quantise the module to int8 or int4"
    assert refused(module, Model()) == f"{BOTH} {said}"


def test_rows_for_a_tbe_are_refused_by_a_float_module() -> None:
    model = Model()
    said = refused(model, Model())
    assert (
        "'sparse.embedding_bags.user' is 5 x 16 int8-tbe, the module has sparse.embedding_bags.user.weight" in said
    )
    assert "torch.float32: quantise the module, or set another value_type in the consumer's policy" in said


def test_what_only_looks_quantised_is_refused() -> None:
    """The buffers of a collection without the collection: what they are, only the TBE could say."""
    module = quantised(Model()).get_submodule("sparse.embedding_bags")
    for value_type in (ValueType.INT8_TBE, ValueType.FP32):
        with pytest.raises(Contradiction, match="pass the whole collection to the target"):
            TorchTarget(module).apply(whole(Model(), value_type))


def test_another_dim_or_number_of_rows_is_refused() -> None:
    assert refused(quantised(Model(8)), Model()).startswith(
        "table 'sparse.embedding_bags.user' is 5 x 16, the module has rows 0 to 4 x 8 of "
        "sparse.embedding_bags.user.weight"
    )
    said = refused(quantised(Model(16), 4), Model(24), ValueType.INT4_TBE)
    assert "is 5 x 24, the module has rows 0 to 4 x 16" in said
    model = Model()
    set_pruning_data(model, {"user": 3})
    assert refused(quantised(model), Model()) == (
        "table 'sparse.embedding_bags.user' is 5 x 16, the module has rows 0 to 2 x 16 of "
        "sparse.embedding_bags.user.weight"
    )


def columns(tbe: Any) -> Any:
    """Every second column of a wider memory."""
    return lambda _: [(torch.zeros(rows, 64, dtype=torch.uint8)[:, ::2], None, None) for rows in SIZES.values()]


def cached(tbe: Any) -> Any:
    return [(*spec[:4], SimpleNamespace(name="MANAGED_CACHING")) for spec in tbe.embedding_specs]


@pytest.mark.parametrize(
    ("attribute", "value", "said"),
    [
        ("weight_initialized", lambda _: False, " has no memory yet: call its initialize_weights()"),
        ("scale_bias_size_in_bytes", lambda _: 8, " has 8 bytes of scale and bias in a row, expected 4"),
        ("embedding_specs", cached, " has rows in MANAGED_CACHING memory; expected HOST or DEVICE"),
        ("weights_host", lambda tbe: tbe.weights_host[:-200], ": its memory is shorter than its tables"),
        ("weights_physical_offsets", lambda _: [0, 32, 64], ": its tables overlap in memory"),
        (
            "split_embedding_weights_with_scale_bias",
            columns,
            " has rows as torch.uint8 [5, 32] with strides (64, 2); expected bytes [5, 32]: 20 aligned to 16",
        ),
        ("kv_embedding_cache", lambda _: object(), " has rows by key"),
        ("weights_host", lambda tbe: tbe.weights_host.to("meta"), " is on the meta device, which cannot be wri"),
        (None, None, " is pruned"),
    ],
)
def test_a_tbe_that_cannot_be_written_is_refused(attribute: str | None, value: Any, said: str) -> None:
    module = quantised(Model())
    (tbe,) = tbes_of(module)
    if attribute:
        setattr(tbe, attribute, value(tbe))
    else:
        tbe.set_index_remappings_array([torch.arange(rows, dtype=torch.int32) for rows in SIZES.values()])
    with pytest.raises(Contradiction) as error:
        TorchTarget(module).apply(whole(Model()))
    assert str(error.value).startswith("table")
    assert "'sparse.embedding_bags.user'" in str(error.value)
    assert f": TBE 0 of sparse{said}" in str(error.value)


def test_memory_that_is_lost_later_is_not_written() -> None:
    model, module = Model(), quantised(Model())
    target = TorchTarget(module)
    target.apply(whole(model))
    (tbe,) = tbes_of(module)
    before, tbe.weights_host = tbe.weights_host, tbe.weights_host[:-200]
    held = before.clone()
    with pytest.raises(Contradiction, match="its memory is shorter than its tables"):
        target.apply(release_of(2, with_other_rows(model), {"item": np.array([1])}, ValueType.INT8_TBE))
    assert torch.equal(before, held)


def test_rows_outside_of_a_table_are_not_written() -> None:
    """fbgemm's own operator writes them into a neighbour."""
    model, module = Model(), quantised(Model())
    target = TorchTarget(module)
    target.apply(whole(model))
    before, (table, rows) = tbe_bytes(module), rows_of(model, ValueType.INT8_TBE)["user"]
    for row in (-1, 5):
        outside = RowBatch.of_table(table, np.array([row]), rows[:1])
        release = dataclasses.replace(whole(model), resync=False, rows=[outside])
        with pytest.raises(Contradiction, match="for memory of 5 rows of 20 bytes: not written"):
            target.apply(release)
    assert tbe_bytes(module) == before


@pytest.mark.filterwarnings("ignore:.*TorchScript")
@pytest.mark.parametrize("bits", [8, 4])
def test_traced_and_scripted_modules_see_writes_to_their_original(bits: int) -> None:
    model = Model()
    module = quantised(with_other_rows(model), bits)
    compiled = torch.jit.script(symbolic_trace(module.get_submodule("sparse")))
    TorchTarget(module).apply(whole(model, TYPES[bits][0]))
    assert_equal(outputs(nn.ModuleDict({"sparse": compiled})), outputs(quantised(model, bits)))


@pytest.mark.usefixtures("among_cpus")
@pytest.mark.parametrize(
    ("sharding", "sequences", "bits", "reads"),
    [
        ("", False, 4, "copies"),
        ("table_wise", True, 4, "pause"),
        ("row_wise", False, 8, "pause"),
        ("row_wise", True, 4, "copies"),
    ],
)
def test_a_module_sharded_for_inference_follows_with_two_copies(
    sharding: str, sequences: bool, bits: int, reads: Reads
) -> None:
    model, value_type = Model(sequences=sequences), TYPES[bits][0]
    module = quantised(model, bits)
    module = sharded(module, sharding) if sharding else module
    shop, target = outputs(module)["shop"], TorchTarget(module, reads=reads)
    target.apply(whole(model, value_type))
    for number in (2, 3, 4):  # Of two copies one, the other one, the first again.
        with torch.no_grad():
            model.table("user")[[1, 2, 4]] *= -number
            model.table("item")[[4, 5]] = 0
        changed = {"user": np.array([1, 2, 4]), "item": np.array([4, 5, 8])}
        target.apply(release_of(number, model, changed, value_type))
        with target.reading() as reading:
            assert reading.position.number == number
            expected = outputs(quantised(model, bits)) | {"shop": shop}
            assert_equal(outputs(reading.module), expected)
            if not sharding:
                assert_like_fresh(reading.module, model, bits)
        for table, rows in rows_of(model, value_type).values():
            held = read_rows(target, table, np.arange(table.rows))
            assert np.array_equal(held, rows)


def test_what_goes_with_a_quantised_collection_finds_its_place() -> None:
    """TorchRec calls feature processors, and the tables that they are for, something else than in the trainer."""
    configs = [
        EmbeddingBagConfig(name=name, embedding_dim=16, num_embeddings=rows, feature_names=[name])
        for name, rows in SIZES.items()
    ]
    processed = FeatureProcessedEmbeddingBagCollection(
        EmbeddingBagCollection(tables=configs, is_weighted=True),
        PositionWeightedModuleCollection(dict.fromkeys(SIZES, 4)),
    )
    trained = nn.ModuleDict({"model": nn.ModuleDict({"sparse": processed})})
    tables = [
        TableForm(
            TableSpec(name.removesuffix(".weight"), *each.shape), ValueType.INT8_TBE, Mode.EMBEDDINGS
        ).replica_spec
        if each.dim() == 2
        else TableSpec(name, 1, len(each), kind=TableKind.PARAMETER)
        for name, each in trained.named_parameters()
    ]
    binding = bind(quantize_inference_model(trained), tables)
    assert (binding.problems, binding.stale) == ({}, [])
    assert sorted(place.name for place in binding.places.values()) == sorted(
        [
            *(f"model.sparse.embedding_bags.{name}.weight" for name in SIZES),
            *(f"model.sparse.feature_processor.position_weights.{name}" for name in SIZES),
        ]
    )

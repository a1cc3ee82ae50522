"""Managed collision in quantised models, whole and sharded for inference: rows and map of a version, as in the
trainer's model.
"""

import dataclasses
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples
from tests.support.quantised_model import TYPES, Shards, collision_sharders, on_cpu, quantised, sharded, tbe_bytes
from tests.support.targets import read_rows
from tests.unit.client.test_torch_collision import (
    DIM,
    FREE,
    LARGEST,
    MAP,
    MODULE,
    RANGES,
    ROWS,
    USER,
    as_sequences,
    embeddings_of,
    hashed_to,
    hashing,
    model_of,
    ranges_of,
    release_of,
    rows_for,
    sorting,
)
from torch import nn
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection

from deltasync.base.errors import Contradiction
from deltasync.client import Release, RowBatch
from deltasync.client.targets.checksums import TargetChecksums
from deltasync.client.targets.target import Reads
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.core.digests import checksum_of
from deltasync.core.table_form import Mode, TableForm
from deltasync.core.value_types import ValueType

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:torch.ao.quantization is deprecated", "ignore:To copy construct from a tensor"
    ),
    pytest.mark.usefixtures("among_cpus"),
]


@pytest.fixture(scope="module")
def among_cpus() -> Iterator[None]:
    with on_cpu():
        yield


def shards_of(model: nn.Module, ranks: int, bits: int = 8, shards: Shards | None = None) -> nn.Module:
    """A copy of a model, quantised and sharded by row."""
    return sharded(quantised(model, bits), "row_wise", collision_sharders(), ranks, shards).eval()


each_form = pytest.mark.parametrize(
    "form", [quantised, lambda model: shards_of(model, 2)], ids=["whole", "shards"]
)


def encoded(release: Release, value_type: ValueType = ValueType.INT8_TBE) -> Release:
    """The same with the embeddings as a service sends them to a consumer of quantised tables."""
    forms = {
        table.name: TableForm(table, value_type, Mode.EMBEDDINGS) for table in release.tables if table.kind.ranked
    }
    rows = [
        RowBatch.of_table(to.replica_spec, each.ids, to.held(to.encode(each.values)))
        if (to := forms.get(each.table.name))
        else each
        for each in release.rows
    ]
    tables = [forms[each.name].replica_spec if each.name in forms else each for each in release.tables]
    return dataclasses.replace(release, rows=rows, tables=tables)


@pytest.mark.parametrize(("hashes", "sequences", "bits"), [(False, False, 8), (True, False, 4), (False, True, 4)])
def test_ids_take_rows_and_values_of_the_model_quantised_anew(hashes: bool, sequences: bool, bits: int) -> None:
    model = model_of(hashing() if hashes else sorting(), sequences=sequences)
    module = quantised(model, bits)
    form = as_sequences if sequences else lambda release: release
    plain, target = TorchTarget(model), TorchTarget(module)
    first = {row: hashed_to(row) if hashes else 1000 - row for row in (3, 5, 11)}
    second = {row: hashed_to(row, first[row]) if hashes else 2000 - row for row in (3, 5)}
    ranges = {} if hashes else ranges_of(2, 4000)
    releases = [
        release_of(1, resync=True, ids=first, rows={3: 1.0, 5: -2.0, 11: 0.3}, ranges=ranges),
        release_of(2, ids=second, rows={3: 2.0, 5: 3.0}),
        release_of(3, ids={3: FREE}, rows={3: 0.0}),
    ]
    known = [*first.values(), *second.values(), 3999, 77, 123456]
    for release in map(form, releases):
        plain.apply(release)
        target.apply(encoded(release, TYPES[bits][0]))
        fresh = quantised(model, bits)
        assert tbe_bytes(module) == tbe_bytes(fresh)
        assert rows_for(module, *known) == rows_for(model, *known)
        assert embeddings_of(module, *known) == embeddings_of(fresh, *known)
    assert target.bound() == {table.name for table in form(releases[0]).tables}


def looked_up(model: Any, raw_ids: Sequence[int], lengths: Sequence[int] = ()) -> list[list[float]]:
    """What a forward gives for some raw ids of users, `lengths` of them per sample, or one."""
    features = KeyedJaggedTensor(
        keys=["user"],
        values=torch.tensor(raw_ids, dtype=torch.int64),
        lengths=torch.tensor(lengths or [1] * len(raw_ids), dtype=torch.int32),
    )
    found, _ = model["sparse"](features)
    values = found["user"] if not isinstance(found, dict) else found["user"].values()
    rows: list[list[float]] = values.tolist()
    return rows


@settings(max_examples=examples() // 2)
@given(
    st.booleans(),
    st.booleans(),
    st.sampled_from([8, 4]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([1, 2, 3]),
    st.booleans(),
    st.data(),
)
def test_a_sharded_model_equals_one_that_is_not_sharded(
    hashes: bool, sequences: bool, bits: int, ranks: int, trainers: int, early: bool, data: st.DataObject
) -> None:
    size = data.draw(st.sampled_from([30, 4000, LARGEST]))
    model = model_of(hashing() if hashes else sorting(input_hash_size=size), sequences=sequences)
    module = shards_of(model, ranks, bits)
    form = as_sequences if sequences else lambda release: release
    if early:  # What sends ids to the shards is made in the first forward.
        looked_up(module, [3])
    plain, target = TorchTarget(model), TorchTarget(module)
    held, by_row = TargetChecksums(target), dict[int, int]()
    some_ids = st.integers(-50, 50) | st.integers(-(2**62), LARGEST - 1)
    for number in range(1, data.draw(st.integers(2, 4))):
        changed = dict[int, int]()
        for row in data.draw(st.sets(st.integers(0, ROWS - 1))):
            raw = hashed_to(row, by_row.get(row, -1)) if hashes else data.draw(some_ids)
            free = data.draw(st.booleans()) or raw == FREE or raw in (by_row | changed).values()
            changed[row] = FREE if free else raw
        rows = data.draw(st.dictionaries(st.integers(0, ROWS - 1), st.floats(-100, 100, width=32)))
        ranges = ranges_of(trainers, size) if number == 1 and not hashes else {}
        release = form(release_of(number, resync=number == 1, ids=changed, rows=rows, ranges=ranges))
        plain.apply(release)
        quantised_release = encoded(release, TYPES[bits][0])
        target.apply(quantised_release)
        by_row = {row: raw for row, raw in (by_row | changed).items() if raw != FREE}
        column = np.array([[by_row.get(row, FREE) ^ FREE] for row in range(ROWS)])
        assert held.after(quantised_release)[MAP.name] == checksum_of(np.arange(ROWS), column)
        raw_ids = [*by_row.values(), *data.draw(st.lists(some_ids, min_size=4, max_size=9))]
        # A bag's sum of rows of several shards is rounded otherwise.
        lengths = [2, *[1] * (len(raw_ids) - 4), 0, 2] if sequences else [0, *[1] * len(raw_ids)]
        fresh = quantised(model, bits)
        assert looked_up(module, raw_ids, lengths) == looked_up(fresh, raw_ids, lengths)


def test_shards_of_different_sizes_are_sent_their_rows() -> None:
    model = model_of(sorting())
    module = shards_of(model, 2, shards=[(0, 0, 5, DIM), (5, 0, 7, DIM)])
    release = release_of(1, resync=True, ids={4: 9, 5: 10**6, 11: 7}, rows={row: row + 1 for row in range(ROWS)})
    TorchTarget(model).apply(release)
    TorchTarget(module).apply(encoded(release))
    raw_ids = [9, 10**6, 7, 1, LARGEST - 1]
    assert looked_up(module, raw_ids) == looked_up(quantised(model), raw_ids)


def test_ids_are_hashed_once() -> None:
    """TorchRec hashes them before it sends them, and in their shard again."""
    model = model_of(sorting(input_hash_size=1000, input_hash_func=lambda raw, size: (raw * 7 + 3) % size))
    module = shards_of(model, 2)
    release = release_of(1, resync=True, ids={4: 10, 8: 73}, rows={4: 1.0, 8: 2.0, 11: 3.0})
    TorchTarget(model).apply(release)
    TorchTarget(module).apply(encoded(release))
    assert looked_up(module, [1, 10, 2]) == looked_up(quantised(model), [1, 10, 2])
    assert looked_up(module, [1, 10, 2])[0][0] == 1


def test_several_tables_and_features_have_maps_of_their_own() -> None:
    configs = [
        EmbeddingConfig(name="user", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["user", "friend"]),
        EmbeddingConfig(name="item", embedding_dim=DIM, num_embeddings=ROWS, feature_names=["item"]),
    ]
    collisions = ManagedCollisionCollection({"user": sorting(), "item": sorting()}, configs)
    managed = ManagedCollisionEmbeddingCollection(
        EmbeddingCollection(tables=configs), collisions, return_remapped_features=True
    )
    model = nn.ModuleDict({"sparse": managed}).eval()
    module = shards_of(model, 2)
    user = as_sequences(release_of(1, resync=True, ids={3: 100, 7: 101}, rows={3: 1.0, 7: 2.0, 11: 3.0}))
    item = as_sequences(release_of(1, resync=True, ids={8: 100, 2: 102}, rows={8: 4.0, 2: 5.0, 11: 6.0}))
    release = dataclasses.replace(
        user, tables=[*user.tables, *map(of_item, item.tables)], rows=[*user.rows, *of_items(item)]
    )
    TorchTarget(model).apply(release)
    TorchTarget(module).apply(encoded(release))
    features = KeyedJaggedTensor(
        keys=["item", "friend", "user"],
        values=torch.tensor([100, 101, 102, 5, 101, 100, 5, 100]),
        lengths=torch.tensor([2, 1, 0, 3, 1, 1], dtype=torch.int32),
    )
    found, rows = module.get_submodule("sparse")(features)
    expected, expected_rows = quantised(model).get_submodule("sparse")(features)
    for name in ("item", "friend", "user"):
        assert found[name].values().tolist() == expected[name].values().tolist()
        assert rows[name].values().tolist() == expected_rows[name].values().tolist()


def of_item(table: Any) -> Any:
    of = table.of and table.of.replace(".user", ".item")
    return dataclasses.replace(table, name=table.name.replace(".user", ".item"), of=of)


def of_items(release: Release) -> list[Any]:
    return [type(each).of_table(of_item(each.table), each.ids, each.values) for each in release.rows]


@pytest.mark.parametrize("reads", ["copies"])
def test_what_outlived_its_process_is_read_and_gone_on_with(reads: Reads) -> None:
    model = model_of(sorting())
    module, plain = shards_of(model, 2), TorchTarget(model)
    first = release_of(1, resync=True, ids={3: 50, 8: 60}, rows={3: 1.0, 8: 2.0}, ranges=ranges_of(2, 100))
    TorchTarget(module).apply(encoded(first))
    target = TorchTarget(module, reads=reads)
    for table, row, expected in ((MAP, 8, [60 ^ FREE]), (RANGES, 5, [0, 50, 0])):
        rows = read_rows(target, table, np.array([row]))
        assert rows.tolist() == [expected]
    for number in (2, 3):
        release = release_of(number, resync=number == 2, ids={3: 70 + number}, rows={3: float(number)})
        target.apply(encoded(release))
        plain.apply(release)
        raw_ids = [50, 60, 72, 73, 99]
        with target.reading() as reading:
            assert looked_up(reading.module, raw_ids) == looked_up(quantised(model), raw_ids)


def warnings_in(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.message for record in caplog.records if record.name.startswith("deltasync")]


def test_the_collection_alone_is_followed_as_well() -> None:
    """Its shards' modules are of the table's name, too, and no maps that a table would have to bring."""
    model = model_of(sorting())
    module = shards_of(model, 2)
    release = release_of(1, resync=True, ids={3: 50, 8: 60}, rows={3: 1.0, 8: 2.0})
    TorchTarget(model).apply(release)
    TorchTarget(module.get_submodule("sparse")).apply(encoded(release))
    assert looked_up(module, [50, 60, 70]) == looked_up(quantised(model), [50, 60, 70])


def without_preparation(collection: Any) -> None:
    collection.need_preprocess = False


def dropping(collection: Any) -> None:
    collection._managed_collision_modules["user"]._disable_fallback = True


def training(collection: Any) -> None:
    collection.train()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_preparation, "so raw ids are not looked up: construct it with"),
        (dropping, "drops unknown ids .*, and its collection is sharded for inference: serve it unsharded"),
        (training, "is in training mode"),
    ],
)
def test_what_could_not_be_right_is_refused(change: Any, said: str) -> None:
    module = shards_of(model_of(hashing()), 2)
    change(module.get_submodule("sparse._managed_collision_collection"))
    before = looked_up(module.eval() if change is not training else module, [1])
    with pytest.raises(Contradiction, match=said):
        TorchTarget(module).apply(encoded(release_of(1, resync=True, tables=[USER, MAP]), ValueType.INT8_TBE))
    assert looked_up(module, [1]) == before


@each_form
def test_nothing_of_it_stays_as_it_is_nor_is_in_training(form: Any, caplog: pytest.LogCaptureFixture) -> None:
    module = form(model_of(sorting()))
    with caplog.at_level(logging.WARNING, "deltasync"):
        for number in (1, 2):
            TorchTarget(module).apply(encoded(release_of(number, resync=True)))
            looked_up(module, [1, 2])  # Which makes buffers of its own.
        assert warnings_in(caplog) == []
        target = TorchTarget(module)
        target.apply(encoded(release_of(1, resync=True)))
        module.train()
        target.apply(encoded(release_of(2, resync=True)))
    (said,) = warnings_in(caplog)
    assert said.endswith(f"synchronised values: {MODULE}; call eval()")

"""An exported version is put into a model of one process; see the integration tests for sharded ones."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.exports import rows_of, write_export
from tests.unit.trainer.tracking.test_id_maps import (
    POLICIES,
    RANGES,
    RAW_IDS,
    ROWS,
    fill,
    hashed_ids,
    lookups,
    model_of,
    sorted_ids,
)
from torch import nn
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mc_modules import LFU_EvictionPolicy, MCHEvictionPolicy

from deltasync.base.errors import InvalidInput
from deltasync.core.tables import TableSpec
from deltasync.trainer import load_export
from deltasync.trainer.sync import DeltaSync, SyncOptions


class Model(nn.Module):
    """Tables of both types, tied weights, and what else there is. More rows than are copied at once."""

    def __init__(self, rows: int = 9000, hidden: int = 6, dtype: DataType = DataType.FP16) -> None:
        super().__init__()
        self.bags = EmbeddingBagCollection(tables=[_bag("user", rows, DataType.FP32), _bag("item", 5, dtype)])
        self.words = nn.Embedding(7, 4)
        self.over = nn.Linear(4, 7, bias=False)
        self.over.weight = self.words.weight
        self.layers = nn.Sequential(nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.Conv1d(2, 3, 2))
        self.scale = nn.Parameter(torch.randn(()))


def _bag(name: str, rows: int, dtype: DataType) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name, num_embeddings=rows, embedding_dim=4, feature_names=[name], data_type=dtype
    )


def model(seed: int, **sizes: Any) -> Model:
    torch.manual_seed(seed)
    made = Model(**sizes)
    with torch.no_grad():
        for each in (*made.parameters(), *made.buffers()):
            each.copy_(torch.randn(each.shape) if each.is_floating_point() else torch.tensor(seed))
    return made


def bits(module: nn.Module) -> dict[str, bytes]:
    return {name: each.numpy().tobytes() for name, each in module.state_dict().items()}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_export(tmp_path / "version.safetensors", model(1))


def test_every_tensor_is_loaded_bit_by_bit(file: Path) -> None:
    loaded = model(2)
    state = load_export(loaded, file)
    assert bits(loaded) == bits(model(1))
    assert (state["history"], state["version"], state["seal"]) == ("history", 3, 2**63 + 5)
    assert loaded.over.weight is loaded.words.weight


def test_only_changes_since_then_are_due_after_a_load(file: Path) -> None:
    loaded = model(2)
    sync = DeltaSync(loaded, SyncOptions(service="localhost:1", model="clicks", publish_every=100))
    with torch.no_grad():
        loaded.words.weight[2] = 5
    sync.step()
    sync.load_state_dict([load_export(loaded, file)])
    assert sync.metrics()["version"] == 3
    assert sync.tracker.steps == 7
    assert not sync.tracker.get_delta_ids().ids
    with torch.no_grad():
        loaded.words.weight[4] = 5
        loaded.scale.fill_(3)
    sync.step()
    due = {name: ids.tolist() for name, ids in sync.tracker.get_delta_ids().ids.items()}
    assert due == {"words": [4], "scale": [0]}
    saved = sync.state_dict()
    assert (saved["version"], saved["event_time_unix_ns"], saved["tracker"]["steps"]) == (3, 99, 8)
    sync.abort()


def test_tables_that_are_left_out_stay(file: Path) -> None:
    loaded, before, after = model(2), bits(model(2)), bits(model(1))
    load_export(loaded, file, dense=False, fqns_to_skip=["user"])
    stay = {name for name in before if name == "scale" or name.startswith(("layers", "bags.embedding_bags.user"))}
    assert bits(loaded) == {name: before[name] if name in stay else after[name] for name in before}


def test_further_tables_of_the_file_are_not_missed(tmp_path: Path) -> None:
    loaded = model(2)
    load_export(loaded, write_export(tmp_path / "more", model(1), TableSpec("old", 3, 3)))
    assert bits(loaded) == bits(model(1))


def test_a_file_that_does_not_fit_names_all_tables_and_changes_nothing(file: Path) -> None:
    loaded = model(2, rows=9001, hidden=8, dtype=DataType.FP32)
    loaded.further = nn.Linear(2, 2)
    before = bits(loaded)
    with pytest.raises(InvalidInput) as error:
        load_export(loaded, file)
    text = str(error.value)
    assert text.startswith(f"version 3 of model 'clicks' in {file} does not fit this model: ")
    assert "it lacks further.bias, further.weight; " in text
    user, item = "bags.embedding_bags.user", "bags.embedding_bags.item"
    assert f"{user!r} is embedding [9000, 4] of float32 there, and embedding [9001, 4] of float32 in the" in text
    assert f"{item!r} is embedding [5, 4] of float16 there, and embedding [5, 4] of float32 in the model" in text
    assert "'layers.0.weight' is parameter [6, 4] of float32 there, and parameter [8, 4] of float32 in the" in text
    assert text.endswith("; nothing was loaded")
    assert bits(loaded) == before


def test_a_parameter_of_another_shape_but_as_many_values_is_refused(file: Path) -> None:
    loaded = model(2)
    loaded.layers[2] = nn.Conv1d(4, 3, 1)
    with pytest.raises(
        InvalidInput, match=re.escape("is parameter [3, 2, 2] of float32 there, and parameter [3, 4, 1]")
    ):
        load_export(loaded, file)


def test_what_is_no_export_is_refused(file: Path, tmp_path: Path) -> None:
    cut, other = tmp_path / "cut", tmp_path / "other"
    cut.write_bytes(file.read_bytes()[:-9])
    other.write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    newer = tmp_path / "newer"
    newer.write_bytes(file.read_bytes().replace(b'\\"format\\": 1', b'\\"format\\": 2'))
    messages = {
        cut: f"{cut} cannot be read: ",
        tmp_path / "none": f"{tmp_path / 'none'} cannot be read: ",
        tmp_path: f"{tmp_path} cannot be read: ",
        other: f"{other} is not an export: write one with `deltasync export`",
        newer: f"{newer} has format 2, this version reads 1: update deltasync",
    }
    for path, message in messages.items():
        with pytest.raises(InvalidInput, match=re.escape(message)):
            load_export(model(2), path)


@pytest.mark.parametrize("policy", POLICIES)
def test_raw_ids_have_their_rows_again_and_new_ones_take_free_rows(
    tmp_path: Path, policy: type[MCHEvictionPolicy]
) -> None:
    collisions = sorted_ids(policy)
    published: Any = model_of(collisions)
    rows = {40: 3, -7: 0, 10: 5}
    fill(collisions, rows)
    file = write_export(tmp_path / "version", published)
    loaded: Any = model_of(other := sorted_ids(policy))
    other.train()({"t": lookups([71, 72, 73, 74, 75, 76, 77])["t"]})  # It gives them rows, and reports none yet.
    state = load_export(loaded, file)
    assert other.evict() is None, "it would reset rows"
    assert rows_of(loaded)[RAW_IDS].tolist() == rows_of(published)[RAW_IDS].tolist()
    for each in (published, loaded):
        each.eval()
    asked = lookups([10, 40, -7, 71, 9])
    results = [each["collided"](asked)[0].values() for each in (published, loaded)]
    assert torch.equal(*results)
    tracked = state["tracker"]["tables"]
    assert {name for name, its in tracked.items() if its["stamps"].any()} == {RANGES}
    loaded.train()["collided"](lookups([21, 22, 23, 24]))
    known = dict(zip(other._mch_sorted_raw_ids.tolist(), other._mch_remapped_ids_mapping.tolist(), strict=True))
    assert {raw: known.get(raw) for raw in rows} == rows, "others were evicted although rows were free"
    assert sorted(known[raw] for raw in (21, 22, 23, 24)) == [1, 2, 4, 6]


def test_an_id_that_is_as_rare_as_loaded_ones_evicts_none(tmp_path: Path) -> None:
    collisions = sorted_ids(LFU_EvictionPolicy)
    rows = {10 * row: row for row in range(ROWS - 1)}
    fill(collisions, rows)
    file = write_export(tmp_path / "version", model_of(collisions))
    loaded: Any = model_of(other := sorted_ids(LFU_EvictionPolicy))
    load_export(loaded, file)
    loaded.train()["collided"](lookups([71]))
    assert other._mch_sorted_raw_ids.tolist()[: ROWS - 1] == list(rows)


def test_a_map_that_uses_the_row_for_unknown_ids_is_refused(tmp_path: Path) -> None:
    collisions = sorted_ids()
    fill(collisions, {40: 3, 10: ROWS - 1})
    file = write_export(tmp_path / "version", model_of(collisions))
    loaded = model_of(sorted_ids())
    before = bits(loaded)
    message = f"1 raw id of shard 0 of 1 would not be found there, such as 10 with row {ROWS - 1}: shard table"
    with pytest.raises(InvalidInput, match=message):
        load_export(loaded, file)
    assert bits(loaded) == before


def give_row(collisions: Any, raw: int) -> int:
    """Give an id the first row where a lookup looks."""
    row = int(collisions.eval().remap({"t": lookups([raw])["t"]})["t"].values())
    collisions._hash_zch_identities.data[row] = raw
    return row


def test_hashed_ids_have_their_rows_again(tmp_path: Path) -> None:
    collisions = hashed_ids()
    published = model_of(collisions)
    rows = {raw: give_row(collisions, raw) for raw in (12, 77)}
    file = write_export(tmp_path / "version", published)
    other = hashed_ids()
    other._hash_zch_identities.data[:] = 5
    load_export(model_of(other), file)
    assert torch.equal(other._hash_zch_identities, collisions._hash_zch_identities)
    found = other.eval().remap({"t": lookups(list(rows))["t"]})["t"].values().tolist()
    assert found == list(rows.values())


def test_hashed_ids_that_would_not_be_found_are_refused(tmp_path: Path) -> None:
    collisions = hashed_ids()
    row = give_row(collisions, 12)
    collisions._hash_zch_identities.data[(row + ROWS // 2) % ROWS] = 12
    collisions._hash_zch_identities.data[row] = -1
    file = write_export(tmp_path / "version", model_of(collisions))
    with pytest.raises(InvalidInput, match="1 raw id of shard 0 of 1 would not be found there, such as 12"):
        load_export(model_of(hashed_ids()), file)

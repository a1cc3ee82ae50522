"""What a click model holds beside its tables: maps of raw ids, counted evictions, buffers."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.modules.mc_modules import LRU_EvictionPolicy, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from deltasync.core.tables import FREE_ID
from deltasync.trainer.example.compare import (
    TrainerResults,
    gathered_model,
    id_maps,
    load_state,
    rows_of,
    save_state,
)
from deltasync.trainer.example.features import Featurizer
from deltasync.trainer.example.model import ClickModel, click_batch, outputs
from deltasync.trainer.example.options import RAW_IDS, ModelOptions
from deltasync.trainer.example.stream import RatingEvents

SMALL = ModelOptions(users=20, items=12, cross_buckets=10, dim=4, hidden=4, managed=True)


def shard(rows: int, first_row: int) -> torch.nn.ModuleDict:
    """A managed table of one id per step and rank, as the ranks have them: rows from `first_row` on."""
    module = MCHManagedCollisionModule(
        zch_size=rows,
        device=torch.device("cpu"),
        eviction_policy=LRU_EvictionPolicy(),
        eviction_interval=1,
        output_global_offset=first_row,
        output_segments=[first_row, first_row + rows],
    )
    return torch.nn.ModuleDict({"user": module})


def look_up(model: torch.nn.Module, ids: Sequence[int]) -> list[int]:
    """The rows of the ids."""
    jagged = JaggedTensor(torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64))
    found: torch.Tensor = model["user"]({"user": jagged})["user"].values()  # type: ignore[index]
    return found.tolist()


@given(st.lists(st.integers(0, 2**62), min_size=1, max_size=40), st.integers(0, 7))
def test_a_map_says_the_row_of_each_id_and_changed_hands_are_counted(ids: list[int], first_row: int) -> None:
    model = shard(5, first_row)
    count, owners, changed = TrainerResults(model), dict[int, int](), 0
    for raw in ids:
        look_up(model.train(), [raw])
        count.count_evictions()
        its = id_maps(model)["user"]
        assert (its.first_row, len(its.ids)) == (first_row, 5)
        now = {row: owner ^ FREE_ID for row, owner in enumerate(its.ids.tolist(), first_row) if owner}
        changed += sum(owners.get(row, owner) != owner for row, owner in now.items())
        owners = now
        assert np.count_nonzero(its.ids) == len(owners)
    assert look_up(model.eval(), list(owners.values())) == list(owners)
    assert count.evictions == changed


def test_rows_that_change_hands_do_occur() -> None:
    model = shard(5, 0)
    count = TrainerResults(model)
    for raw in range(7):  # Four rows for ids, one for those without.
        look_up(model, [raw])
        count.count_evictions()
    assert count.evictions == 3


def test_a_state_is_read_as_it_was_written(tmp_path: Path) -> None:
    model = ClickModel(SMALL)
    model.get_buffer("bottom.1.running_mean")[1] = 0.1
    save_state(model, tmp_path / "state.pt")
    maps, buffers = load_state(tmp_path / "state.pt")
    assert {name: (its.first_row, len(its.ids)) for name, its in maps.items()} == {"user": (0, 5), "item": (0, 3)}
    assert set(buffers) == {f"bottom.1.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    for name, values in buffers.items():
        np.testing.assert_array_equal(values, model.get_buffer(name).numpy().reshape(1, -1), strict=True)


def test_a_model_with_a_row_for_each_id_has_neither(tmp_path: Path) -> None:
    model = ClickModel(ModelOptions(users=5, items=5, cross_buckets=5, dim=4, hidden=4))
    save_state(model, tmp_path / "state.pt")
    assert load_state(tmp_path / "state.pt") == ({}, {})


# The gathered model gives raw ids the rows that the ranks' managed collision gives them.

ROWS = (4, 3, 2)
GATHERED = ModelOptions(users=40, items=30, cross_buckets=10, dim=4, hidden=4, managed=True)
raw_ids = st.lists(st.integers(0, RAW_IDS - 1), min_size=1, max_size=30)


def ranks() -> list[torch.nn.ModuleDict]:
    """A table of nine rows over three ranks."""
    starts = [sum(ROWS[:rank]) for rank in range(len(ROWS))]
    whole = MCHManagedCollisionModule(
        zch_size=sum(ROWS),
        device=torch.device("cpu"),
        eviction_policy=LRU_EvictionPolicy(),
        eviction_interval=1,
        input_hash_size=RAW_IDS,
    )
    segments = [*starts, sum(ROWS)]
    return [
        torch.nn.ModuleDict({"user": whole.rebuild_with_output_id_range((start, start + rows), segments)})
        for start, rows in zip(starts, ROWS, strict=True)
    ]


@given(raw_ids, raw_ids)
def test_rows_of_raw_ids_are_those_of_the_rank_that_has_their_range(trained: list[int], asked: list[int]) -> None:
    modules, share = ranks(), -(-RAW_IDS // len(ROWS))
    for raw in trained:
        look_up(modules[raw // share], [raw])
    for module in modules:
        module.eval()
    shards = [id_maps(module)["user"] for module in modules]
    ids = [*trained, *asked, 0, RAW_IDS - 1]
    assert rows_of(shards, np.array(ids)).tolist() == [look_up(modules[raw // share], [raw])[0] for raw in ids]


def test_the_gathered_model_of_one_rank_is_that_ranks_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, rng = ClickModel(GATHERED), np.random.default_rng(0)
    featurizer = Featurizer(GATHERED)
    batches = [click_batch(featurizer.features(_events(rng, first))) for first in range(0, 640, 64)]
    for batch in batches:
        model(batch)  # In training: ids get rows, and running statistics move.
    model.eval()
    save_state(model, tmp_path / "state.pt")
    maps, buffers = load_state(tmp_path / "state.pt")
    assert all(its.ids.any() for its in maps.values())
    tables = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    gathered = gathered_model(GATHERED, tables, {name: [its] for name, its in maps.items()}, buffers)
    assert torch.equal(outputs(gathered, batches[-1]), outputs(model, batches[-1]))


def _events(rng: np.random.Generator, first: int) -> RatingEvents:
    return RatingEvents(
        index=np.arange(first, first + 64),
        user=rng.integers(0, 40, 64),
        item=rng.integers(0, 30, 64),
        timestamp=np.arange(first, first + 64) * 1000,
        label=rng.integers(0, 2, 64).astype(np.float32),
    )

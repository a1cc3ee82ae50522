"""The gathered model gives raw ids the rows that the ranks' managed collision gives them."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.modules.mc_modules import LRU_EvictionPolicy, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import JaggedTensor

from deltasync.trainer.example.compare import gathered_model, id_maps, load_state, rows_of, save_state
from deltasync.trainer.example.features import Featurizer
from deltasync.trainer.example.model import ClickModel, click_batch, outputs
from deltasync.trainer.example.options import RAW_IDS, ModelOptions
from deltasync.trainer.example.stream import Events

ROWS = (4, 3, 2)
OPTIONS = ModelOptions(users=40, items=30, cross_buckets=10, dim=4, hidden=4, managed=True)
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


def remap(module: torch.nn.ModuleDict, ids: Sequence[int]) -> list[int]:
    jagged = JaggedTensor(torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64))
    found: torch.Tensor = module["user"]({"user": jagged})["user"].values()
    return found.tolist()


@given(raw_ids, raw_ids)
def test_rows_of_raw_ids_are_those_of_the_rank_that_has_their_range(trained: list[int], asked: list[int]) -> None:
    modules, share = ranks(), -(-RAW_IDS // len(ROWS))
    for raw in trained:
        remap(modules[raw // share], [raw])
    for module in modules:
        module.eval()
    shards = [id_maps(module)["user"] for module in modules]
    ids = [*trained, *asked, 0, RAW_IDS - 1]
    assert rows_of(shards, np.array(ids)).tolist() == [remap(modules[raw // share], [raw])[0] for raw in ids]


def test_the_gathered_model_of_one_rank_is_that_ranks_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, rng = ClickModel(OPTIONS), np.random.default_rng(0)
    featurizer = Featurizer(OPTIONS)
    batches = [click_batch(featurizer.features(_events(rng, first))) for first in range(0, 640, 64)]
    for batch in batches:
        model(batch)  # In training: ids get rows, and running statistics move.
    model.eval()
    save_state(model, tmp_path / "state.pt")
    maps, buffers = load_state(tmp_path / "state.pt")
    assert all(its.ids.any() for its in maps.values())
    tables = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    gathered = gathered_model(OPTIONS, tables, {name: [its] for name, its in maps.items()}, buffers)
    assert torch.equal(outputs(gathered, batches[-1]), outputs(model, batches[-1]))


def _events(rng: np.random.Generator, first: int) -> Events:
    return Events(
        index=np.arange(first, first + 64),
        user=rng.integers(0, 40, 64),
        item=rng.integers(0, 30, 64),
        timestamp=np.arange(first, first + 64) * 1000,
        label=rng.integers(0, 2, 64).astype(np.float32),
    )

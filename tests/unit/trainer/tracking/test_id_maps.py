"""Maps from raw ids to rows, and which shard of a table a raw id is looked up in."""

import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import fbgemm_gpu  # noqa: F401
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHEvictionPolicy,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.base.errors import DeltasyncError, InvalidInput
from deltasync.core.tables import TableKind
from deltasync.trainer.tracking import Tracker, TrackerOptions, TrackingMode
from deltasync.trainer.tracking.collision_modules import Routing
from deltasync.trainer.tracking.tracked_model import published_tables

ROWS, FREE, LARGEST = 8, 2**63 - 1, 2**63 - 1
MODULE = "collided._managed_collision_collection._managed_collision_modules.t"
RAW_IDS, RANGES = f"{MODULE}.raw_ids", f"{MODULE}.id_ranges"
TABLE = "collided._embedding_module.embedding_bags.t"
POLICIES: tuple[type[MCHEvictionPolicy], ...] = (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
)


def sorted_ids(policy: type[MCHEvictionPolicy] = DistanceLFU_EvictionPolicy, **options: Any) -> Any:
    return MCHManagedCollisionModule(
        zch_size=ROWS, device=torch.device("cpu"), eviction_policy=policy(), eviction_interval=1, **options
    )


def hashed_ids() -> Any:
    with warnings.catch_warnings(action="ignore"):  # It compiles kernels when it is imported.
        from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

        return HashZchManagedCollisionModule(zch_size=ROWS, device=torch.device("cpu"), total_num_buckets=2)


def model_of(collisions: nn.Module) -> nn.Module:
    config = EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=2, feature_names=["t"])
    embeddings = EmbeddingBagCollection([config])
    collection = ManagedCollisionCollection({"t": collisions}, [config])
    return nn.ModuleDict({"collided": ManagedCollisionEmbeddingBagCollection(embeddings, collection)})


def tracker(model: nn.Module) -> Tracker:
    return Tracker(model, TrackerOptions(mode=TrackingMode.EMBEDDING_LAST, dense=True, id_maps=True))


def changed(tracked: Tracker) -> dict[str, dict[int, list[int]]]:
    """What has changed since the last call, and is no longer due: values by row, by table."""
    delta = tracked.get_delta()
    tracked.acknowledge(delta)
    return {
        batch.table.name: dict(zip(batch.ids.tolist(), batch.values.tolist(), strict=True)) for batch in delta.rows
    }


def fill(module: Any, rows: dict[int, int]) -> None:
    """Give rows to raw ids."""
    ordered = sorted(rows.items())
    free = [row for row in range(ROWS) if row not in rows.values()][: ROWS - len(rows)]
    module._mch_sorted_raw_ids.copy_(torch.tensor([raw for raw, _ in ordered] + [FREE] * (ROWS - len(rows))))
    filled = [row for _, row in ordered] + free
    module._mch_remapped_ids_mapping.copy_(torch.tensor(filled + [ROWS - 1] * (ROWS - len(filled))))


def lookups(ids: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys=["t"], values=torch.tensor(ids), lengths=torch.tensor([len(ids)]))


IDS = st.integers(0, 300) | st.integers(-(2**62), LARGEST - 1)


@given(st.integers(1, 200) | st.sampled_from((2**62, LARGEST)), st.integers(1, 5), st.lists(IDS, min_size=1))
@example(LARGEST, 3, [LARGEST - 1, -1, 0])
def test_ids_are_routed_as_torchrec_routes_them(input_hash_size: int, shards: int, ids: list[int]) -> None:
    routing = Routing(-(-input_hash_size // shards), shards)
    lengths, *_ = torch.ops.fbgemm.block_bucketize_sparse_features(
        torch.ones(len(ids), dtype=torch.int64),
        torch.tensor(ids),
        bucketize_pos=False,
        sequence=True,
        block_sizes=torch.tensor([(input_hash_size + shards - 1) // shards]),
        total_num_blocks=torch.tensor([shards]),
        my_size=shards,
        keep_orig_idx=True,
    )
    expected = lengths.view(shards, len(ids)).argmax(dim=0)
    found = routing.shards_of(torch.tensor(ids))
    assert found.tolist() == expected.tolist()
    for raw, shard in zip(ids, found.tolist(), strict=True):
        first, end = routing.range_of(shard)
        assert first <= raw < end or not 0 <= raw < min(routing.block * shards, LARGEST)


def test_a_map_and_its_ranges_are_tables() -> None:
    model = model_of(sorted_ids(input_hash_size=100))
    tables = {table.name: table for table in published_tables(model, dense=True)}
    assert list(tables) == [TABLE, RAW_IDS, RANGES]
    assert (tables[RAW_IDS].kind, tables[RAW_IDS].of) == (TableKind.ID_MAP, TABLE)
    assert (tables[RANGES].kind, tables[RANGES].of) == (TableKind.ID_RANGES, TABLE)
    assert [table.name for table in published_tables(model, dense=False)] == [TABLE, RAW_IDS, RANGES]
    tracked = tracker(model)
    tracked.resync()
    assert changed(tracked)[RANGES] == {ROWS - 1: [0, 100, 0]}


def test_free_rows_are_not_said_to_who_has_nothing() -> None:
    collisions = sorted_ids()
    tracked = tracker(model_of(collisions))
    fill(collisions, {10: 3})
    tracked.resync()
    assert changed(tracked)[RAW_IDS] == {3: [10 ^ FREE], ROWS - 1: [0]}
    fill(collisions, {})
    assert changed(tracked)[RAW_IDS] == {3: [0]}
    tracked.resync()
    assert changed(tracked)[RAW_IDS] == {ROWS - 1: [0]}, "a table without any row would be unknown"


@pytest.mark.parametrize("hash_size", [LARGEST, 0])
def test_ranges_end_at_the_largest_number(hash_size: int) -> None:
    tracked = tracker(model_of(sorted_ids(input_hash_size=hash_size)))
    tracked.resync()
    assert changed(tracked)[RANGES] == {ROWS - 1: [0, LARGEST, 0]}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({10: ROWS}, f"raw id 10 has row {ROWS}; it holds rows 0 to {ROWS - 1} of table '{TABLE}'"),
        ({10: -1}, "raw id 10 has row -1; it holds rows 0 to"),
        ({10: 3, 20: 3}, "raw ids 10 and 20 both have row 3; it holds"),
    ],
)
def test_a_map_that_contradicts_itself_is_refused(rows: dict[int, int], message: str) -> None:
    collisions = sorted_ids()
    tracked = tracker(model_of(collisions))
    fill(collisions, {7: 1})
    held = changed(tracked)
    fill(collisions, rows)
    with pytest.raises(InvalidInput, match=f"managed collision module '{MODULE}': {message}"):
        tracked.get_delta()
    fill(collisions, {7: 1})
    assert held
    assert not changed(tracked)


def test_two_rows_for_one_id_are_refused() -> None:
    collisions = sorted_ids()
    fill(collisions, {10: 3, 20: 4})
    collisions._mch_sorted_raw_ids[:2] = 10
    with pytest.raises(InvalidInput, match="raw id 10 has two rows, 3 and 4"):
        tracker(model_of(collisions))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_eviction_policy(policy: type[MCHEvictionPolicy]) -> None:
    collisions = sorted_ids(policy)
    model: Any = model_of(collisions)
    tracked = tracker(model)
    copies: dict[str, dict[int, list[int]]] = {RAW_IDS: {row: [0] for row in range(ROWS)}}
    handed_over = 0
    for number in range(12):
        # Later ids come more often: the least frequent go, too.
        ids = [number // 4 * 10 + one for one in range(6)] * 5 ** (number // 4)
        model["collided"](lookups(ids + [7] * (150 - len(ids))))
        tracked.step()
        rows = changed(tracked).get(RAW_IDS, {})
        handed_over += sum(copies[RAW_IDS][row] != [0] for row in rows)
        copies[RAW_IDS] |= rows
        known = zip(
            collisions._mch_sorted_raw_ids.tolist(), collisions._mch_remapped_ids_mapping.tolist(), strict=True
        )
        expected = {row: [raw ^ FREE] for raw, row in known}
        assert copies[RAW_IDS] == expected
    assert handed_over


def test_others_do_not_read_while_rows_are_given_to_others() -> None:
    collisions = sorted_ids()
    model: Any = model_of(collisions)
    tracked = tracker(model)
    refused = list[str]()
    with ThreadPoolExecutor() as other:

        def read() -> set[str]:
            return set(other.submit(tracked.get_delta, timeout_seconds=0.01).result().ids)

        def read_in_vain(*_: object) -> None:
            with pytest.raises(DeltasyncError) as error:
                read()
            refused.append(str(error.value))

        with mock.patch.object(collisions, "_sort_mch_buffers", read_in_vain):
            model.eval()["collided"](lookups([1, 2]))
            assert not refused
            model.train()["collided"](lookups([1, 2]))
        assert "has not ended" in refused.pop()
        tracked.step()
        assert RAW_IDS in read()


def test_identities_of_hashing() -> None:
    collisions = hashed_ids()
    model = model_of(collisions)
    assert [table.name for table in published_tables(model, dense=True)] == [TABLE, RAW_IDS]
    tracked = tracker(model)
    collisions._hash_zch_identities.data[2] = 77
    found = changed(tracked)
    assert found[RAW_IDS] == {2: [77 ^ FREE]}
    assert list(found[TABLE]) == [2], "the row goes with its raw id, whether it has changed or not"
    collisions._hash_zch_identities.data[2] = -1
    collisions._hash_zch_identities.data[5] = 12
    assert changed(tracked)[RAW_IDS] == {2: [0], 5: [12 ^ FREE]}


def test_a_lone_managed_collision_module_is_refused() -> None:
    with pytest.raises(InvalidInput, match="managed collision module 'lone' belongs to no table"):
        tracker(nn.ModuleDict({"lone": sorted_ids()}))


def test_maps_of_skipped_tables_are_not_tracked() -> None:
    model = model_of(sorted_ids())
    options = TrackerOptions(dense=True, id_maps=True, fqns_to_skip=[TABLE])
    assert not Tracker(model, options).tables
    options = TrackerOptions(dense=True, id_maps=True, fqns_to_skip=["id_ranges"])
    assert [table.name for table in Tracker(model, options).tables] == [TABLE, RAW_IDS]
    assert [table.name for table in Tracker(model, TrackerOptions(dense=True)).tables] == [TABLE]


MAPS = st.dictionaries(st.integers(-3, 12).filter(lambda raw: raw != -1), st.integers(0, ROWS - 2)).map(
    lambda rows: {raw: row for row, raw in {row: raw for raw, row in rows.items()}.items()}
)
PROGRAMS = st.lists(st.tuples(st.sampled_from(("keep", "lose", "resync", "reload")), MAPS), max_size=12)


@given(PROGRAMS)
def test_a_copy_built_from_reads_is_the_map(program: list[tuple[str, dict[int, int]]]) -> None:
    collisions = sorted_ids()
    tracked = tracker(model_of(collisions))
    copy: dict[int, list[int]] = {}
    tracked.resync()
    for what, rows in [*program, ("keep", {5: 1})]:
        fill(collisions, rows)
        if what == "resync":
            tracked.resync()
            copy = {}
        if what == "reload":
            saved = tracked.state_dict()
            tracked = tracker(model_of(collisions))
            tracked.load_state_dict(saved)
        delta = tracked.get_delta()
        if what != "lose":
            tracked.acknowledge(delta)
            for batch in delta.rows:
                if batch.table.name == RAW_IDS:
                    copy |= dict(zip(batch.ids.tolist(), batch.values.tolist(), strict=True))
            assert {row: raw for row, [raw] in copy.items() if raw} == {
                row: raw ^ FREE for raw, row in rows.items()
            }


def test_a_map_that_was_loaded_is_the_one_of_the_checkpoint() -> None:
    """A trainer loads its weights once it tracks the model: these rows have not changed since they were saved."""
    collisions = sorted_ids()
    model = model_of(collisions)
    tracked = tracker(model)
    fill(collisions, {10: 3, 20: 0})
    changed(tracked)
    other = sorted_ids()
    loaded = model_of(other)
    restored = tracker(loaded)
    loaded.load_state_dict(model.state_dict())
    restored.load_state_dict(tracked.state_dict())
    assert set(changed(restored)) <= {RANGES}
    fill(other, {10: 3, 25: 0})
    assert changed(restored)[RAW_IDS] == {0: [25 ^ FREE]}


def test_memory_of_a_map_is_counted() -> None:
    model = model_of(sorted_ids())
    without = Tracker(model, TrackerOptions(dense=True))
    tables = {table.name: table for table in tracker(model).tables}
    # 4 bytes per row, and 12 for each 64 rows.
    stamps = sum(4 * tables[name].rows + 12 * -(-tables[name].rows // 64) for name in (RAW_IDS, RANGES))
    assert tracker(model).nbytes - without.nbytes == stamps + 8 * ROWS

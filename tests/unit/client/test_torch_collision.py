"""Managed collision in a TorchTarget: ids take the rows that they take in the trainer, from the same version."""

import copy
import dataclasses
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.targets import read_rows
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from deltasync.base.errors import Contradiction, NotFound
from deltasync.client import Position, Release, RowBatch, TableKind, TableSpec
from deltasync.client.targets.checksums import TargetChecksums
from deltasync.client.targets.target import Reads
from deltasync.client.targets.torch_target import TorchTarget
from deltasync.core.digests import checksum_of

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # It scripts something.
    from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule

ROWS, DIM, CPU = 12, 4, torch.device("cpu")
LARGEST = 2**63 - 1
USER = TableSpec("sparse._embedding_module.embedding_bags.user", ROWS, DIM)
ITEM = TableSpec("sparse._embedding_module.embeddings.user", ROWS, DIM)
MODULE = "sparse._managed_collision_collection._managed_collision_modules.user"
MAP = TableSpec(f"{MODULE}.raw_ids", ROWS, 1, np.dtype("<i8"), TableKind.ID_MAP, USER.name)
RANGES = TableSpec(f"{MODULE}.id_ranges", ROWS, 3, np.dtype("<i8"), TableKind.ID_RANGES, USER.name)
TABLES = [USER, MAP, RANGES]

# The raw id of a row that is free: of all others, the bits that differ from it are stored.
FREE = LARGEST

pytestmark = pytest.mark.filterwarnings("ignore:To copy construct from a tensor")


def sorting(rows: int = ROWS, **options: Any) -> MCHManagedCollisionModule:
    policy = DistanceLFU_EvictionPolicy()
    return MCHManagedCollisionModule(
        zch_size=rows, device=CPU, eviction_policy=policy, eviction_interval=1, **options
    )


def hashing(rows: int = ROWS, buckets: int = 4, **options: Any) -> HashZchManagedCollisionModule:
    return HashZchManagedCollisionModule(zch_size=rows, device=CPU, total_num_buckets=buckets, **options)


def model_of(collision: nn.Module, *, sequences: bool = False, rows: int = ROWS) -> nn.Module:
    config: Any = EmbeddingConfig if sequences else EmbeddingBagConfig
    configs = [config(name="user", embedding_dim=DIM, num_embeddings=rows, feature_names=["user"])]
    modules = ManagedCollisionCollection({"user": collision}, configs)
    managed: nn.Module
    if sequences:
        managed = ManagedCollisionEmbeddingCollection(EmbeddingCollection(tables=configs), modules)
    else:
        managed = ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(tables=configs), modules)
    return nn.ModuleDict({"sparse": managed}).eval()


def collision_of(model: nn.Module) -> Any:
    return model.get_submodule(MODULE)


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def rows_for(model: Any, *raw_ids: int) -> list[int]:
    """The rows that a forward looks up for some raw ids."""
    feature = JaggedTensor(values=numbers(*raw_ids), lengths=torch.ones(len(raw_ids), dtype=torch.int32))
    remapped: list[int] = collision_of(model)({"user": feature})["user"].values().tolist()
    return remapped


def embeddings_of(model: Any, *raw_ids: int) -> list[float]:
    """The first number of each embedding that a forward gives for some raw ids, one per sample."""
    features = KeyedJaggedTensor(
        keys=["user"], values=numbers(*raw_ids), lengths=torch.ones(len(raw_ids), dtype=torch.int32)
    )
    found, _ = model["sparse"](features)
    values = found["user"] if not isinstance(found, dict) else found["user"].values()
    numbers_found: list[float] = values[:, 0].tolist()
    return numbers_found


def release_of(
    number: int,
    *,
    resync: bool = False,
    ids: dict[int, int] | None = None,
    rows: dict[int, float] | None = None,
    ranges: dict[int, tuple[int, int, int]] | None = None,
    tables: list[TableSpec] | None = None,
) -> Release:
    """A release of raw ids by row (`FREE`: the row becomes free), of embeddings by row, and of ranges by row."""
    changed = [
        _batch(USER, {row: [value] * DIM for row, value in (rows or {}).items()}),
        _batch(MAP, {row: [raw ^ FREE] for row, raw in (ids or {}).items()}),
        _batch(RANGES, {row: list(each) for row, each in (ranges or {}).items()}),
    ]
    tables = tables or TABLES
    kept = [each for each in changed if len(each) and each.table in tables]
    return Release(Position("h", number), number, 0, resync, tables, kept)


def _batch(table: TableSpec, rows: dict[int, list[Any]]) -> RowBatch:
    ids = np.array(sorted(rows), np.int64)
    return RowBatch.of_table(
        table, ids, np.array([rows[row] for row in sorted(rows)], table.dtype).reshape(-1, table.dim)
    )


def hashed_to(row: int, besides: int = -1) -> int:
    """A raw id that a hashing module looks for in a row first. On CPUs these modules do not train."""
    module = hashing().eval()
    feature = JaggedTensor(values=torch.arange(10_000), lengths=torch.ones(10_000, dtype=torch.int32))
    found = module({"user": feature})["user"].values()
    return next(int(raw) for raw in (found == row).nonzero()[:, 0] if raw != besides)


def as_sequences(release: Release) -> Release:
    """The same for an `EmbeddingCollection`, whose tables have other names."""
    renamed = {table.name: dataclasses.replace(table, of=ITEM.name) for table in (MAP, RANGES)} | {USER.name: ITEM}
    rows = [RowBatch.of_table(renamed[each.table.name], each.ids, each.values) for each in release.rows]
    return dataclasses.replace(release, rows=rows, tables=[renamed[table.name] for table in release.tables])


@pytest.mark.parametrize("sequences", [False, True], ids=["bags", "sequences"])
@pytest.mark.parametrize("hashes", [False, True], ids=["sorted", "hashed"])
def test_raw_ids_that_move_get_their_new_rows(hashes: bool, sequences: bool) -> None:
    model = model_of(hashing() if hashes else sorting(), sequences=sequences)
    form = as_sequences if sequences else lambda release: release
    first = {row: hashed_to(row) if hashes else 1000 - row for row in (3, 5, 11)}
    second = {row: hashed_to(row, first[row]) if hashes else LARGEST - 1 - row for row in (3, 5)}
    target = TorchTarget(model)
    target.apply(form(release_of(1, resync=True, ids=first, rows=dict.fromkeys(first, 1.0))))
    assert rows_for(model, *first.values()) == [3, 5, 11]
    assert embeddings_of(model, *first.values()) == [1, 1, 1]
    target.apply(form(release_of(2, ids=second, rows={3: 2.0, 5: 3.0})))
    assert rows_for(model, *second.values(), first[11]) == [3, 5, 11]
    assert embeddings_of(model, *second.values(), first[11]) == [2, 3, 1]
    target.apply(form(release_of(3, ids={3: FREE}, rows={3: 0.0})))
    rows = read_rows(target, dataclasses.replace(MAP, of=ITEM.name) if sequences else MAP, np.array([3, 5]))
    assert rows.tolist() == [[0], [second[5] ^ FREE]]


@given(st.data())
def test_any_changes_of_a_map_against_a_dictionary(data: st.DataObject) -> None:
    model = model_of(sorting())
    target = TorchTarget(model)
    held, by_row = TargetChecksums(target), dict[int, int]()
    ids = st.integers(-(2**63), LARGEST - 1) | st.integers(-5, 20)
    for number in range(1, data.draw(st.integers(2, 5))):
        whole = number == 1 or data.draw(st.booleans())
        if whole:
            by_row = {}
        changed = dict[int, int]()
        for row, raw in data.draw(st.dictionaries(st.integers(0, ROWS - 1), ids | st.just(FREE))).items():
            if raw == FREE or raw not in (by_row | changed).values():
                changed[row] = raw
        release = release_of(number, resync=number == 1, ids=changed)
        release = dataclasses.replace(release, whole=frozenset([MAP.name] if whole else []))
        target.apply(release)
        by_row = {row: raw for row, raw in (by_row | changed).items() if raw != FREE}
        column = np.array([[by_row.get(row, FREE) ^ FREE] for row in range(ROWS)])
        assert held.after(release)[MAP.name] == checksum_of(np.arange(ROWS), column)
        assert rows_for(model, *by_row.values()) == list(by_row)
        unknown = [raw for raw in (0, 7, 21, -5, LARGEST - 1) if raw not in by_row.values()]
        assert rows_for(model, *unknown) == [ROWS - 1] * len(unknown)


def ranges_of(ranks: int, size: int) -> dict[int, tuple[int, int, int]]:
    """The ranges of a trainer of so many ranks, whose ids are below `size`: the last row of each shard is its
    default.
    """
    block, rows = -(-size // ranks), -(-ROWS // ranks)
    first = [rank * rows for rank in range(ranks)]
    last = [min(row + rows, ROWS) - 1 for row in first]
    ends = [min((rank + 1) * block, LARGEST) for rank in range(ranks)]
    return {row: (rank * block, ends[rank], first[rank]) for rank, row in enumerate(last)}


def rank_of(raw: int, ranks: int, size: int) -> int:
    """Where TorchRec sends a raw id."""
    feature = KeyedJaggedTensor(keys=["user"], values=numbers(raw), lengths=torch.ones(1, dtype=torch.int32))
    routed, _ = bucketize_kjt_before_all2all(
        feature, ranks, numbers(-(-size // ranks)), numbers(ranks), output_permute=True, keep_original_indices=True
    )
    return int(routed.lengths().nonzero()[0, 0])


@given(
    st.lists(st.integers(-(2**62), LARGEST - 1) | st.integers(-5, 130), min_size=1, unique=True),
    st.sampled_from([1, 2, 3, 4]),
    st.sampled_from([100, 97, 2**40, LARGEST]),
)
def test_an_unknown_id_gets_the_row_of_its_rank(raw_ids: list[int], ranks: int, size: int) -> None:
    model, ranges = model_of(sorting(input_hash_size=size)), ranges_of(ranks, size)
    target = TorchTarget(model)
    target.apply(release_of(1, resync=True, ids={3: 1_000_001}, ranges=ranges))
    unknown = [raw for raw in raw_ids if raw != 1_000_001]
    defaults = list(ranges)
    assert rows_for(model, *unknown) == [defaults[rank_of(raw, ranks, size)] for raw in unknown]
    assert rows_for(model, 1_000_001) == [3]


def test_a_copy_of_a_model_has_a_map_of_its_own() -> None:
    model = model_of(sorting())
    target = TorchTarget(model)
    target.apply(release_of(1, resync=True, ids={3: 9}, ranges=ranges_of(2, 99)))
    twin = copy.deepcopy(model)
    target.apply(release_of(2, ids={3: FREE}, ranges=dict.fromkeys(range(ROWS), (0, 0, 0)) | ranges_of(1, 99)))
    assert (rows_for(twin, 9, 1, 98), rows_for(model, 9, 1, 98)) == ([3, 5, 11], [11, 11, 11])


def test_a_trainer_of_one_rank_replaces_nothing_in_the_module() -> None:
    model = model_of(sorting())
    TorchTarget(model).apply(release_of(1, resync=True, ids={3: 9}, ranges=ranges_of(1, LARGEST)))
    assert "remap" not in vars(collision_of(model))


def test_a_change_of_the_number_of_ranks_is_followed() -> None:
    model = model_of(sorting())
    target = TorchTarget(model)
    for number, ranks in enumerate((2, 3, 1, 4), 1):
        ranges = ranges_of(ranks, 100)
        whole = dict.fromkeys(range(ROWS), (0, 0, 0)) | ranges
        target.apply(release_of(number, resync=number == 1, ranges=whole))
        assert rows_for(model, *range(0, 100, 25)) == [
            list(ranges)[rank_of(raw, ranks, 100)] for raw in range(0, 100, 25)
        ]
        for reader in (target, TorchTarget(model)):
            rows = read_rows(reader, RANGES, np.arange(ROWS))
            assert rows.tolist() == [list(whole[row]) for row in range(ROWS)]


@pytest.mark.parametrize("inference", [False, True], ids=["", "made in inference mode"])
@pytest.mark.parametrize("hashes", [False, True], ids=["sorted", "hashed"])
def test_a_map_of_an_earlier_process_is_read_and_continued(hashes: bool, inference: bool) -> None:
    with torch.inference_mode(inference):
        model = model_of(hashing() if hashes else sorting())
    ids = {row: hashed_to(row) for row in (1, 4)}
    TorchTarget(model).apply(release_of(1, resync=True, ids=ids))
    target = TorchTarget(model)
    before = read_rows(target, MAP, np.arange(ROWS))
    assert before[:, 0].tolist() == [ids.get(row, FREE) ^ FREE for row in range(ROWS)]
    target.apply(release_of(2, ids={7: hashed_to(7)}))
    assert rows_for(model, ids[1], ids[4], hashed_to(7)) == [1, 4, 7]


def test_a_map_is_found_inside_wrappers() -> None:
    model = model_of(sorting())
    release = release_of(1, resync=True, ids={1: 40, 4: -1}, rows={1: 1.0, 4: 4.0})
    TorchTarget(nn.DataParallel(model)).apply(release)
    assert rows_for(model, 40, -1) == [1, 4]


def test_a_map_damaged_between_two_targets_is_repaired() -> None:
    model = model_of(sorting())
    TorchTarget(model).apply(release_of(1, resync=True, ids={1: 40, 4: 44}))
    collision_of(model)._mch_sorted_raw_ids[1] = 40  # Two rows have one id now.
    target = TorchTarget(model)
    held, release = TargetChecksums(target), release_of(2, ids={7: 47})
    target.apply(release)
    column = np.array([[{1: 40, 4: 44, 7: 47}.get(row, FREE) ^ FREE] for row in range(ROWS)])
    expected = checksum_of(np.arange(ROWS), column)
    assert held.after(release)[MAP.name] != expected
    repair = dataclasses.replace(release_of(2, ids={1: 40, 4: 44, 7: 47}), whole=frozenset({MAP.name}))
    target.apply(repair)
    assert held.after(repair)[MAP.name] == expected
    assert rows_for(model, 40, 44, 47) == [1, 4, 7]


def damage_sorted(module: Any) -> None:
    module._mch_sorted_raw_ids[0] += 1


def damage_rows(module: Any) -> None:
    module._mch_remapped_ids_mapping[[0, 1]] = module._mch_remapped_ids_mapping[[1, 0]]


def damage_identities(module: Any) -> None:
    module._hash_zch_identities.data[4] += 1


@pytest.mark.parametrize("damage", [damage_sorted, damage_rows, damage_identities])
def test_a_damaged_map_changes_the_checksum(damage: Any) -> None:
    model = model_of(hashing() if damage is damage_identities else sorting())
    target = TorchTarget(model)
    held, ids = TargetChecksums(target), {row: hashed_to(row) for row in (1, 4)}
    release = release_of(1, resync=True, ids=ids, ranges={} if damage is damage_identities else ranges_of(2, 99))
    target.apply(release)
    right = held.after(release)
    damage(collision_of(model))
    for _ in range(6):
        found = held.look()
    assert {name for name in right if found[name] != right[name]} == {MAP.name}
    whole = dataclasses.replace(release_of(2, ids=ids), whole=frozenset({MAP.name}))
    target.apply(whole)
    assert held.after(whole) == right


def state_of(model: nn.Module) -> dict[str, bytes]:
    return {name: tensor.numpy().tobytes() for name, tensor in model.state_dict().items() if tensor.numel()}


def sorted_model() -> nn.Module:
    return model_of(sorting())


WITHOUT_ITS_TABLE = [dataclasses.replace(USER, dim=9), MAP]


@pytest.mark.parametrize(
    ("make", "fields", "said"),
    [
        (sorted_model, lambda: {"ids": {3: 9, 7: 9}}, "raw id 9 has two rows, 3 and 7"),
        (
            lambda: model_of(hashing(buckets=1, max_probe=2)),
            lambda: {"ids": {row: hashed_to(row) for row in range(ROWS)}},
            "total_num_buckets (1), max_probe (2), input_hash_size (0)",
        ),
        (
            lambda: model_of(hashing(max_probe=1)),
            lambda: {"ids": {3: hashed_to(5)}},
            ": total_num_buckets (4), max_probe (1), input_hash_size (0)",
        ),
        (
            lambda: model_of(hashing()),
            lambda: {"ranges": ranges_of(2, 100)},
            f"unknown ids get rows [5, 11] in the trainer, but rows by hash in module {MODULE}",
        ),
        (sorted_model, lambda: {"ranges": {5: (0, 50, 0), 11: (60, 99, 6)}}, "unknown ids from 60 to 99"),
        (sorted_model, lambda: {"ranges": {5: (0, 60, 0), 11: (50, 99, 6)}}, "unknown ids from 50 to 99"),
        (sorted_model, lambda: {"ranges": {5: (0, 60, 6)}}, "of a shard from row 6 on"),
        (sorted_model, lambda: {"ids": {3: 9}, "tables": WITHOUT_ITS_TABLE}, "which has no place"),
        (lambda: sorted_model().train(), lambda: {"ids": {3: 9}}, "is in training mode"),
        (
            lambda: model_of(sorting(rows=ROWS + 1), rows=ROWS + 1),
            lambda: {"ids": {3: 9}},
            f"table {MAP.name!r} has {ROWS} rows, module {MODULE} maps to {ROWS + 1}",
        ),
    ],
    ids=["two rows", "buckets", "probes", "hashed", "gap", "overlap", "other shard", "half", "training", "size"],
)
def test_a_map_that_the_module_cannot_follow_is_refused_before_any_write(
    make: Callable[[], nn.Module], fields: Callable[[], dict[str, Any]], said: str
) -> None:
    model, bad = make(), release_of(1, **fields())
    before, remap = state_of(model), vars(collision_of(model)).get("remap")
    embeddings = RowBatch.of_table(USER, np.array([1]), np.full((1, DIM), 5, np.float32))
    with pytest.raises(Contradiction) as refused:
        TorchTarget(model).apply(dataclasses.replace(bad, resync=True, rows=[embeddings, *bad.rows]))
    assert said in str(refused.value)
    assert state_of(model) == before
    assert vars(collision_of(model)).get("remap") is remap


def test_a_map_that_is_refused_later_leaves_what_is_served() -> None:
    model = model_of(sorting())
    target = TorchTarget(model)
    target.apply(release_of(1, resync=True, ids={3: 9}, rows={3: 1.0}))
    before = state_of(model)
    with pytest.raises(Contradiction, match="raw id 9 has two rows, 3 and 4"):
        target.apply(release_of(2, ids={4: 9}, rows={3: 2.0}))
    assert state_of(model) == before
    target.apply(release_of(3, ids={3: FREE, 4: 9}, rows={4: 4.0}))
    assert embeddings_of(model, 9) == [4]


def test_one_shard_of_a_map_is_an_error() -> None:
    shard = sorting().rebuild_with_output_id_range((6, 12), [0, 6, 12])
    halves = [dataclasses.replace(table, rows=6) for table in (USER, MAP)]
    with pytest.raises(Contradiction, match="one shard of several"):
        TorchTarget(model_of(shard, rows=6)).apply(release_of(1, resync=True, tables=halves))


def test_modules_with_similar_names_have_their_own_maps() -> None:
    """A collection, and one of the same name inside of a tower."""
    model: Any = nn.ModuleDict(
        {"sparse": model_of(sorting()).get_submodule("sparse"), "tower": model_of(sorting())}
    )
    towers = [
        dataclasses.replace(each, name=f"tower.{each.name}", of=each.of and f"tower.{each.of}") for each in TABLES
    ]
    target = TorchTarget(model)
    release = release_of(1, resync=True, ids={3: 9}, rows={3: 1.0})
    target.apply(dataclasses.replace(release, tables=[*TABLES, *towers]))
    assert target.bound() == {each.name for each in [*TABLES, *towers]}
    assert (rows_for(model, 9), rows_for(model["tower"], 9)) == ([3], [ROWS - 1])


def test_a_map_in_many_chunks_is_sorted_as_often_as_a_whole_one() -> None:
    """Each time costs as much as the map has rows."""
    ids, sorts = {row: 1000 - row for row in range(ROWS - 1)}, list[int]()

    def count(_: Any, event: str, called: Any) -> None:
        sorts[-1] += event == "c_call" and called.__name__ == "argsort"

    for rows in (ROWS, 2):
        model, release = model_of(sorting()), release_of(1, resync=True, ids=ids)
        sorts.append(0)
        sys.setprofile(count)
        TorchTarget(model).apply(dataclasses.replace(release, rows=[*release.rows[0].blocks(rows)]))
        sys.setprofile(None)
        assert rows_for(model, *ids.values()) == [*ids]
    assert sorts[0] == sorts[1] > 0


def test_a_map_without_its_module_is_refused_with_the_known_modules() -> None:
    other = dataclasses.replace(MAP, name=MAP.name.replace("user", "item"))
    with pytest.raises(NotFound, match=f"no managed collision module of that name, or several; modules: {MODULE}"):
        TorchTarget(model_of(sorting())).apply(release_of(1, resync=True, tables=[USER, MAP, other]))
    plain = nn.ModuleDict({"sparse": nn.ModuleDict({"_embedding_module": EmbeddingBagCollection(tables=[])})})
    with pytest.raises(NotFound, match="modules: none"):
        TorchTarget(plain).apply(release_of(1, resync=True, tables=[MAP]))


def test_a_module_without_a_table_for_its_map_is_refused() -> None:
    """A trainer from before maps were published."""
    release = release_of(1, resync=True, rows={3: 1.0}, tables=[USER])
    with pytest.raises(NotFound, match=f"no table has the map {MAP.name}: update the trainer"):
        TorchTarget(model_of(sorting())).apply(release)
    target = TorchTarget(model_of(sorting()), leave_out=["*.raw_ids"])
    target.apply(release)
    assert target.bound() == {USER.name}


def test_leaving_out_a_table_leaves_out_its_map_and_ranges() -> None:
    model = model_of(sorting())
    target = TorchTarget(model, leave_out=[USER.name])
    before = state_of(model)
    target.apply(release_of(1, resync=True, ids={3: 9}, ranges=ranges_of(2, 99)))
    assert (target.bound(), state_of(model)) == (frozenset(), before)


def test_a_table_that_grows_is_no_longer_followed_with_its_map() -> None:
    model = model_of(sorting())
    target = TorchTarget(model)
    target.apply(release_of(1, resync=True, ids={3: 9}, rows={3: 1.0}))
    grown = [dataclasses.replace(table, rows=20) for table in TABLES]
    target.apply(release_of(2, tables=grown))
    assert target.bound() == frozenset()
    assert embeddings_of(model, 9) == [1]


def test_a_scripted_module_is_an_error() -> None:
    model = model_of(sorting())

    class Scripted(torch.jit.ScriptModule):
        def __init__(self) -> None:
            super().__init__()
            for name in ("_mch_sorted_raw_ids", "_mch_remapped_ids_mapping"):
                self.register_buffer(name, collision_of(model).get_buffer(name))

    parent, _, name = MODULE.rpartition(".")
    model.get_submodule(parent).add_module(name, Scripted())
    with pytest.raises(Contradiction, match="is scripted or traced"):
        TorchTarget(model).apply(release_of(1, resync=True, ids={3: 9}))


@pytest.mark.parametrize("reads", ["pause", "copies"])
def test_readers_never_see_a_raw_id_with_the_row_of_another_version(reads: Reads) -> None:
    """One id wanders from row to row; the row that it is in has the number of the version."""
    target = TorchTarget(model_of(sorting()), reads=reads)
    target.apply(release_of(1, resync=True, ids={0: 77}, rows={0: 1.0}))
    done, seen = threading.Event(), list[float]()

    def read() -> None:
        while not done.is_set():
            with target.reading() as reading:
                seen.extend(embeddings_of(reading.module, 77))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(2, 100):
        old, new = (number - 2) % (ROWS - 1), (number - 1) % (ROWS - 1)
        target.apply(release_of(number, ids={old: FREE, new: 77}, rows={old: -1.0, new: float(number)}))
    done.set()
    reader.join()
    assert -1.0 not in seen
    assert seen == sorted(seen)
    assert 0 not in seen

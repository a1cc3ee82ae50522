"""TensorDicts: trained on as the same ids are in KeyedJaggedTensors, whatever holds them and however they lie."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from tests.integration.trainer.pipelines import jagged
from tests.integration.trainer.pipelines.jagged import (
    EVERY_SHARDING,
    Ids,
    Lookups,
    as_kjt,
    as_tensordict,
    ids,
    nested,
    train_same,
)
from tests.integration.trainer.pipelines.models import BOTH_RANKS
from tests.integration.trainer.pipelines.registry import SCENARIOS
from tests.integration.trainer.torchrec_defects.models import META, bag, bags, sequence, sequences
from torch import nn
from torchrec.distributed.sharding_plan import column_wise, row_wise, table_wise
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

MEAN = PoolingType.MEAN


class UnshardedBags(EmbeddingBagCollection):  # type: ignore[misc]  # torchrec's types are not followed
    """Has no sharder, and so is the same on all ranks."""


class UnshardedSequences(EmbeddingCollection):  # type: ignore[misc]
    """Has no sharder, and so is the same on all ranks."""


def _bags() -> nn.Module:
    return Lookups(bags=bags("f", "g"))


def _both() -> nn.Module:
    return Lookups(bags=bags("f", "g"), sequences=sequences("f", "g"))


def _unsharded() -> nn.Module:
    of_bags = UnshardedBags(tables=[bag("f"), bag("g", pooling=MEAN)], device=META)
    of_sequences = UnshardedSequences(tables=[sequence("f"), sequence("g")], device=META)
    return Lookups(bags=of_bags, sequences=of_sequences)


@SCENARIOS.scenario("tensordicts", ranks=2)
def bags_of_every_sharding_type() -> None:
    batches = list(ids(5, *EVERY_SHARDING))
    for pooling in (PoolingType.SUM, MEAN):

        def make(pooling: PoolingType = pooling) -> nn.Module:
            return Lookups(bags=bags(*(bag(name, dim=8, pooling=pooling) for name in EVERY_SHARDING)))

        train_same(make, EVERY_SHARDING, map(as_kjt, batches), map(as_tensordict, batches))


@SCENARIOS.scenario("tensordicts", ranks=2)
def sequences_of_every_sharding_type() -> None:
    tables = {
        "t": table_wise(rank=1, compute_kernel="fused"),
        "r": row_wise(compute_kernel="fused"),
        "c": column_wise(ranks=[0, 1], compute_kernel="fused"),
    }
    batches = list(ids(5, *tables))

    def make() -> nn.Module:
        configs = [sequence(name) for name in tables]
        for config in configs:
            config.embedding_dim = 8
        return Lookups(sequences=sequences(*configs))

    train_same(make, tables, map(as_kjt, batches), map(as_tensordict, batches))


@SCENARIOS.scenario("tensordicts", ranks=2)
def unsharded_modules() -> None:
    batches = list(ids(5))
    train_same(_unsharded, {}, map(as_kjt, batches), map(as_tensordict, batches))


@SCENARIOS.scenario("tensordicts", ranks=2)
def unsharded_modules_with_keys_in_changing_order_and_others_beside_them() -> None:
    batches = list(ids(5))
    orders = [("g", "f"), ("f", "g"), ("g", "f"), ("g", "f"), ("f", "g")]
    given = [
        as_tensordict(batch, order, dense=torch.ones(4)) for batch, order in zip(batches, orders, strict=True)
    ]
    train_same(_unsharded, {}, map(as_kjt, batches), given)


@SCENARIOS.scenario("tensordicts", ranks=2)
def values_that_lie_in_every_way() -> None:
    ways: list[Callable[[list[list[int]]], Any]] = [
        nested,
        jagged.nested_with_gaps,
        jagged.nested_chunk,
        jagged.by_lengths,
        jagged.by_offsets,
        jagged.by_both,
        jagged.narrow_integers,
    ]
    batches = list(ids(len(ways)))
    given = [as_tensordict(batch, value=way) for batch, way in zip(batches, ways, strict=True)]
    train_same(_both, BOTH_RANKS, map(as_kjt, batches), given)


@SCENARIOS.scenario("tensordicts", ranks=2)
def values_that_lie_in_different_ways_in_one_batch() -> None:
    batches = list(ids(4))
    given = [
        TensorDict({"f": jagged.narrow_integers(batch["f"]), "g": jagged.nested_with_gaps(batch["g"])})
        for batch in batches
    ]
    train_same(_both, BOTH_RANKS, map(as_kjt, batches), given)


@SCENARIOS.scenario("tensordicts", ranks=2)
def integers_of_32_bits_in_all_keys() -> None:
    batches = list(ids(4))
    given = [as_tensordict(batch, value=jagged.narrow_integers) for batch in batches]
    train_same(_both, BOTH_RANKS, map(as_kjt, batches), given)


@SCENARIOS.scenario("tensordicts", ranks=2)
def batch_size_that_is_given() -> None:
    batches = list(ids(4))
    train_same(_both, BOTH_RANKS, map(as_kjt, batches), [as_tensordict(one, batch_size=[4]) for one in batches])


@SCENARIOS.scenario("tensordicts", ranks=2)
def rows_cut_out_of_a_larger_tensordict() -> None:
    batches = list(ids(4))
    larger = [{key: [[3, 3], *of_key] for key, of_key in batch.items()} for batch in batches]
    train_same(_both, BOTH_RANKS, map(as_kjt, batches), [as_tensordict(one, batch_size=[5])[1:] for one in larger])


@SCENARIOS.scenario("tensordicts", ranks=2)
def keys_in_another_order_in_each_batch() -> None:
    batches = list(ids(6, "f", "g", "h"))
    orders = ["fgh", "hgf", "ghf", "fgh", "hfg", "gfh"]
    given = [as_tensordict(batch, list(order)) for batch, order in zip(batches, orders, strict=True)]

    def make() -> nn.Module:
        return Lookups(bags=bags("f", "g", "h"), sequences=sequences("f", "g", "h"))

    train_same(make, BOTH_RANKS, map(as_kjt, batches), given)


@SCENARIOS.scenario("tensordicts", ranks=2)
def other_keys_hold_anything() -> None:
    batches = list(ids(5))
    others: list[dict[str, Any]] = [
        {"z": torch.ones(4, 2)},
        {"a": "text", "z": nested([[1], [2], [], [77]])},
        {},
        {"z": TensorDict({"f": nested([[99], [], [], []])})},
        {"a": jagged.by_lengths([[5]]), "z": as_kjt(batches[0])},
    ]
    given = []
    for batch, other in zip(batches, others, strict=True):
        first = {key: value for key, value in other.items() if key < "f"}
        last = {key: value for key, value in other.items() if key > "f"}
        given.append(TensorDict(first | {key: nested(batch[key]) for key in batch} | last))
    train_same(_both, BOTH_RANKS, map(as_kjt, batches), given)


@SCENARIOS.scenario("tensordicts", ranks=2)
def a_feature_of_two_tables() -> None:
    batches = list(ids(5))
    tables = {
        "one": table_wise(rank=1, compute_kernel="fused"),
        "two": row_wise(compute_kernel="fused"),
        "three": table_wise(rank=0, compute_kernel="fused"),
    }

    def make() -> nn.Module:
        return Lookups(bags=bags(bag("one", "g"), bag("two", "f", "g"), bag("three", "g", "f")))

    given = [
        as_tensordict(batch, keys) for batch, keys in zip(batches, ["fg", "gf", "gf", "fg", "gf"], strict=True)
    ]
    train_same(make, tables, map(as_kjt, batches), given)


@SCENARIOS.scenario("tensordicts", ranks=2)
def modules_with_different_features_of_one_tensordict() -> None:
    batches = list(ids(5, "f", "g", "h"))

    def make() -> nn.Module:
        return Lookups(one=bags("h", "f"), two=bags("g"), three=sequences("g", "h"))

    train_same(make, BOTH_RANKS, map(as_kjt, batches), map(as_tensordict, batches))


@SCENARIOS.scenario("tensordicts", ranks=2)
def batches_and_ranks_without_ids() -> None:
    nothing: Ids = {"f": [[], [], [], []], "g": [[], [], [], []]}
    rank = dist.get_rank()
    batches = [
        next(ids(1)),
        nothing,
        next(ids(1, seed=1)) if rank else nothing,
        nothing if rank else next(ids(1, seed=2)),
        nothing | {"f": [[], [1, 2], [], []]},
    ]
    for value in (nested, jagged.by_lengths, jagged.by_offsets):
        given = [as_tensordict(batch, value=value) for batch in batches]
        train_same(_both, BOTH_RANKS, map(as_kjt, batches), given)


@SCENARIOS.scenario("tensordicts", ranks=2)
def batches_without_examples() -> None:
    batches: list[Ids] = [next(ids(1)), {"f": [], "g": []}, next(ids(1, seed=1))]
    given = [as_tensordict(batch, value=jagged.by_lengths) for batch in batches]
    train_same(_bags, BOTH_RANKS, map(as_kjt, batches), given)


@SCENARIOS.scenario("tensordicts", ranks=2)
def batches_of_different_sizes() -> None:
    batches = [next(ids(1, size=size, seed=size)) for size in (4, 1, 7, 2, 4)]
    train_same(_both, BOTH_RANKS, map(as_kjt, batches), map(as_tensordict, batches))


@SCENARIOS.scenario("tensordicts", ranks=2)
def locked_tensordicts() -> None:
    batches = list(ids(4))
    given = [as_tensordict(batch, value=jagged.by_lengths).lock_() for batch in batches]
    train_same(_both, BOTH_RANKS, map(as_kjt, batches), given)

"""Loads, first values and resets after the tracker has attached: followed, or found by verifying."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.rewrites.replica import NAME, Replica
from tests.integration.trainer.rewrites.scenarios import SCENARIOS
from tests.integration.trainer.torchrec_defects.models import (
    BAGS,
    ROWS,
    SEQUENCES,
    bags,
    sequences,
    sharded,
    train,
)
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import row_wise, table_wise

from deltasync.base.errors import Contradiction
from deltasync.trainer.tracking import TrackingMode
from deltasync.trainer.tracking.modules import sharded_modules
from deltasync.trainer.tracking.shards import lookups_of

EVERY_ROW = set(range(ROWS))
FUSED = f"{BAGS}.rows", f"{BAGS}.whole", f"{SEQUENCES}.rows"


def model() -> DistributedModelParallel:
    tables = {
        "rows": row_wise(compute_kernel="fused"),
        "whole": table_wise(rank=1, compute_kernel="fused"),
    }
    collections = {"bags": bags("rows", "whole"), "sequences": sequences("rows")}
    return sharded(collections, tables, optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD)


def kernels(of: DistributedModelParallel) -> Iterator[Any]:
    for _, module in sharded_modules(of):
        for lookup in lookups_of(module):
            yield from lookup._emb_modules


def random_state(of: DistributedModelParallel) -> dict[str, torch.Tensor]:
    """As of a checkpoint of another moment."""
    state: dict[str, torch.Tensor] = deepcopy(of.state_dict())
    for value in state.values():
        for shard in value.local_shards() if hasattr(value, "local_shards") else ():
            shard.tensor = torch.rand(shard.tensor.shape)
    return state


def load_the_whole(of: DistributedModelParallel) -> None:
    of.load_state_dict(random_state(of))


def load_what_dmp_wraps(of: DistributedModelParallel) -> None:
    of.module.load_state_dict(random_state(of))


def load_module_by_module(of: DistributedModelParallel) -> None:
    for name in "bags", "sequences":
        state = {
            key.removeprefix(f"{name}."): value
            for key, value in random_state(of).items()
            if key.startswith(f"{name}.")
        }
        of.module.get_submodule(name).load_state_dict(state)


def load_kernel_by_kernel(of: DistributedModelParallel) -> None:
    for kernel in kernels(of):
        state = kernel.emb_module.state_dict()
        weights = {key: torch.rand_like(value) for key, value in state.items() if value.is_floating_point()}
        kernel.emb_module.load_state_dict(state | weights)


def reset_modules(of: DistributedModelParallel) -> None:
    for name in "bags", "sequences":
        of.module.get_submodule(name).reset_parameters()


def reset_kernels(of: DistributedModelParallel) -> None:
    for kernel in kernels(of):
        kernel.emb_module.init_embedding_weights_uniform(-1, 1)


def reset_kernels_of_torchrec(of: DistributedModelParallel) -> None:
    for kernel in kernels(of):
        kernel.init_parameters()


REWRITES: list[Callable[[DistributedModelParallel], None]] = [
    load_the_whole,
    load_what_dmp_wraps,
    load_module_by_module,
    load_kernel_by_kernel,
    reset_modules,
    reset_kernels,
    reset_kernels_of_torchrec,
]


@SCENARIOS.scenario("loads", ranks=2)
def a_load_is_followed_and_other_threads_may_read_after_it() -> None:
    assert not followed(load_the_whole).tracker._gate.updating


@SCENARIOS.scenario("loads", ranks=2)
def every_way_to_rewrite_a_model_is_followed() -> None:
    for rewrite in REWRITES:
        replica = followed(rewrite)
        replica.catch_up()
        assert not replica.stale, rewrite.__name__
        train(replica.model, rows=[4], whole=[4])
        replica.tracker.step()
        taken = replica.catch_up()
        assert {name: taken[name] for name in FUSED} == {name: {4} for name in FUSED}, (
            "only what has changed since"
        )
        assert not replica.stale, (rewrite.__name__, replica.stale)


def followed(rewrite: Callable[[DistributedModelParallel], None]) -> Replica:
    """A replica of a model that was rewritten in a way, which has told of it."""
    of = model()
    replica = Replica(of)
    train(of, rows=[1], whole=[2])
    replica.tracker.step()
    replica.catch_up()
    changes = replica.tracker.changes
    rewrite(of)
    if replica.stale.keys() >= set(FUSED):
        assert replica.tracker.changes > changes, "or else a flush would publish nothing"
    else:
        assert rewrite is reset_modules, f"{rewrite.__name__} has changed {list(replica.stale)}"
    return replica


@SCENARIOS.scenario("loads", ranks=2)
def a_failed_load_marks_all_rows_and_lets_reads_wait_for_the_step() -> None:
    of = model()
    replica = Replica(of)
    with pytest.raises(Exception, match=r"size mismatch|shape|Error"):
        of.module.bags.load_state_dict({f"embedding_bags.{name}.weight": torch.rand(3, 3) for name in ("rows",)})
    assert replica.catch_up()[f"{BAGS}.rows"] == EVERY_ROW
    replica.tracker.step()
    assert not replica.tracker._gate.updating


@SCENARIOS.scenario("loads", ranks=2)
def deleted_rows_stay_deleted_unless_a_load_fills_them() -> None:
    of = model()
    replica = Replica(of)
    name = f"{BAGS}.rows"
    replica.tracker.delete(name, torch.tensor([1, 2, 9, 10]))
    replica.catch_up()
    state = deepcopy(of.state_dict())
    for shard in state[f"{name}.weight"].local_shards():
        shard.tensor[1] = 0.5  # Rows 1 and 9.
    of.load_state_dict(state)
    delta = replica.tracker.get_delta(NAME)
    first = 8 * dist.get_rank()
    assert {first + 1} <= set(delta.ids[name].tolist())
    assert first + 2 not in delta.ids[name].tolist()
    replica.catch_up()
    assert not replica.stale


@SCENARIOS.scenario("loads", ranks=2)
def writes_that_nothing_tells_of_are_named_by_verifying_and_can_be_marked() -> None:
    of = model()
    replica = Replica(of)
    kernel = next(kernels(of))
    kernel.split_embedding_weights()[0][3] += 1.0
    table = replica.tracker.tables[0]
    row = table.row_offset + 3
    with pytest.raises(Contradiction, match=f"table '{table.name}': rows {row} have changed, but are not marked"):
        replica.tracker.get_delta_ids(NAME)
    kernel.split_embedding_weights()[0][4] += 1.0
    replica.tracker.mark(table.name, torch.tensor([row + 1]))
    assert replica.catch_up()[table.name] >= {row, row + 1}
    assert not replica.stale


@SCENARIOS.scenario("loads", ranks=2)
def what_is_paused_is_not_verified() -> None:
    of = model()
    replica = Replica(of)
    with replica.tracker.pause():
        train(of, rows=[1], whole=[2])
    replica.tracker.step()
    taken = replica.catch_up()
    assert f"{BAGS}.rows" not in taken
    kernel = next(kernels(of))
    kernel.split_embedding_weights()[0][3] += 1.0
    with pytest.raises(Contradiction, match="have changed, but are not marked"):
        replica.tracker.add_consumer("late", TrackingMode.ID_ONLY)

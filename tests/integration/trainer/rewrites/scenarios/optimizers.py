"""T1: optimizers that move rows nobody has looked up."""

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.tbe.config.optimizer_config import EmainplaceModeDefinition
from tests.integration.trainer.rewrites.replica import Replica
from tests.integration.trainer.rewrites.scenarios import SCENARIOS
from tests.integration.trainer.torchrec_defects.models import BAGS, ROWS, bag, bags, kernels_of, sharded, train
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.sharding_plan import column_wise, row_wise, table_wise

from deltasync.base.errors import InvalidInput
from deltasync.trainer.tracking import Tracker, TrackerOptions

EVERY_ROW = set(range(ROWS))
SHARDING = {
    "rows": row_wise(compute_kernel="fused"),
    "columns": column_wise(ranks=[0, 1], compute_kernel="fused"),
    "halves": column_wise(ranks=[1, 1], compute_kernel="fused"),
    "whole": table_wise(rank=1, compute_kernel="fused"),
}


def averaged(**settings: float) -> DistributedModelParallel:
    """Whose optimizer moves the second half of each row's columns, of shards by columns too."""
    tables = bags(*(bag(name, "f", dim=16) for name in SHARDING))
    mode = EmainplaceModeDefinition(step_start=0, **settings)
    model = sharded(
        {"bags": tables}, SHARDING, optimizer=EmbOptimType.EMAINPLACE_ROWWISE_ADAGRAD, emainplace_mode=mode
    )
    for kernel in kernels_of(model):
        for weights in kernel.split_embedding_weights():
            weights.copy_(torch.rand(weights.shape))
    return model


@SCENARIOS.scenario("optimizers", ranks=2)
def averages_over_time_offer_every_row_and_other_steps_do_not() -> None:
    model = averaged(step_ema=3, step_ema_coef=0.5)
    replica = Replica(model)
    for step in range(1, 8):
        train(model, f=[step % 3])
        replica.tracker.step()
        expected = EVERY_ROW if step % 3 == 0 else {step % 3}
        assert replica.catch_up() == {f"{BAGS}.{name}": expected for name in SHARDING}, step
        assert not replica.stale


@SCENARIOS.scenario("optimizers", ranks=2)
def evaluation_counts_as_an_iteration_and_moves_nothing() -> None:
    """The kernels count it: the averages come at other steps than every third."""
    model = averaged(step_ema=3, step_ema_coef=0.5)
    replica = Replica(model)
    everything = []
    for step in range(1, 7):
        train(model, f=[1])
        replica.tracker.step()
        model.eval()
        train(model, f=[2])  # One may even train so; then there is no average.
        model.train()
        replica.tracker.step()
        taken = replica.catch_up()[f"{BAGS}.rows"]
        assert not replica.stale
        everything += [step] if taken == EVERY_ROW else []
    assert everything == [2, 5], "iterations 3 and 9 are those of training forwards"


@SCENARIOS.scenario("optimizers", ranks=2)
def an_optimizer_that_leaves_the_update_to_others_is_refused() -> None:
    model = sharded({"bags": bags("f")}, {"f": row_wise(compute_kernel="fused")})
    for kernel in kernels_of(model):
        kernel.optimizer = EmbOptimType.NONE
    with pytest.raises(InvalidInput, match=r"module 'bags', tables 'f': rows under optimizer 'none'.*other code"):
        Tracker(model)
    assert Tracker(model, TrackerOptions(fqns_to_skip=["f"])).tables == []


@SCENARIOS.scenario("optimizers", ranks=2)
def a_setting_of_a_table_on_one_rank_is_refused_on_all() -> None:
    """A rank that went on would wait for the other."""
    tables = bags(bag("f", stash_weights=True), "g")
    model = sharded({"bags": tables}, {"f": SHARDING["whole"], "g": row_wise(compute_kernel="fused")})
    with pytest.raises(InvalidInput, match=f"table '{BAGS}.f' has stash_weights=True"):
        Tracker(model)


@SCENARIOS.scenario("optimizers", ranks=2)
def hyper_parameters_may_change_at_any_time() -> None:
    model = sharded({"bags": bags("f")}, {"f": row_wise(compute_kernel="fused")})
    replica = Replica(model)
    for number, kernel in enumerate(kernels_of(model)):
        kernel.set_learning_rate(0.25 + number)
        kernel.update_hyper_parameters({"lr": 0.125, "eps": 1e-3, "weight_decay": 0.5})
    train(model, f=[3, 4])
    replica.tracker.step()
    assert replica.catch_up() == {f"{BAGS}.f": {3, 4}}
    assert not replica.stale

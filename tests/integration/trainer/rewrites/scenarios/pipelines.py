"""T2 under a pipeline: what it has sent ahead to the ranks of before is sent again, deferred tables too."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.pipelines.scenarios.micro_batches import MOVED, ROUNDING, Predicting, micro_batches
from tests.integration.trainer.pipelines.scenarios.precision import FLOAT16, HALF_ROUNDING
from tests.integration.trainer.pipelines.training import Batch, Training, farthest, through
from tests.integration.trainer.rewrites.replica import Replica, whole
from tests.integration.trainer.rewrites.resharded import by_columns, on_rank, reshard
from tests.integration.trainer.rewrites.scenarios import SCENARIOS
from tests.integration.trainer.torchrec_defects.models import bags
from torchrec.distributed.sharding_plan import row_wise

from deltasync.base.errors import Contradiction

TABLES = {
    "f": on_rank(0),
    "g": by_columns(0, 1),
    "h": on_rank(1),
    "rows": row_wise(compute_kernel="fused"),
}
BATCHES, STEPS_OF = 12, 2
DEFERRED = {"grad_accum": STEPS_OF, "accumulate_tables": True}


def training() -> Training:
    return Training(Predicting(bags=bags(*TABLES)), TABLES, tables=EmbOptimType.EXACT_ROWWISE_ADAGRAD)


def batches() -> list[Batch]:
    return micro_batches(BATCHES, *TABLES)


def moves(of: Training) -> Iterator[Callable[[], None]]:
    for rank in 1, 0, 1:
        yield lambda rank=rank: reshard(of.model, "bags", f=on_rank(rank))  # type: ignore[misc]
    yield lambda: reshard(of.model, "bags", g=by_columns(1, 0), f=on_rank(0))


def resharded_often(of: Training, **options: Any) -> Replica:
    """Trained with tables that move between steps; followed by a tracker."""
    replica, pipeline, moving = Replica(of.model), of.pipeline(**options), moves(of)
    source = iter(batches())
    for number in range(1, BATCHES + 1):
        pipeline.progress(source)
        if pipeline.stepped:
            replica.tracker.step()
            replica.catch_up()
            assert not replica.stale, f"after batch {number}"
            if number % 4 == 0 and (move := next(moving, None)):
                move()
    pipeline.detach()
    return replica


def check_like_without(allowed: float, **options: Any) -> None:
    of, without = training(), training()
    before = whole(of.model)
    resharded_often(of, **options)
    without.pipelined(batches(), **options)
    assert farthest(whole(of.model), whole(without.model)) <= allowed
    assert farthest(whole(of.model), before) > MOVED


@SCENARIOS.scenario("pipelines", ranks=2)
def batches_in_flight_are_sent_to_where_their_rows_are_now() -> None:
    check_like_without(ROUNDING)


@SCENARIOS.scenario("pipelines", ranks=2)
def tables_are_deferred_in_their_new_lookups_too() -> None:
    check_like_without(ROUNDING, **DEFERRED)


@SCENARIOS.scenario("pipelines", ranks=2, nightly=True)
def the_scale_of_the_loss_does_not_reach_them() -> None:
    check_like_without(HALF_ROUNDING, **FLOAT16, loss_scale=1024.0)


@SCENARIOS.scenario("pipelines", ranks=2)
def in_the_middle_of_a_step_of_deferred_tables_it_is_an_error() -> None:
    of = training()
    pipeline, source = of.pipeline(**DEFERRED), iter(batches())
    for _ in range(3):
        pipeline.progress(source)
    reshard(of.model, "bags", f=on_rank(1))
    for _ in range(2):
        with pytest.raises(Contradiction, match=r"resharded in the middle of an optimizer step.*`stepped`"):
            pipeline.progress(source)
    pipeline.reset()
    before = whole(of.model)
    through(pipeline, micro_batches(2, *TABLES))
    assert farthest(whole(of.model), before) > 0
    assert all(bool(torch.isfinite(rows).all()) for rows in whole(of.model).values())


@SCENARIOS.scenario("pipelines", ranks=2)
def in_the_middle_of_other_steps_it_is_none() -> None:
    of, without = training(), training()
    pipeline, source = of.pipeline(grad_accum=STEPS_OF), iter(batches())
    for number in range(BATCHES):
        pipeline.progress(source)
        if number == 2:
            reshard(of.model, "bags", f=on_rank(1))
    without.pipelined(batches(), grad_accum=STEPS_OF)
    assert farthest(whole(of.model), whole(without.model)) <= ROUNDING


@SCENARIOS.scenario("pipelines", ranks=2)
def batches_that_wait_for_the_other_mode_are_sent_again_too() -> None:
    of, without = training(), training()
    for one, moved in (of, True), (without, False):
        pipeline, source = one.pipeline(), iter(batches())
        for _ in range(3):
            pipeline.progress(source)
        one.model.eval()
        through(pipeline, micro_batches(2, *TABLES, seed=1))
        if moved:
            reshard(one.model, "bags", f=on_rank(1))
        one.model.train()
        through(pipeline, source)
        assert pipeline.trained == BATCHES
    assert farthest(whole(of.model), whole(without.model)) <= ROUNDING

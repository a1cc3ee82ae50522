"""Ranks that do not have equally many batches, or such that differ in what can be done ahead with them.

What one does not do ahead, none does.
"""

from typing import Any

import torch
import torch.distributed as dist
from tests.integration.trainer.pipelines.batches import ROWS, batches
from tests.integration.trainer.pipelines.comparison import check_like_plain, check_same
from tests.integration.trainer.pipelines.models import BOTH_RANKS, Regression
from tests.integration.trainer.pipelines.prepared import Does, Prepared, Rich, Shift, rich, shifted
from tests.integration.trainer.pipelines.scenarios import SCENARIOS
from tests.integration.trainer.pipelines.sources import Failing, Paused, despite_losses
from tests.integration.trainer.pipelines.training import Training, through
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.trainer.pipelines import LockstepBatches

# Last, since ranks that disagree end up in different collectives.
REASONS = "it writes to its input|another rank has found that it can't be called ahead"
scenario = SCENARIOS.scenario("unequal", ranks=2)


@scenario
def a_module_that_writes_to_its_input_on_one_rank() -> None:
    def written(features: KeyedJaggedTensor) -> Any:
        if dist.get_rank() == 1:
            features.values().add_(1).remainder_(ROWS)
        return shifted(features, 1)

    check_like_plain(
        Prepared(
            lambda m, b: [m.does(b.sparse), m.shift(b.sparse, 1)],
            {"does": lambda: Does(written), "shift": Shift},
            ("bags", "more"),
        ),
        refused={"does": REASONS, "bags": REASONS, "more": "its argument 0|on another rank"},
    )


@scenario
def a_batch_that_is_written_to_on_one_rank() -> None:
    def written(batch: Rich) -> None:
        if dist.get_rank() == 1 and batch.number == 0:
            batch.sparse.values().add_(1).remainder_(ROWS)

    def prepare(model: Any, batch: Any) -> Any:
        model.does(batch)
        return [batch.sparse, model.shift(batch.sparse, 1)]

    check_like_plain(
        Prepared(prepare, {"does": lambda: Does(written), "shift": Shift}, ("bags", "more")),
        refused={"bags": "its argument 0.|on another rank", "more": "its argument 0|on another rank"},
    )


@scenario
def a_call_that_fails_on_one_rank() -> None:
    def failing(features: KeyedJaggedTensor, extra: Any) -> Any:
        return shifted(features, extra.sum())

    def prepare(model: Any, batch: Any) -> Any:
        if batch.extra is not None:
            return [model.does(batch.sparse, batch.extra)]
        return [batch.sparse]

    check_like_plain(
        Prepared(prepare, {"does": lambda: Does(failing)}),
        refused={"does": "it can't be called ahead|another rank", "bags": "it can't be called ahead|another rank"},
        batches=lambda count: rich(count, extras=dist.get_rank() == 0),
    )


@scenario
def an_iterator_that_fails_on_one_rank() -> None:
    for place in (2, 4, 0, 1):
        plain, pipelined = Training(Regression(), BOTH_RANKS), Training(Regression(), BOTH_RANKS)
        places = [place] if dist.get_rank() else []
        outputs, losses = despite_losses(pipelined.pipeline(), Failing(batches(6), places))
        assert (outputs, losses) == (plain.plainly(batches(6)), len(places))
        check_same(pipelined.held(), plain.held())


class LogsOnOneRank(Regression):
    """A trace fails where forward looks at a value."""

    def forward(self, batch: Any) -> Any:
        loss, output = super().forward(batch)
        if dist.get_rank() == 0:
            float(loss)
        return loss, output


@scenario
def a_forward_that_can_be_traced_on_one_rank_only() -> None:
    plain, pipelined = Training(LogsOnOneRank(), BOTH_RANKS), Training(LogsOnOneRank(), BOTH_RANKS)
    assert pipelined.pipelined(batches(5)) == plain.plainly(batches(5))
    check_same(pipelined.held(), plain.held())


@scenario
def a_rank_that_trains_by_itself_waits_for_no_other() -> None:
    alone = dist.new_group([0])
    prepared = Prepared(lambda m, b: [m.shift(b.sparse, 1)], {"shift": Shift})
    if dist.get_rank() == 0:
        for options in {}, {"enable_amp": True, "amp_dtype": torch.float16}:
            training = Training(prepared(), group=alone)
            assert len(training.pipelined(batches(3), **options)) == 3


@SCENARIOS.scenario("together", ranks=2)
def a_rank_that_has_more_waits_and_nothing_is_lost() -> None:
    plain, pipelined = Training(Regression(), BOTH_RANKS), Training(Regression(), BOTH_RANKS)
    arriving = Paused(batches(9), [2, 5][dist.get_rank()], ends=True)
    pipeline, together = pipelined.pipeline(), LockstepBatches(arriving)
    assert through(pipeline, together) == plain.plainly(batches(2))
    arriving.arrived = [9, 7][dist.get_rank()]
    assert len(through(pipeline, together)) == 5
    assert through(pipeline, together) == []
    arriving.arrived = 9
    assert len(through(pipeline, together)) == 2
    pipeline.detach()
    plain.plainly(list(batches(9))[2:])
    check_same(pipelined.held(), plain.held())


@SCENARIOS.scenario("together", ranks=2)
def a_step_ends_where_ranks_pause() -> None:
    training = Training(Regression(), BOTH_RANKS)
    pipeline = training.pipeline(grad_accum=4)
    together = LockstepBatches(batches([6, 8][dist.get_rank()]))
    steps = []
    for _ in range(6):
        pipeline.progress(together)
        steps.append(pipeline.stepped)
    assert steps == [False, False, False, True, False, True]

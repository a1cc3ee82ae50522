"""Ranks that do not have equally many batches."""

from collections.abc import Iterator

import torch.distributed as dist
from tests.integration.trainer.pipelines.batches import Batch, batches
from tests.integration.trainer.pipelines.models import BOTH_RANKS, Regression
from tests.integration.trainer.pipelines.registry import SCENARIOS
from tests.integration.trainer.pipelines.training import Training, farthest, through

from deltasync.trainer.pipelines import LockstepBatches


class Arrivals(Iterator[Batch]):
    """Batches of which only the first so many have arrived."""

    def __init__(self, arrived: int) -> None:
        self._all, self.arrived, self.taken = list(batches(9)), arrived, 0

    def __next__(self) -> Batch:
        if self.taken == self.arrived:
            raise StopIteration
        self.taken += 1
        return self._all[self.taken - 1]


@SCENARIOS.scenario("together", ranks=2)
def a_rank_that_has_more_waits_and_nothing_is_lost() -> None:
    plain, pipelined = Training(Regression(), BOTH_RANKS), Training(Regression(), BOTH_RANKS)
    arriving = Arrivals(arrived=[2, 5][dist.get_rank()])
    pipeline, together = pipelined.pipeline(), LockstepBatches(arriving)
    assert through(pipeline, together) == plain.plainly(batches(2))
    arriving.arrived = [9, 7][dist.get_rank()]
    assert len(through(pipeline, together)) == 5
    assert through(pipeline, together) == []
    arriving.arrived = 9
    assert len(through(pipeline, together)) == 2
    pipeline.detach()
    plain.plainly(list(batches(9))[2:])
    assert farthest(pipelined.held(), plain.held()) == 0


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

"""Running: which batches are trained on, and when; on ranks, too, whose batches differ."""

import gc
import weakref
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.integration.trainer.pipelines.comparison import check_like_plain, check_same
from tests.integration.trainer.pipelines.prepared import Does, Prepared, Shift, rich, shifted
from tests.integration.trainer.pipelines.scenarios import SCENARIOS
from tests.integration.trainer.pipelines.training import (
    BOTH_RANKS,
    ROWS,
    Batch,
    Failing,
    Lost,
    Paused,
    Regression,
    Training,
    batches,
    despite_losses,
    through,
)
from tests.integration.trainer.torchrec_defects.models import CPU
from torch.profiler import profile
from torchrec.distributed.train_pipeline.train_pipelines import TrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.base.errors import InvalidInput
from deltasync.trainer.pipelines import LockstepBatches

scenario = SCENARIOS.scenario("running", ranks=2)

BATCHES = 7


def _pair(make: Any = Regression) -> tuple[Training, Training]:
    return Training(make(), BOTH_RANKS), Training(make(), BOTH_RANKS)


@scenario
def every_batch_is_trained_on_once_and_in_order() -> None:
    plain, pipelined = _pair()
    assert pipelined.pipelined(batches(BATCHES)) == plain.plainly(batches(BATCHES))
    check_same(pipelined.held(), plain.held())


@scenario
def data_never_ends() -> None:
    pipeline = Training(Regression(), BOTH_RANKS).pipeline()
    alive: list[weakref.ref[torch.Tensor]] = []

    def endless() -> Iterator[Batch]:
        while True:
            for batch in batches(4):
                alive.append(weakref.ref(batch.dense))
                yield batch
                del batch

    iterator = endless()
    for number in range(1, 20):
        pipeline.progress(iterator)
        assert len(alive) == number + 2
    gc.collect()
    assert [one() is None for one in alive] == [True] * 19 + [False] * 2


@scenario
def data_pauses_and_comes_back() -> None:
    for arrived in range(4):
        for ends in (True, False):
            plain, pipelined = _pair()
            expected, pipeline = plain.plainly(batches(BATCHES)), pipelined.pipeline()
            iterator = Paused(batches(BATCHES), arrived, ends=ends)
            assert through(pipeline, iterator) == expected[:arrived]
            assert through(pipeline, iterator) == []
            iterator.arrived = BATCHES
            assert through(pipeline, iterator) == expected[arrived:]
            check_same(pipelined.held(), plain.held())


@scenario
def nothing_is_lost_when_the_iterator_fails() -> None:
    for place, micro_batches, after in product(range(5), (1, 2), (False, True)):
        whole, pipelined = _pair()
        pipeline = pipelined.pipeline(grad_accum=micro_batches, enqueue_batch_after_forward=after)
        iterator = Failing(batches(BATCHES), [place])
        outputs = whole.pipelined(batches(BATCHES), grad_accum=micro_batches)
        assert despite_losses(pipeline, iterator) == (outputs, 1)
        assert pipeline.trained == BATCHES
        check_same(pipelined.held(), whole.held())


@scenario
def an_error_ahead_of_forward_is_told_until_batches_in_flight_are_dropped() -> None:
    def prepare(model: Any, batch: Any) -> Any:
        return [model.shift(batch.sparse, batch.number)]

    class Picky(Shift):
        def forward(self, features: Any, number: Any) -> Any:
            if number == 3:
                raise Lost
            return super().forward(features, number)

    plain, pipelined = _pair(Prepared(prepare, {"shift": Picky}))
    pipeline, iterator, outputs = pipelined.pipeline(), iter(rich(6)), []
    outputs += [pipeline.progress(iterator), pipeline.progress(iterator)]
    for _ in range(2):
        with pytest.raises(Lost) as told:
            pipeline.progress(iterator)
        assert "not_ahead" in told.value.__notes__[0]
    pipeline.reset()
    outputs += through(pipeline, iterator)
    batches = list(rich(6))
    assert outputs == plain.plainly([*batches[:2], *batches[4:]])
    check_same(pipelined.held(), plain.held())


@scenario
def a_forward_that_returns_no_output_is_refused() -> None:
    class LossAlone(Regression):
        def forward(self, batch: Any) -> Any:
            return super().forward(batch)[0]

    with pytest.raises(InvalidInput, match=r"forward returned a Tensor, expected \(loss, output\)"):
        Training(LossAlone(), BOTH_RANKS).pipeline().progress(batches(1))


@scenario
def batches_and_steps_are_counted() -> None:
    pipeline, iterator = Training(Regression(), BOTH_RANKS).pipeline(grad_accum=3), batches(7)
    assert (pipeline.trained, pipeline.stepped) == (0, False)
    seen = []
    for _ in range(7):
        pipeline.progress(iterator)
        seen.append((pipeline.trained, pipeline.stepped))
    assert seen == [(n, n in (3, 6, 7)) for n in range(1, 8)]
    with pytest.raises(StopIteration):
        pipeline.progress(iterator)
    assert (pipeline.trained, pipeline.stepped) == (7, False)


@scenario
def a_profile_has_the_ranges_of_torchrecs_pipeline() -> None:
    ours, theirs = _pair()
    pipeline = TrainPipelineSparseDist(theirs.model, theirs.optimizer, CPU)
    expected, found = _ranges(pipeline), _ranges(ours.pipeline())
    assert {"## zero_grad ##", "## wait_for_batch 0 ##", "## forward 0 ##", "## backward 0 ##"} <= expected.keys()
    assert expected.keys() <= found.keys()
    assert found["## zero_grad ##"] == expected["## zero_grad ##"] == BATCHES


def _ranges(pipeline: Any) -> dict[str, int]:
    """How often each range that a pipeline names is entered while it trains."""
    with profile() as profiled:
        through(pipeline, batches(BATCHES))
    return {event.key: event.count for event in profiled.key_averages() if event.key.startswith("## ")}


# What one rank does not do ahead, none does.

# Last, since ranks that disagree end up in different collectives.
REASONS = "it writes to its input|another rank has found that it can't be called ahead"
unequal = SCENARIOS.scenario("unequal", ranks=2)


@unequal
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


@unequal
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


@unequal
def an_iterator_that_fails_on_one_rank() -> None:
    for place in (2, 4, 0, 1):
        plain, pipelined = Training(Regression(), BOTH_RANKS), Training(Regression(), BOTH_RANKS)
        places = [place] if dist.get_rank() else []
        outputs, losses = despite_losses(pipelined.pipeline(), Failing(batches(6), places))
        assert (outputs, losses) == (plain.plainly(batches(6)), len(places))
        check_same(pipelined.held(), plain.held())


@unequal
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

"""Tables that are updated once per optimizer step: when trackers are told, what is refused, and how it ends.

Which features cannot be kept is shown by tests/unit/trainer/pipelines/test_deferred_tables.py.
"""

from typing import Any

import pytest
from tests.integration.trainer.pipelines.models import BOTH_RANKS
from tests.integration.trainer.pipelines.scenarios import SCENARIOS
from tests.integration.trainer.pipelines.scenarios.micro_batches import (
    ROUNDING,
    Predicting,
    joined,
    larger,
    micro_batches,
)
from tests.integration.trainer.pipelines.training import Training, farthest, through
from tests.integration.trainer.torchrec_defects.copies import Copy, changed, weights
from tests.integration.trainer.torchrec_defects.models import CPU, bags, lookups_of, sequences
from tests.integration.trainer.tracking.cases import CASES
from tests.integration.trainer.tracking.models import build
from torchrec.distributed.sharding_plan import data_parallel

from deltasync.core.errors import Contradiction, InvalidInput
from deltasync.trainer.pipelines import OnlinePipeline, PipelineOptions
from deltasync.trainer.tracking import Tracker, TrackerOptions, TrackingMode

DEFERRED: dict[str, Any] = {"grad_accum": 2, "accumulate_tables": True}
DENSE = ("over.weight", "over.bias")


def training() -> Training:
    return Training(Predicting(bags=bags("f", "g"), ids=sequences("g")), BOTH_RANKS)


def forwards(of: Training) -> list[Any]:
    """What has been put in the place of the forwards of lookups."""
    return [vars(lookup).get("forward") for lookup in lookups_of(of.model)]


@SCENARIOS.scenario("deferring", ranks=2)
def rows_are_reported_once_the_step_that_changes_them_is_complete() -> None:
    of = Training(
        Predicting(bags=bags("f", "g", "copies"), ids=sequences("g")),
        BOTH_RANKS | {"copies": data_parallel()},
    )
    tracker = Tracker(of.model, TrackerOptions(mode=TrackingMode.EMBEDDING_LAST, dense=True))
    copy = Copy(of.model, tracker)
    copy.update()
    pipeline = of.pipeline(grad_accum=3, accumulate_tables=True)
    source = iter(micro_batches(8, "f", "g", "copies"))
    for _ in range(8):
        before = weights(of.model)
        pipeline.progress(source)
        if pipeline.stepped:
            tracker.step()
        reported = copy.update()
        assert reported == changed(of.model, before)
        assert bool(reported) == pipeline.stepped
        copy.check(of.model)


@SCENARIOS.scenario("deferring", ranks=2)
def rows_of_a_read_within_a_step_are_reported_again_after_it() -> None:
    """They were looked up already, and have not changed yet."""
    of = training()
    tracker = Tracker(of.model, TrackerOptions(mode=TrackingMode.ID_ONLY))
    pipeline, source = of.pipeline(**DEFERRED), iter(micro_batches(2))
    before = weights(of.model)
    pipeline.progress(source)
    within = tracker.get_delta()
    tracker.acknowledge(within.token)
    pipeline.progress(source)
    tracker.step()
    tables = {name: ids for name, ids in changed(of.model, before).items() if name not in DENSE}
    assert not within.ids
    assert {name: ids.tolist() for name, ids in tracker.get_delta().ids.items()} == tables != {}


@SCENARIOS.scenario("deferring", ranks=2)
def modules_that_cannot_wait_are_refused() -> None:
    for case, why in (
        ("evictions", "module 'm[^']*'.*managed collision"),
        ("evicted-sequences", "module 'm[^']*'.*managed collision"),
        ("processed", "module 'm' learns the weights of its features"),
    ):
        model, optimizer = build(CASES[case])
        with pytest.raises(InvalidInput, match=why):
            OnlinePipeline(model, optimizer, CPU, PipelineOptions(**DEFERRED))


@SCENARIOS.scenario("deferring", ranks=2)
def a_detached_pipeline_gives_the_model_its_lookups_back() -> None:
    of, plain = training(), training()
    before = forwards(of)
    pipeline = of.pipeline(**DEFERRED)
    through(pipeline, micro_batches(4))
    assert forwards(of) != before
    pipeline.detach()
    plain.plainly(larger(micro_batches(4), 2))
    assert forwards(of) == before
    of.plainly(micro_batches(3, seed=1))
    plain.plainly(micro_batches(3, seed=1))
    assert farthest(of.held(), plain.held()) < ROUNDING


@SCENARIOS.scenario("deferring", ranks=2)
def a_pipeline_that_is_reset_begins_a_step_anew_and_leaves_nothing_of_it_to_others() -> None:
    of, plain = training(), training()
    pipeline = of.pipeline(grad_accum=3, accumulate_tables=True)
    pipeline.progress(iter(micro_batches(3)))
    pipeline.reset()
    through(pipeline, micro_batches(3, seed=1))
    plain.plainly(larger(micro_batches(3, seed=1), 3))
    assert farthest(of.held(), plain.held()) < ROUNDING
    pipeline.progress(iter(micro_batches(3)))
    pipeline.reset()
    pipeline.detach()
    of.plainly(micro_batches(3, seed=1))
    plain.plainly(micro_batches(3, seed=1))
    assert farthest(of.held(), plain.held()) < ROUNDING


@SCENARIOS.scenario("deferring", ranks=2)
def a_pipeline_that_is_attached_again_goes_on_within_a_step() -> None:
    of, plain = training(), training()
    pipeline, source = of.pipeline(**DEFERRED), iter(micro_batches(6))
    for _ in range(6):
        pipeline.progress(source)
        pipeline.detach()
    plain.plainly(larger(micro_batches(6), 2))
    assert farthest(of.held(), plain.held()) < ROUNDING


@SCENARIOS.scenario("deferring", ranks=2)
def two_pipelines_take_turns_on_one_model() -> None:
    """Whether the second has tables wait for the step as well or not, and whether they are detached in between."""
    for options in DEFERRED, {}:
        for detached in True, False:
            of, plain = training(), training()
            pipelines = [of.pipeline(**DEFERRED), of.pipeline(**options)]
            for turn in range(4):
                batches = micro_batches(2, seed=turn)
                pipeline = pipelines[turn % 2]
                through(pipeline, batches)
                if detached:
                    pipeline.detach()
                plain.plainly([joined(batches)] if turn % 2 == 0 or options else batches)
            of.plainly(micro_batches(2, seed=5))
            plain.plainly(micro_batches(2, seed=5))
            assert farthest(of.held(), plain.held()) < ROUNDING


@SCENARIOS.scenario("deferring", ranks=2)
def a_step_that_is_not_complete_is_not_mixed_with_another_pipelines() -> None:
    of = training()
    first, second = of.pipeline(grad_accum=4), of.pipeline()
    first.progress(iter(micro_batches(4)))
    with pytest.raises(Contradiction, match=r"step of another pipeline on this model is not complete: reset\(\)"):
        second.progress(iter(micro_batches(1)))
    first.reset()
    through(second, micro_batches(1))

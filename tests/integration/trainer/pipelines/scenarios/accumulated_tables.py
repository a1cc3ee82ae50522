"""Tables that are updated once per optimizer step: as by the larger batch that its micro-batches make up."""

from collections.abc import Mapping
from functools import partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from tests.integration.trainer.pipelines.scenarios import SCENARIOS
from tests.integration.trainer.pipelines.scenarios.micro_batches import (
    ROUNDING,
    Predicting,
    check_as_larger,
    iterations,
    joined,
    larger,
    micro_batches,
)
from tests.integration.trainer.pipelines.training import BOTH_RANKS, ROWS, Training, farthest, through
from tests.integration.trainer.torchrec_defects.models import (
    CPU,
    META,
    bag,
    bags,
    kernels_of,
    lookups_of,
    sequences,
)
from tests.integration.trainer.tracking.cases import CASES
from tests.integration.trainer.tracking.models import build
from torch import fx, nn
from torchrec.distributed.sharding_plan import column_wise, data_parallel, row_wise, table_wise
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.base.errors import Contradiction, InvalidInput
from deltasync.trainer.pipelines import OnlinePipeline, PipelineOptions

FUSED = {"compute_kernel": "fused"}
SECOND, BY_ROWS = table_wise(rank=1, **FUSED), row_wise(**FUSED)
BY_COLUMNS, TWO_ON_ONE = column_wise(ranks=[0, 1], **FUSED), column_wise(ranks=[1, 1], **FUSED)
OPTIMIZERS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
EVERY_WAY = {"rows": BY_ROWS, "whole": SECOND, "columns": BY_COLUMNS, "halves": TWO_ON_ONE}
# A width that halves can be kernels' widths of.
WIDE = 8


def _every_sharding(
    pooling: PoolingType = PoolingType.SUM,
    optimizer: EmbOptimType = EmbOptimType.EXACT_SGD,
    *,
    weighted: bool = False,
) -> Training:
    """Tables of each sharding, two with the same feature."""
    features = {"rows": "f", "whole": "f", "columns": "g", "halves": "g"}
    tables = [bag(name, key, dim=WIDE, pooling=pooling) for name, key in features.items()]
    model = Predicting(bags=EmbeddingBagCollection(tables=tables, device=META, is_weighted=weighted))
    return Training(model, EVERY_WAY, tables=optimizer)


def _bags_of(sharding: Mapping[str, Any], *tables: EmbeddingBagConfig) -> Training:
    return Training(Predicting(bags=bags(*(tables or sharding))), sharding)


@SCENARIOS.scenario("accumulated_tables", ranks=2)
def sums_of_rows() -> None:
    check_as_larger(partial(_every_sharding, optimizer=OPTIMIZERS[-1]), micro_batches(7), steps_of=3)


@SCENARIOS.scenario("accumulated_tables", ranks=2)
def every_optimizer_and_pooling_and_sequences() -> None:
    for pooling, optimizer in product((PoolingType.SUM, PoolingType.MEAN), OPTIMIZERS):
        check_as_larger(partial(_every_sharding, pooling, optimizer), micro_batches(7), steps_of=3)
    for pooling in PoolingType.SUM, PoolingType.MEAN:
        build = partial(_every_sharding, pooling, EmbOptimType.EXACT_ADAGRAD, weighted=True)
        check_as_larger(build, micro_batches(7, weighted=True), steps_of=3)
    names = {"a": SECOND, "b": BY_ROWS, "c": BY_COLUMNS, "d": SECOND, "e": BY_ROWS}
    for optimizer in OPTIMIZERS:
        check_as_larger(
            lambda optimizer=optimizer: Training(Predicting(ids=sequences(*names)), names, tables=optimizer),  # type: ignore[misc]
            micro_batches(7, *names),
            steps_of=3,
        )


@SCENARIOS.scenario("accumulated_tables", ranks=2)
def kernels_of_several_tables_beside_others() -> None:
    widths = [bag("a", "f", dim=4), bag("b", "g", dim=12), bag("c", "f", "g", dim=8)]
    check_as_larger(lambda: _bags_of(dict.fromkeys("abc", SECOND), *widths), micro_batches(8), steps_of=4)
    # In one lookup: bags that are added up, such that are averaged, and one whose kernel is not fused.
    kernels = [bag("a", "f"), bag("b", "g", pooling=PoolingType.MEAN), bag("c", "f", "g")]
    sharding = {"a": SECOND, "b": SECOND, "c": table_wise(rank=1, compute_kernel="dense")}
    check_as_larger(lambda: _bags_of(sharding, *kernels), micro_batches(7), steps_of=3)
    # A table that every rank has.
    check_as_larger(lambda: _bags_of({"f": data_parallel(), "g": BY_ROWS}), micro_batches(7), steps_of=3)
    # Bags and sequences of the same features.
    check_as_larger(_of_both_kinds, micro_batches(8), steps_of=4)
    # Rows of float16: one step, which rounds once. Sums in another order may round to the neighbouring number.
    halves = [bag(name, dim=WIDE, data_type=DataType.FP16) for name in "fg"]
    build = partial(_bags_of, {"f": BY_ROWS, "g": SECOND}, *halves)
    check_as_larger(build, micro_batches(4), steps_of=4, tolerance=2**-11)


@SCENARIOS.scenario("accumulated_tables", ranks=2)
def gradients_that_are_clipped_are_those_of_the_step() -> None:
    def build() -> Training:
        training = _every_sharding()
        norm = {"clipping": GradientClipping.NORM, "max_gradient": 0.05}
        training.optimizer = GradientClippingOptimizer(training.optimizer, **norm)
        return training

    check_as_larger(build, micro_batches(8), steps_of=2)


@SCENARIOS.scenario("accumulated_tables", ranks=2)
def micro_batches_without_an_id_on_some_or_all_ranks() -> None:
    """Ids of the first half of the rows: the other rank, which holds the rest, looks nothing up."""
    without, some = micro_batches(6, below=0), micro_batches(6)
    for make in _bags_by_rows, _sequences_by_rows:
        check_as_larger(make, micro_batches(6, below=ROWS // 2), steps_of=3)
        check_as_larger(make, [without[0], some[0], some[1], *without[1:4], *some[2:4], without[4]], steps_of=3)


def _bags_by_rows() -> Training:
    return _bags_of({"f": BY_ROWS, "g": BY_ROWS})


def _sequences_by_rows() -> Training:
    return Training(Predicting(ids=sequences("f", "g")), {"f": BY_ROWS, "g": BY_ROWS})


@fx.wrap
def _other_ids(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(features.keys(), (features.values() + 5) % ROWS, lengths=features.lengths())


class CalledTwice(Predicting):
    """Looks up in one collection what a batch has, and other ids."""

    twice: nn.Module

    def __init__(self) -> None:
        super().__init__(twice=bags("f", "g"))

    def predicted(self, batch: Any) -> torch.Tensor:
        found = self.twice(batch.sparse).values() - 2 * self.twice(_other_ids(batch.sparse)).values()
        predicted: torch.Tensor = self.over(torch.cat([found, batch.dense], dim=1)).squeeze(1)
        return predicted


@SCENARIOS.scenario("accumulated_tables", ranks=2)
def a_collection_that_is_called_twice_in_one_forward() -> None:
    check_as_larger(lambda: Training(CalledTwice(), {"f": BY_ROWS, "g": SECOND}), micro_batches(7), steps_of=3)


@SCENARIOS.scenario("accumulated_tables", ranks=2)
def kernels_count_optimizer_steps_as_iterations_and_no_evaluation() -> None:
    training = _of_both_kinds()
    pipeline = training.pipeline(grad_accum=3, accumulate_tables=True)
    for batch in micro_batches(4):
        through(pipeline, [batch] * 5)
        training.model.eval()
        with torch.no_grad():
            through(pipeline, [batch])
        training.model.train()
    assert iterations(training) == [8] * len(iterations(training)) != []


@SCENARIOS.scenario("accumulated_tables", ranks=2)
def kernels_go_on_counting_where_a_checkpoint_was() -> None:
    """FBGEMM takes up the saved count in the first lookup of a kernel."""
    training = _of_both_kinds()
    for kernel in kernels_of(training.model):
        kernel.iter.fill_(100)
    training.pipelined(micro_batches(4), grad_accum=2, accumulate_tables=True)
    assert iterations(training) == [102] * len(iterations(training))


def _of_both_kinds() -> Training:
    model = Predicting(bags=bags("f", "g"), ids=sequences("f", "g"))
    return Training(model, {"f": BY_ROWS, "g": SECOND}, tables=EmbOptimType.EXACT_ROWWISE_ADAGRAD)


@SCENARIOS.scenario("accumulated_tables", ranks=2)
def a_lookup_that_fails_leaves_kernels_as_they_were() -> None:
    training = _bags_by_rows()
    pipeline = training.pipeline(grad_accum=2, accumulate_tables=True)
    kernels = list(kernels_of(training.model))
    with patch.object(kernels[0], "forward", side_effect=KeyError("no rows")), pytest.raises(KeyError):
        through(pipeline, micro_batches(1))
    assert all(kernel.training for kernel in kernels)


# What is refused, and how it ends. tests/integration/trainer/tracking shows when trackers are told, and
# tests/unit/trainer/pipelines/test_deferred_tables.py which features cannot be kept.

DEFERRED: dict[str, Any] = {"grad_accum": 2, "accumulate_tables": True}


def training() -> Training:
    return Training(Predicting(bags=bags("f", "g"), ids=sequences("g")), BOTH_RANKS)


def forwards(of: Training) -> list[Any]:
    """What has been put in the place of the forwards of lookups."""
    return [vars(lookup).get("forward") for lookup in lookups_of(of.model)]


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
def a_reset_pipeline_begins_a_new_step_and_leaves_no_gradients() -> None:
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

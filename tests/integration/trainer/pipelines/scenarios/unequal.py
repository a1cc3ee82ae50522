"""Ranks whose batches differ in what can be done ahead with them: what one does not do ahead, none does."""

from typing import Any

import torch
import torch.distributed as dist
from tests.integration.trainer.pipelines.batches import ROWS, batches
from tests.integration.trainer.pipelines.comparison import check_like_plain, check_same
from tests.integration.trainer.pipelines.models import BOTH_RANKS, Regression
from tests.integration.trainer.pipelines.prepared import Does, Prepared, Rich, Shift, rich, shifted
from tests.integration.trainer.pipelines.registry import SCENARIOS
from tests.integration.trainer.pipelines.sources import Failing, despite_losses
from tests.integration.trainer.pipelines.training import Training
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

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

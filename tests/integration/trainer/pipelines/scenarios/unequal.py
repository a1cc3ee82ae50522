"""Ranks whose batches differ in what can be done ahead with them: what one does not do ahead, none does."""

from typing import Any

import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.integration.trainer.pipelines.batches import ROWS, batches
from tests.integration.trainer.pipelines.comparing import check_like_plain, check_same
from tests.integration.trainer.pipelines.models import BOTH_RANKS, Regression
from tests.integration.trainer.pipelines.prepared import Does, Prepared, Rich, Shift, rich, shifted
from tests.integration.trainer.pipelines.registry import SCENARIOS
from tests.integration.trainer.pipelines.sources import Failing, despite_losses
from tests.integration.trainer.pipelines.training import Training

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

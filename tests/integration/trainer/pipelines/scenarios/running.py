"""Running: which batches are trained on, and when."""

from tests.integration.trainer.pipelines.batches import batches
from tests.integration.trainer.pipelines.models import BOTH_RANKS, Regression
from tests.integration.trainer.pipelines.registry import SCENARIOS
from tests.integration.trainer.pipelines.training import Training, farthest


@SCENARIOS.scenario("running", ranks=2)
def every_batch_is_trained_on_once_and_in_order() -> None:
    plain, pipelined = Training(Regression(), BOTH_RANKS), Training(Regression(), BOTH_RANKS)
    assert pipelined.pipelined(batches(7)) == plain.plainly(batches(7))
    assert farthest(pipelined.held(), plain.held()) == 0

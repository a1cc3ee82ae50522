"""What modules change by being called: called ahead, an evaluation in between would find another state."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.integration.trainer.pipelines.comparison import check_reasons, check_same, told
from tests.integration.trainer.pipelines.prepared import shifted
from tests.integration.trainer.pipelines.scenarios import SCENARIOS
from tests.integration.trainer.pipelines.scenarios.state import Prepares
from tests.integration.trainer.pipelines.training import BOTH_RANKS, Training, batches, through
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.base.errors import Contradiction

scenario = SCENARIOS.scenario("own state", ranks=2)


class Counts(nn.Module):
    """Adds the number of its calls before, where it counts them."""

    def __init__(self, counts: Callable[[nn.Module, torch.Tensor], bool]) -> None:
        super().__init__()
        self.calls, self._counts = [0], counts

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        made = shifted(features, self.calls[0])
        self.calls[0] += self._counts(self, features.values())
        return made


def _with_an_evaluation(counts: Callable[[nn.Module, torch.Tensor], bool], **options: Any) -> dict[str, str]:
    """Train, evaluate and train, with and without the pipeline; why modules are left to forward."""
    plain, pipelined = (Training(Prepares(Counts(counts)), BOTH_RANKS) for _ in range(2))
    expected = plain.plainly(batches(3))
    plain.model.eval()
    expected += [plain.model(batch)[1] for batch in batches(2, seed=1)]
    plain.model.train()
    expected += plain.plainly(list(batches(7))[3:])
    pipeline, stream = pipelined.pipeline(**options), batches(7)
    with told() as reasons:
        outputs = [pipeline.progress(stream) for _ in range(3)]
        pipelined.model.eval()
        outputs += through(pipeline, batches(2, seed=1))
        pipelined.model.train()
        outputs += through(pipeline, stream)
    assert outputs == expected
    check_same(pipelined.held(), plain.held())
    return reasons


@scenario
def a_module_that_counts_its_calls() -> None:
    changes = "it changes its attribute 'calls' when it is called"
    check_reasons(_with_an_evaluation(lambda *_: True), {"prepare": changes, "bags": changes})


@scenario
def a_module_that_counts_some_of_its_calls() -> None:
    """Where a later batch is the first that is counted, it is an error, unless the module is not ahead."""

    def counts(_: nn.Module, ids: torch.Tensor) -> bool:
        return torch.equal(ids, fourth)

    fourth = list(batches(4))[3].sparse.values()
    with pytest.raises(Contradiction, match="it has changed its attributes; it cannot be pipelined"):
        _with_an_evaluation(counts)
    named = "it is named in not_ahead"
    check_reasons(_with_an_evaluation(counts, not_ahead=["prepare"]), {"prepare": named, "bags": named})

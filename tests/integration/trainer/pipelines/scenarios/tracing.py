"""Tracing a model, to see what can be done ahead, leaves it as it is."""

from typing import Any

import torch
from tests.integration.trainer.pipelines.comparison import check_like_plain
from tests.integration.trainer.pipelines.prepared import Prepared, Shift, rich
from tests.integration.trainer.pipelines.scenarios import SCENARIOS
from torch import nn

scenario = SCENARIOS.scenario("tracing", ranks=2)

OFFSET = torch.tensor([11])


def _around(change: Any) -> None:
    """A model whose loss, and nothing that is done ahead, depends on what `change` returns."""

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Prepared(lambda m, b: [m.shift(b.sparse, 1)], {"shift": Shift})()
            self.register_buffer("seen", torch.zeros(1))
            self.rebound: Any = torch.zeros(1)
            self.dropout = nn.Dropout(0.5)
            torch.manual_seed(5)

        def forward(self, batch: Any) -> Any:
            loss, _ = self.inner(batch)
            loss = self.dropout(loss * change(self)).sum()
            return loss, loss.detach()

    def seeded(count: int) -> Any:
        torch.manual_seed(5)
        yield from rich(count)

    check_like_plain(Around, ahead={"inner.shift": 1}, batches=seeded)


@scenario
def a_buffer_that_forward_writes_to() -> None:
    def counted(model: Any) -> Any:
        model.seen += 1
        return model.seen.clone()

    _around(counted)


@scenario
def what_forward_replaces_and_random_numbers_that_it_draws() -> None:
    def rebound(model: Any) -> Any:
        model.seen = model.seen + 1
        return model.seen

    def kept(model: Any) -> Any:
        model.rebound = model.rebound + 1
        return model.rebound

    for change in rebound, kept, lambda _: torch.rand(1):
        _around(change)


@scenario
def a_tensor_of_nobody_is_an_input() -> None:
    make = Prepared(lambda m, b: [m.shift(b.sparse, OFFSET)], {"shift": Shift})
    check_like_plain(make, ahead={"shift": 1})

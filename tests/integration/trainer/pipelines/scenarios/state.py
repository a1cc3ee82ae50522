"""What a module's results depend on beside its arguments, changed by others while its work is done ahead."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from tests.integration.trainer.pipelines.comparison import check_like_plain, check_same
from tests.integration.trainer.pipelines.prepared import Prepared, Shift, rich, shifted, with_values
from tests.integration.trainer.pipelines.scenarios import SCENARIOS
from tests.integration.trainer.pipelines.training import (
    BOTH_RANKS,
    ROWS,
    Batch,
    Regression,
    Training,
    batches,
    through,
)
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.base.errors import Contradiction

scenario = SCENARIOS.scenario("state", ranks=2)


class Prepares(Regression):
    """Looks up what a module makes of the ids; `before` and `after` may do something to the model."""

    def __init__(
        self,
        prepare: nn.Module,
        before: Callable[[Any, Any], None] = lambda *_: None,
        after: Callable[[Any], None] = lambda _: None,
    ) -> None:
        super().__init__()
        self.prepare, self._before, self._after = prepare, before, after

    def looked_up(self, batch: Any) -> torch.Tensor:
        self._before(self, batch)
        found = super().looked_up(Batch(self.prepare(batch.sparse), batch.dense, batch.label))
        self._after(self)
        return found


class Offset(nn.Module):
    """Adds a buffer, an attribute, and whether it trains."""

    offset: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.ones(1, dtype=torch.int64))
        self.salt = 1

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        return shifted(features, self.offset + self.salt + self.training)


class Reused(nn.Module):
    """Returns the same memory each time."""

    def __init__(self) -> None:
        super().__init__()
        self.out = torch.zeros(100, dtype=torch.int64)

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        out = self.out[: features.values().numel()]
        out.copy_((features.values() + 1) % ROWS)
        return with_values(features, out)


def is_like_plain(
    make: Callable[[], nn.Module], stream: Callable[[], Iterable[Any]] = lambda: batches(6), **options: Any
) -> None:
    plain, pipelined = Training(make(), BOTH_RANKS), Training(make(), BOTH_RANKS)
    assert pipelined.pipelined(stream(), **options) == plain.plainly(stream())
    check_same(pipelined.held(), plain.held())


@scenario
def memory_that_is_used_for_every_result() -> None:
    is_like_plain(lambda: Prepares(Reused()))


@scenario
def a_change_after_its_use_is_an_error_unless_the_module_is_not_ahead() -> None:
    def replace(model: Any) -> None:
        model.prepare.offset = model.prepare.offset + 1

    def salt(model: Any) -> None:
        model.prepare.salt += 1

    for change in replace, salt:
        with pytest.raises(Contradiction, match="not_ahead"):
            Training(Prepares(Offset(), after=change), BOTH_RANKS).pipelined(batches(6))
        is_like_plain(lambda change=change: Prepares(Offset(), after=change), not_ahead=["prepare"])  # type: ignore[misc]


@scenario
def an_attribute_that_changes_during_evaluation_is_an_error() -> None:
    def by_pipeline(training: Training, pipeline: Any) -> None:
        training.model.eval()
        through(pipeline, batches(1, seed=1))
        training.model.train()

    def by_model(training: Training, _: Any) -> None:
        training.model(next(batches(1, seed=1)))

    for evaluate in by_pipeline, by_model:
        training = Training(Prepares(Offset()), BOTH_RANKS)
        pipeline, stream = training.pipeline(), batches(6)
        pipeline.progress(stream)
        training.model.module.prepare.salt += 1
        evaluate(training, pipeline)
        with pytest.raises(Contradiction, match="not_ahead"):
            pipeline.progress(stream)


@scenario
def a_call_that_is_not_claimed_before_others_of_its_module() -> None:
    class Twice(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.prepare, self.writes = ByOther(), Writes()

        def looked_up(self, batch: Any) -> torch.Tensor:
            self.writes(batch.dense)
            self.prepare(batch.sparse, batch.dense)
            found: torch.Tensor = self.bags(self.prepare(batch.sparse, batch.label)).values()
            return found

    is_like_plain(Twice)


class ByOther(nn.Module):
    def forward(self, features: KeyedJaggedTensor, other: torch.Tensor) -> KeyedJaggedTensor:
        return shifted(features, int(other.abs().sum() * 10))


class Writes(nn.Module):
    def forward(self, values: torch.Tensor) -> None:
        values.add_(1)


@scenario
def a_forward_that_failed_is_run_again() -> None:
    class Fails(Regression):
        fails = True

        def forward(self, batch: Any) -> Any:
            found = super().forward(batch)
            if self.fails and not isinstance(found[0], torch.fx.Proxy):
                raise RuntimeWarning("once")
            return found

    plain, pipelined = Training(Regression(), BOTH_RANKS), Training(Fails(), BOTH_RANKS)
    pipeline, stream = pipelined.pipeline(), batches(4)
    with pytest.raises(RuntimeWarning, match="once"):
        pipeline.progress(stream)
    pipelined.model.module.fails = False
    assert through(pipeline, stream) == plain.plainly(batches(4))
    check_same(pipelined.held(), plain.held())


# Tracing a model, to see what can be done ahead, leaves it as it is.

tracing = SCENARIOS.scenario("tracing", ranks=2)


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


@tracing
def a_buffer_that_forward_writes_to() -> None:
    def counted(model: Any) -> Any:
        model.seen += 1
        return model.seen.clone()

    _around(counted)


@tracing
def what_forward_replaces_and_random_numbers_that_it_draws() -> None:
    def rebound(model: Any) -> Any:
        model.seen = model.seen + 1
        return model.seen

    def kept(model: Any) -> Any:
        model.rebound = model.rebound + 1
        return model.rebound

    for change in rebound, kept, lambda _: torch.rand(1):
        _around(change)

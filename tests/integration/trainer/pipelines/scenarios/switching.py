"""Switching: several pipelines on one model in turn, and evaluation in between."""

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from tests.integration.trainer.pipelines.comparison import attributes, calls_of, check_same, told
from tests.integration.trainer.pipelines.prepared import Prepared, PreparedModel, Shift, rich
from tests.integration.trainer.pipelines.scenarios import SCENARIOS
from tests.integration.trainer.pipelines.training import BOTH_RANKS, Regression, Training, batches, through
from tests.integration.trainer.torchrec_defects.models import CPU
from torch import nn
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from deltasync.base.errors import Contradiction
from deltasync.trainer.pipelines import accept_tensordicts

scenario = SCENARIOS.scenario("switching", ranks=2)

BATCHES = 9


def _pair() -> tuple[Training, Training]:
    """One collection's ids are taken from the batch, another one's are made in forward."""
    make = Prepared(
        lambda m, b: [b.sparse, m.shift(m.shift(b.sparse, b.number), 2)], {"shift": Shift}, ("bags", "more")
    )
    return Training(make(), BOTH_RANKS), Training(make(), BOTH_RANKS)


def _theirs(training: Training) -> Any:
    return TrainPipelineSparseDist(training.model, training.optimizer, CPU, execute_all_batches=True)


def _check_in_turn(*makes: Callable[[Training], Any], switch: Callable[[Any, Any], None]) -> None:
    """Pipelines take turns on one model, each with an iterator of its own, for one to three batches at a time."""
    plain, pipelined = _pair()
    pipelines = [make(pipelined) for make in makes]
    iterators, others = ([rich(BATCHES) for _ in makes] for _ in range(2))
    outputs, expected = [], []
    last: Any = None
    with told() as reasons:
        for number, turn in _turns(len(makes)):
            switch(last, last := pipelines[number])
            outputs += [last.progress(iterators[number]) for _ in range(turn)]
            expected += plain.plainly(islice(others[number], turn))
    assert reasons == {}
    assert outputs == expected
    check_same(pipelined.held(), plain.held())


def _turns(players: int) -> Iterator[tuple[int, int]]:
    """Who plays how many batches, until all have played all of theirs."""
    for turn in (1, 3, 2, BATCHES - 6):
        for player in range(players):
            yield player, turn


def _nothing(*_: Any) -> None:
    pass


def _detach(last: Any, following: Any) -> None:
    if hasattr(last, "detach"):
        last.detach()


def _detach_and_attach(last: Any, following: Any) -> None:
    _detach(last, following)
    if last is not None and hasattr(following, "attach"):
        following.attach()


@scenario
def two_take_turns() -> None:
    _check_in_turn(Training.pipeline, Training.pipeline, switch=_nothing)


@scenario
def two_that_are_detached_take_turns_also_with_torchrecs_own() -> None:
    for switch in (_detach, _detach_and_attach):
        _check_in_turn(Training.pipeline, Training.pipeline, switch=switch)
    _check_in_turn(Training.pipeline, _theirs, switch=_detach)
    _check_in_turn(_theirs, Training.pipeline, switch=_detach_and_attach)


@scenario
def torchrecs_own_is_still_attached() -> None:
    plain, pipelined = _pair()
    theirs, ours, order = _theirs(pipelined), pipelined.pipeline(), list(rich(8))
    first, second = iter(order[:4]), iter(order[4:])
    theirs.progress(first)
    with pytest.raises(Contradiction, match="'bags' is attached to another pipeline; detach\\(\\) that one first"):
        ours.progress(second)
    theirs.detach()
    outputs = through(ours, second)
    ours.detach()
    outputs += through(theirs, first)
    expected = plain.plainly([order[0], *order[4:], *order[1:4]])
    assert outputs == expected[1:]
    check_same(pipelined.held(), plain.held())


@scenario
def torchrecs_own_is_attached_meanwhile() -> None:
    plain, pipelined = (Training(Regression(), BOTH_RANKS) for _ in range(2))
    theirs, ours, order = _theirs(pipelined), pipelined.pipeline(), list(batches(8))
    first, second = iter(order[:4]), iter(order[4:])
    ours.progress(first)
    theirs.progress(second)
    with pytest.raises(Contradiction, match="something else has taken the place of this pipeline's forward"):
        ours.progress(first)
    theirs.detach()
    outputs = through(ours, first)
    expected = plain.plainly([order[0], order[4], *order[1:4]])
    assert outputs == expected[2:]
    check_same(pipelined.held(), plain.held())


class Moded(PreparedModel):
    """Looks up other ids in evaluation than in training, and drops out some of what it found."""

    def __init__(self) -> None:
        super().__init__(
            Prepared(lambda m, b: [m.shift(b.sparse, 1 if m.training else b.amount)], {"shift": Shift})
        )
        self.dropout = nn.Dropout(0.5)

    def forward(self, batch: Any) -> Any:
        loss, _ = super().forward(batch)
        loss = self.dropout(loss)
        return loss, loss.detach()


@scenario
def batches_are_evaluated_while_others_wait_to_be_trained_on() -> None:
    plain, pipelined = Training(Moded(), BOTH_RANKS), Training(Moded(), BOTH_RANKS)
    torch.manual_seed(3)
    expected = plain.plainly(rich(3))
    plain.model.eval()
    with torch.no_grad():
        evaluated = [plain.model(batch)[1] for batch in rich(4)]
    plain.model.train()
    expected += plain.plainly(list(rich(BATCHES))[3:])
    pipeline, iterator, seen = pipelined.pipeline(), rich(BATCHES), []
    torch.manual_seed(3)
    outputs = [pipeline.progress(iterator) for _ in range(3)]
    before = pipelined.held()
    pipelined.model.eval()
    with torch.no_grad():
        seen += through(pipeline, rich(4))
    assert (pipeline.trained, pipeline.stepped) == (3, False)
    check_same(pipelined.held(), before)
    pipelined.model.train()
    outputs += through(pipeline, iterator)
    assert pipeline.trained == BATCHES
    assert (outputs, seen) == (expected, evaluated)
    check_same(pipelined.held(), plain.held())


@scenario
def detach_gives_the_model_back_as_it_was() -> None:
    plain, pipelined = _pair()
    accept_tensordicts(plain.model)
    pipeline, iterator, order = pipelined.pipeline(), rich(BATCHES), list(rich(BATCHES))
    pipeline.progress(iterator)
    plain.plainly(order[:1])
    assert pipeline.detach() is pipelined.model
    assert attributes(pipelined.model) == attributes(plain.model)
    calls = calls_of(pipelined.model)
    assert pipelined.plainly(order[:1]) == plain.plainly(order[:1])
    assert calls_of(pipelined.model)["shift"] == calls["shift"] + 2
    outputs = [pipeline.progress(iterator)]
    pipeline.detach()
    pipeline.detach()
    pipeline.attach()
    outputs += through(pipeline, iterator)
    assert outputs == plain.plainly(order[1:])
    check_same(pipelined.held(), plain.held())


@scenario
def a_pipeline_stays_with_its_model() -> None:
    one, other = Training(Regression(), BOTH_RANKS), Training(Regression(), BOTH_RANKS)
    pipeline = one.pipeline()
    pipeline.attach(one.model)
    with pytest.raises(Contradiction, match="a pipeline stays with its model"):
        pipeline.attach(other.model)
    assert through(pipeline, batches(2)) == other.plainly(batches(2))

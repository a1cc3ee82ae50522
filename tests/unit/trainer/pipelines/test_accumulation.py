from dataclasses import dataclass

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deltasync.trainer.pipelines.online_pipeline import AccumulationCycle


def cycle(micro_batches: int) -> AccumulationCycle:
    return AccumulationCycle(nn.Linear(1, 1), micro_batches)


@dataclass
class Step:
    """What a step must be: its micro-batches, by number."""

    numbers: list[int]
    correction: float


def steps(micro_batches: int, last: list[bool]) -> list[Step]:
    """Cycles of this number of micro-batches, and shorter ones at the end of the data."""
    found, numbers = list[Step](), list[int]()
    for number, is_last in enumerate(last):
        numbers.append(number)
        if is_last or len(numbers) == micro_batches:
            found.append(Step(numbers, micro_batches / len(numbers)))
            numbers = []
    return found


@given(st.integers(1, 8), st.lists(st.booleans(), max_size=40))
def test_steps(micro_batches: int, last: list[bool]) -> None:
    tried, found, numbers = cycle(micro_batches), list[Step](), list[int]()
    for number, is_last in enumerate(last):
        if tried.begins:
            numbers = []
        closes = tried.closes(last=is_last)
        with tried.micro_batch(closes=closes):
            numbers.append(number)
        if closes:
            found.append(Step(numbers, tried.close()))
    assert found == steps(micro_batches, last)


@given(st.integers(1, 8), st.integers(1, 8))
def test_shares_and_correction_make_the_mean(micro_batches: int, there_are: int) -> None:
    there_are = min(there_are, micro_batches)
    tried = cycle(micro_batches)
    losses = [torch.tensor(float(number)) for number in range(there_are)]
    together = torch.tensor(0.0)
    for number, loss in enumerate(losses):
        with tried.micro_batch(closes=tried.closes(last=number + 1 == there_are)):
            together = together + tried.share(loss)
    assert float(together) * tried.close() == pytest.approx(sum(map(float, losses)) / there_are)


def test_the_loss_of_a_step_of_one_stays_as_it_is() -> None:
    loss = torch.tensor(0.1)
    assert cycle(1).share(loss) is loss


def test_a_micro_batch_that_fails_does_not_count() -> None:
    tried = cycle(2)
    with pytest.raises(KeyError), tried.micro_batch(closes=False):
        raise KeyError
    assert tried.begins
    with tried.micro_batch(closes=False):
        pass
    assert not tried.begins
    assert tried.closes(last=False)

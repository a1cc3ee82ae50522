"""Any order of what one may do with pipelines: the same batches are trained on, in the same order, as plainly."""

from collections.abc import Callable, Iterator
from random import Random
from typing import Any

import torch
from tests.integration.trainer.pipelines.comparison import check_same
from tests.integration.trainer.pipelines.prepared import Prepared, Shift
from tests.integration.trainer.pipelines.scenarios import SCENARIOS
from tests.integration.trainer.pipelines.training import BOTH_RANKS, Batch, Training, batches

ACTIONS = 60
MODEL = Prepared(lambda m, b: [m.shift(m.shift(b.sparse, 1), 4)], {"shift": Shift})


class Arrivals(Iterator[Batch | None]):
    """Batches that arrive when they are told to; None while there are none."""

    def __init__(self, seed: int) -> None:
        self._batches, self.waiting, self.taken = batches(1000, seed=seed), 0, 0

    def __next__(self) -> Batch | None:
        if not self.waiting:
            return None
        self.waiting, self.taken = self.waiting - 1, self.taken + 1
        return next(self._batches)


class Program:
    """Two pipelines on one model, each with an iterator to train on and one to evaluate, at random."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self.pipelined, self._plain = Training(MODEL(), BOTH_RANKS), Training(MODEL(), BOTH_RANKS)
        self._pipelines = [self.pipelined.pipeline() for _ in range(2)]
        self._trains = [Arrivals(seed) for seed in range(2)]
        self._evaluates = [Arrivals(seed) for seed in range(2, 4)]
        self._trained: list[Iterator[Batch]] = [batches(1000, seed=seed) for seed in range(2)]
        self._evaluated: list[Iterator[Batch]] = [batches(1000, seed=seed) for seed in range(2, 4)]

    def run(self) -> None:
        actions: list[Callable[[int], None]] = [self.train, self.train, self.train, self.evaluate]
        actions += [self.arrive, self.call, self.detach]
        for _ in range(ACTIONS):
            self._random.choice(actions)(self._random.randrange(2))
        for number in range(2):
            while self.progressed(number, self._trains[number]) is not None:
                self._outputs_are_equal()
        assert [len(pipeline.batches) for pipeline in self._pipelines] == [0, 0]
        check_same(self.pipelined.held(), self._plain.held())

    def train(self, number: int) -> None:
        if self.progressed(number, self._trains[number]) is not None:
            self._outputs_are_equal()

    def progressed(self, number: int, arrivals: Arrivals) -> Any:
        """The output of the next batch of a pipeline in training mode, after training on the same plainly."""
        self.pipelined.model.train()
        try:
            self._output = self._pipelines[number].progress(arrivals)
        except StopIteration:
            return None
        [self._expected] = self._plain.plainly([next(self._trained[number])])
        return self._output

    def evaluate(self, number: int) -> None:
        self.pipelined.model.eval()
        try:
            self._output = self._pipelines[number].progress(self._evaluates[number])
        except StopIteration:
            return
        self._expected = self._plainly_evaluated(next(self._evaluated[number]))
        self._outputs_are_equal()

    def call(self, _: int) -> None:
        batch = next(batches(1, seed=9))
        self.pipelined.model.eval()
        with torch.no_grad():
            self._output = self.pipelined.model(batch)[1]
        self._expected = self._plainly_evaluated(batch)
        self._outputs_are_equal()

    def arrive(self, number: int) -> None:
        self._trains[number].waiting += self._random.randrange(5)
        self._evaluates[number].waiting += self._random.randrange(3)

    def detach(self, number: int) -> None:
        self._pipelines[number].detach()

    def _plainly_evaluated(self, batch: Batch) -> Any:
        self._plain.model.eval()
        with torch.no_grad():
            output = self._plain.model(batch)[1]
        self._plain.model.train()
        return output

    def _outputs_are_equal(self) -> None:
        assert torch.equal(self._output, self._expected)


@SCENARIOS.scenario("programs", ranks=2, nightly=True)
def any_order_of_actions() -> None:
    for seed in range(12):
        Program(seed).run()

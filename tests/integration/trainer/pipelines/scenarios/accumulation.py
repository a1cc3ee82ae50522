"""Gradient accumulation: when parameters step, with which gradients, and what ranks exchange."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from tests.integration.trainer.pipelines.scenarios import SCENARIOS
from tests.integration.trainer.pipelines.scenarios.micro_batches import (
    ROUNDING,
    Predicting,
    check_as_larger,
    equal_on_ranks,
    larger,
    micro_batches,
    where_used,
)
from tests.integration.trainer.pipelines.training import BOTH_RANKS, WIDTH, Batch, Training, farthest, through
from tests.integration.trainer.torchrec_defects.models import bags
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper
from torchrec.distributed.sharding_plan import data_parallel, row_wise

# What DDP wants a hook to say that it takes.
Bucket: Any = vars(dist)["GradBucket"]

COPIES = {"f": data_parallel(), "g": row_wise(compute_kernel="fused")}


def training(sharding: Any = BOTH_RANKS) -> Training:
    return Training(Predicting(bags=bags("f", "g")), sharding)


def dense(of: Training) -> torch.Tensor:
    """All values that are the same on every rank, in one."""
    held = of.held()
    return torch.cat([held["over.weight"].flatten(), held["over.bias"].flatten()])


@SCENARIOS.scenario("accumulation", ranks=2, nightly=True)
def micro_batches_train_as_the_larger_batches_that_they_make_up() -> None:
    """Any number of them, and whatever is left for the next step."""
    for count in 1, 2, 3, 4, 8:
        for rest in range(count):
            check_as_larger(training, micro_batches(count + rest), steps_of=count)


@SCENARIOS.scenario("accumulation", ranks=2)
def sums_of_the_losses_of_a_batch_are_divided_as_well() -> None:
    """A model may return a loss for each of its tasks."""

    class TwoTasks(Predicting):
        def forward(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
            predicted = self.predicted(batch)
            errors = (predicted - batch.label).square().mean(), (predicted - 1).abs().mean()
            return torch.stack(errors), predicted.detach()

    of_each, summed = (Training(TwoTasks(bags=bags("f", "g")), BOTH_RANKS) for _ in range(2))
    of_each.pipelined(micro_batches(6), grad_accum=3, accumulate_tables=True)
    for batch in larger(micro_batches(6), 3):
        summed.optimizer.zero_grad()
        summed.model(batch)[0].sum().backward()
        summed.optimizer.step()
    assert farthest(of_each.held(), summed.held()) < ROUNDING


@SCENARIOS.scenario("accumulation", ranks=2)
def parameters_change_where_a_step_is_complete_and_nowhere_else() -> None:
    for tables_too in False, True:
        of = training()
        pipeline = of.pipeline(grad_accum=3, accumulate_tables=tables_too)
        source, moved, stepped, tables_moved = iter(micro_batches(8)), [], [], []
        for _ in range(8):
            before = of.held()
            pipeline.progress(source)
            now = of.held()
            changed = {
                name for name in now if not torch.equal(now[name].nan_to_num(0), before[name].nan_to_num(0))
            }
            moved.append("over.weight" in changed)
            tables_moved.append(any("embedding" in name for name in changed))
            stepped.append(pipeline.stepped)
        assert stepped == moved == [False, False, True, False, False, True, False, True]
        assert tables_moved == (stepped if tables_too else [True] * 8)


@SCENARIOS.scenario("accumulation", ranks=2)
def the_loss_that_is_reported_is_that_of_the_micro_batch() -> None:
    batches, untouched = micro_batches(4), training()
    with torch.no_grad():
        expected = [untouched.model(batch)[1] for batch in batches]
    assert training().pipelined(batches, grad_accum=4, accumulate_tables=True) == expected


@SCENARIOS.scenario("accumulation", ranks=2)
def each_micro_batch_updates_fused_tables_by_its_share_of_the_loss() -> None:
    """Unless `accumulate_tables` is asked for. A step that ends early steps dense parameters by the mean."""
    of, by_hand = training(), training()
    of.pipelined(micro_batches(8), grad_accum=3)
    for step in ((0, 1, 2), (3, 4, 5), (6, 7)):
        by_hand.optimizer.zero_grad()
        for number in step:
            (by_hand.model(micro_batches(8)[number])[0] / 3).backward()
        for parameter in by_hand.model.module.over.parameters():
            assert parameter.grad is not None
            parameter.grad *= 3 / len(step)
        by_hand.optimizer.step()
    assert farthest(of.held(), by_hand.held()) < ROUNDING


@SCENARIOS.scenario("accumulation", ranks=2)
def an_iterator_that_pauses_completes_the_step() -> None:
    batches = micro_batches(9)
    paused, plain = training(), training()
    source = iter([*batches[:2], None, None, *batches[2:7], None, None, *batches[7:]])
    pipeline = paused.pipeline(grad_accum=4, accumulate_tables=True)
    outputs = [len(through(pipeline, source)) for _ in range(3)]
    plain.plainly([*larger(batches[:2], 4), *larger(batches[2:7], 4), *larger(batches[7:], 4)])
    assert outputs == [2, 5, 2]
    assert farthest(paused.held(), plain.held()) < ROUNDING


@SCENARIOS.scenario("accumulation", ranks=2)
def ranks_hold_the_same_bits_whatever_is_left_at_the_end() -> None:
    for sharding in BOTH_RANKS, COPIES:
        for tables_too in False, True:
            for rest in 0, 1, 2, 3:
                of = training(sharding)
                of.pipelined(micro_batches(4 + rest), grad_accum=4, accumulate_tables=tables_too)
                assert equal_on_ranks(dense(of))
                if sharding is COPIES:
                    assert equal_on_ranks(of.held()["bags.embedding_bags.f"])


def reducers(model: nn.Module) -> Iterator[tuple[str, DistributedDataParallel]]:
    """What has ranks exchange gradients: of dense parameters, and of tables that every rank has."""
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel):
            yield name, module
        for number, lookup in enumerate(getattr(module, "_lookups", ())):
            if isinstance(lookup, DistributedDataParallel):
                yield f"{name}: lookup {number}", lookup


def exchanges(of: Training, batches: Sequence[Batch], count: int) -> list[Counter[str]]:
    """How often each reducer has had ranks exchange gradients in each micro-batch."""
    exchanged = Counter[str]()

    def counted(name: str, bucket: Bucket) -> torch.futures.Future[torch.Tensor]:
        exchanged[name] += 1
        return allreduce_hook(cast("dist.ProcessGroup", dist.group.WORLD), bucket)

    for name, reducer in dict(reducers(of.model)).items():
        reducer.register_comm_hook(name, counted)
    pipeline, source, found = of.pipeline(grad_accum=count, accumulate_tables=True), iter(batches), []
    for _ in batches:
        pipeline.progress(source)
        found.append(Counter(exchanged))
        exchanged.clear()
    return found


@SCENARIOS.scenario("accumulation", ranks=2)
def gradients_are_exchanged_once_for_a_step() -> None:
    for sharding, expected in (BOTH_RANKS, 1), (COPIES, 2):
        of = training(sharding)
        names = [name for name, _ in reducers(of.model)]
        assert len(names) == expected
        # TorchRec has DDP learn a graph that is always the same, which it does in the first backward.
        first, *found = exchanges(of, micro_batches(8), 3)
        assert first.keys() <= set(names)
        assert [set(one) for one in found] == [set(), set(names), set(), set(), set(names), set(), set(names)]


@SCENARIOS.scenario("accumulation", ranks=2)
def gradients_are_exchanged_once_without_a_static_graph() -> None:
    def build() -> Training:
        with reducing(static_graph=False):
            return training()

    of = build()
    names = {name for name, _ in reducers(of.model)}
    assert [set(one) for one in exchanges(of, micro_batches(4), 2)] == [set(), names, set(), names]
    check_as_larger(build, micro_batches(8), steps_of=3)


def reducing(**options: bool) -> AbstractContextManager[Any]:
    """Models made meanwhile have such options of DDP."""
    wrapper = partial(DefaultDataParallelWrapper, **options)
    return patch("torchrec.distributed.model_parallel.DefaultDataParallelWrapper", wrapper)


class Occasional(Predicting):
    """Has parameters that are used only where the first dense value says so, and such that never are."""

    def __init__(self) -> None:
        super().__init__(bags=bags("f", "g"))
        self.seldom, self.never = nn.Linear(WIDTH, 1), nn.Linear(2, 1)

    def predicted(self, batch: Any) -> torch.Tensor:
        return super().predicted(batch) + where_used(batch.dense[:, 0], self.seldom(batch.dense)).squeeze(1)


@SCENARIOS.scenario("accumulation", ranks=2)
def parameters_that_are_used_in_some_micro_batches_only() -> None:
    """On one rank, on both, on none; in the last micro-batch of a step, or not in it."""

    def build() -> Training:
        with reducing(static_graph=False, find_unused_parameters=True):
            return Training(Occasional(), BOTH_RANKS)

    used_by_rank = [(1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 1), (0, 0, 0, 0, 1, 1, 0, 0, 0, 0, 0)]
    batches = micro_batches(11)
    for batch, used in zip(batches, used_by_rank[dist.get_rank()], strict=True):
        batch.dense[:, 0] = used
    check_as_larger(build, batches, steps_of=3)
    accumulated = build()
    accumulated.pipelined(batches, grad_accum=3)
    assert equal_on_ranks(accumulated.held()["seldom.weight"])


def set_learning_rate(of: Training, factor: float) -> None:
    for group in of.optimizer.param_groups:
        group["lr"] *= factor


@SCENARIOS.scenario("accumulation", ranks=2)
def learning_rates_that_change_hold_for_all_of_a_step() -> None:
    """For tables and for dense parameters alike: from the next one on after a step, and within one at once."""
    for after in 2, 1:
        accumulated, plain = training(), training()
        pipeline, source = accumulated.pipeline(grad_accum=2, accumulate_tables=True), iter(micro_batches(6))
        for number in range(6):
            pipeline.progress(source)
            if number % 2 == after - 1:
                set_learning_rate(accumulated, 0.5)
        for batch in larger(micro_batches(6), 2):
            if after == 1:
                set_learning_rate(plain, 0.5)
            plain.plainly([batch])
            if after == 2:
                set_learning_rate(plain, 0.5)
        assert farthest(accumulated.held(), plain.held()) < ROUNDING

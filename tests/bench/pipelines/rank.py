"""The ranks of the pipeline benchmark, under torchrun.

Each variant has a model of its own, and all models begin with the same values. A turn loads as many batches as it
trains on, so that pipelines stay full. A round has a turn of every variant, in an order that changes from round to
round, so that a change of the machine's speed concerns all of them; turns of the same round are compared.
"""

import gc
import json
import os
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from tests.bench.pipelines.batches import Examples, draw, without_end
from tests.bench.pipelines.figures import Turn, figures
from tests.bench.pipelines.laps import laps_on
from tests.bench.pipelines.memory import Memory, memory_of
from tests.bench.pipelines.model import sharded
from tests.bench.pipelines.options import Sizes, pipelines_options
from tests.bench.pipelines.variants import (
    NOT_COMPARED,
    VARIANTS,
    Variant,
    VariantContext,
    trainable,
    with_references,
)
from tests.bench.timing import Duration

from deltasync.trainer.distributed.ranks import join_ranks

# What a pipeline loads ahead is there before its turn.
_AHEAD, _WARM_UP_ROUNDS = 4, 1


class Training:
    """A variant in training, for as long as it is entered into `stack`."""

    def __init__(
        self,
        variant: Variant,
        sizes: Sizes,
        examples: list[Examples],
        device: torch.device,
        context: VariantContext,
        stack: ExitStack,
    ) -> None:
        model, optimizer = sharded(variant.model, sizes, device)
        self._after_step = stack.enter_context(variant.beside(model, context))
        self._pipeline = variant.pipeline(model, optimizer, device)
        self._device = device
        self._waiting: deque[Any] = deque()
        self._stream = self._loaded()
        self._batches = without_end(examples, variant.batches)
        self.loss = torch.tensor(0.0)
        self._load(_AHEAD)

    def turn(self, steps: int) -> Turn:
        """Some steps, until all ranks have done them."""
        self._load(steps)
        self._meet()
        started, laps = Duration.now(), laps_on(self._device)
        laps.note()
        for _ in range(steps):
            self.loss = self._pipeline.progress(self._stream)
            self._after_step()
            laps.note()
        self._meet()
        return Turn(Duration(*(value / steps for value in Duration.since(started))), laps.seconds())

    def finish(self) -> None:
        """Train on what was loaded ahead: a rank that ends before has not received ids that others sent it."""
        while True:
            try:
                self._pipeline.progress(self._stream)
            except StopIteration:
                return
            self._after_step()

    def _loaded(self) -> Iterator[Any]:
        while self._waiting:
            yield self._waiting.popleft()

    def _load(self, batches: int) -> None:
        self._waiting.extend(islice(self._batches, batches))

    def _meet(self) -> None:
        """Wait for what the device still has to do, and for the other ranks."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        dist.barrier()


class PipelineBench:
    """Variants in training."""

    def __init__(
        self,
        sizes: Sizes,
        variants: Mapping[str, Variant],
        context: VariantContext,
        device: torch.device,
        stack: ExitStack,
    ) -> None:
        self._sizes, self._context, self._device, self._stack = sizes, context, device, stack
        self._examples = draw(sizes, dist.get_rank(), device)
        memory = memory_of(device)
        with ExitStack() as first:  # What a process needs once is not counted as the first variant's.
            self._started(VARIANTS["ours"], first).finish()
        self._trainings: dict[str, Training] = {}
        self.bytes: dict[str, tuple[int, int]] = {}
        for name, variant in variants.items():
            self._trainings[name], self.bytes[name] = self._measured(variant, memory)

    def rounds(self) -> list[dict[str, Turn]]:
        """The turns of all rounds, by variant."""
        rounds = [self._round(number) for number in range(_WARM_UP_ROUNDS + self._sizes.rounds)]
        return rounds[_WARM_UP_ROUNDS:]

    def finish(self) -> None:
        for training in self._trainings.values():
            training.finish()

    @property
    def losses(self) -> Mapping[str, float]:
        return {name: float(training.loss) for name, training in self._trainings.items()}

    def _measured(self, variant: Variant, memory: Memory) -> tuple[Training, tuple[int, int]]:
        gc.collect()
        before = memory.held()
        training = self._started(variant, self._stack)
        gc.collect()
        held = memory.held() - before
        return training, (held, memory.rise(lambda: training.turn(self._sizes.steps)))

    def _started(self, variant: Variant, stack: ExitStack) -> Training:
        """A training that has run for a while, so that each cut to come falls into the middle of a turn."""
        training = Training(variant, self._sizes, self._examples, self._device, self._context, stack)
        training.turn(self._sizes.steps + self._sizes.steps // 2)
        return training

    def _round(self, number: int) -> dict[str, Turn]:
        order = random.Random(number).sample(list(self._trainings), len(self._trainings))  # On all ranks.
        gc.collect()
        return {name: self._trainings[name].turn(self._sizes.steps) for name in order}


@click.command()
@pipelines_options
@click.option("--service", required=True, help="Where to publish.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), required=True)
def main(service: str, json_file: Path, variants: Sequence[str], **settings: Any) -> None:
    """Measure on this rank; rank 0 writes the figures."""
    sizes = Sizes(**settings)
    device = join_ranks()
    wanted, problems = trainable(with_references(variants), device)
    with ExitStack() as stack:
        bench = PipelineBench(sizes, wanted, VariantContext(service, sizes.steps), device, stack)
        rounds = bench.rounds()
        found = figures(rounds, _most(bench.bytes, device), bench.losses)
        bench.finish()
    machine = {
        "device": device.type,
        "threads": torch.get_num_threads(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "memory_source": memory_of(device).source,
        "not_measured": problems if variants else problems | NOT_COMPARED,
    }
    if dist.get_rank() == 0:
        json_file.write_text(json.dumps(found | machine))
    dist.barrier()
    dist.destroy_process_group()


def _most(found: dict[str, tuple[int, int]], device: torch.device) -> dict[str, tuple[int, int]]:
    """Of all ranks, those figures of the rank whose peak is the highest."""
    mine = torch.tensor(list(found.values()), device=device)
    ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(ranks, mine)
    of_ranks = zip(*(rank.tolist() for rank in ranks), strict=True)
    return {name: tuple(max(pairs, key=sum)) for name, pairs in zip(found, of_ranks, strict=True)}


if __name__ == "__main__":
    main()

"""The ranks of the pipeline benchmark, under torchrun.

Each pipeline has a model of its own, and all models begin with the same values. A turn loads as many batches as it
trains on, so that pipelines stay full. A round has a turn of every pipeline, in an order that changes from round
to round, so that a change of the machine's speed concerns all of them; turns of the same round are compared.
"""

import gc
import json
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
from tests.bench.pipelines.batches import BatchKind, Examples, draw, without_end
from tests.bench.pipelines.model import BagModel, TensorDictModel, sharded
from tests.bench.pipelines.options import Sizes, pipelines_options
from tests.bench.timing import Duration, spread_of
from torchrec.distributed import TrainPipelineSparseDist

from deltasync.trainer.distributed.ranks import join_ranks
from deltasync.trainer.pipelines import OnlinePipeline

# What a pipeline loads ahead is there before its turn.
_AHEAD, _WARM_UP_ROUNDS = 4, 1
# The pipeline, its model and its batches, by name.
VARIANTS: dict[str, tuple[Callable[..., Any], type[BagModel], BatchKind]] = {
    "torchrec": (TrainPipelineSparseDist, BagModel, BatchKind.KJT),
    "ours": (OnlinePipeline, BagModel, BatchKind.KJT),
    "tensordict": (OnlinePipeline, TensorDictModel, BatchKind.TENSORDICT),
}
_RATIOS = {"pipeline": ("ours", "torchrec"), "tensordict": ("tensordict", "ours")}


class Training:
    """A pipeline in training."""

    def __init__(self, name: str, sizes: Sizes, examples: list[Examples], device: torch.device) -> None:
        pipeline, model, batches = VARIANTS[name]
        self._pipeline = pipeline(*sharded(model, sizes, device), device)
        self._device = device
        self._waiting: deque[Any] = deque()
        self._stream = self._loaded()
        self._batches = without_end(examples, batches)
        self.loss = torch.tensor(0.0)
        self._load(_AHEAD)

    def turn(self, steps: int) -> Duration:
        """Train some steps until all ranks have done them; the duration of one."""
        self._load(steps)
        self._meet()
        started = Duration.now()
        for _ in range(steps):
            self.loss = self._pipeline.progress(self._stream)
        self._meet()
        return Duration(*(value / steps for value in Duration.since(started)))

    def finish(self) -> None:
        """Train on what was loaded ahead: a rank that ends before has not received ids that others sent it."""
        while True:
            try:
                self._pipeline.progress(self._stream)
            except StopIteration:
                return

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


@click.command()
@pipelines_options
@click.option("--json", "json_file", type=click.Path(path_type=Path), required=True)
def main(json_file: Path, **settings: Any) -> None:
    """Measure on this rank; rank 0 writes the figures."""
    sizes = Sizes(**settings)
    device = join_ranks()
    examples = draw(sizes, dist.get_rank(), device)
    trainings = {name: Training(name, sizes, examples, device) for name in VARIANTS}
    rounds = [_round(trainings, sizes, number) for number in range(_WARM_UP_ROUNDS + sizes.rounds)]
    figures = _figures(rounds[_WARM_UP_ROUNDS:], {name: float(each.loss) for name, each in trainings.items()})
    for training in trainings.values():
        training.finish()
    if dist.get_rank() == 0:
        json_file.write_text(json.dumps(figures | {"device": device.type}))
    dist.barrier()
    dist.destroy_process_group()


def _round(trainings: Mapping[str, Training], sizes: Sizes, number: int) -> dict[str, Duration]:
    order = random.Random(number).sample(list(trainings), len(trainings))  # On all ranks.
    gc.collect()
    return {name: trainings[name].turn(sizes.steps) for name in order}


def _figures(rounds: Sequence[Mapping[str, Duration]], losses: Mapping[str, float]) -> dict[str, Any]:
    found: dict[str, Any] = {
        "variants": {
            name: spread_of("step_ms", (1e3 * one[name].seconds for one in rounds)) | {"loss": losses[name]}
            for name in VARIANTS
        }
    }
    for ratio, (name, other) in _RATIOS.items():
        found |= spread_of(f"{ratio}_step_ratio", (one[name].seconds / one[other].seconds for one in rounds))
    return found


if __name__ == "__main__":
    main()

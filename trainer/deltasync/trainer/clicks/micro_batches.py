"""The micro-batches that each rank trains on."""

from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from deltasync.trainer.clicks.batch import as_tensordict, click_batch
from deltasync.trainer.clicks.features import Featurizer
from deltasync.trainer.clicks.stream import batches
from deltasync.trainer.clicks.stream_options import StreamOptions
from deltasync.trainer.clicks.training_options import TrainingOptions


def micro_batches(stream: StreamOptions, training: TrainingOptions, past: int) -> Iterator[Any]:
    """This rank's micro-batches after the first `past` steps, whose events only count for later features."""
    featurizer, rank, ranks = Featurizer(stream.features), dist.get_rank(), dist.get_world_size()
    for step, events in enumerate(stream.batches(past=past)):
        for part in batches(iter([events]), stream.batch_size // training.grad_accum):
            features = featurizer.features(part)
            if step >= past and len(part) >= ranks:
                batch = click_batch(features, rank, ranks)
                yield as_tensordict(batch) if training.input == "tensordict" else batch

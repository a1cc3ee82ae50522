"""All options of `train.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import click

from deltasync.cli.endpoint_options import service_options
from deltasync.trainer.clicks.outputs import Outputs, output_options, take_outputs
from deltasync.trainer.clicks.stream_options import (
    StreamOptions,
    managed_option,
    stream_options,
    take_stream_options,
)
from deltasync.trainer.clicks.training_options import TrainingOptions, take_training_options, training_options
from deltasync.trainer.distributed.sharding import OptimizerOptions
from deltasync.trainer.sync import OnRefusal, SyncOptions


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a run does.

    Attributes:
        stream: the events, and the sizes of the model.
        training: how it is trained.
        learning: how fast.
        publishing: what is published, and where to.
        outputs: what is left behind and shown beside that.
    """

    stream: StreamOptions
    training: TrainingOptions
    learning: OptimizerOptions
    publishing: SyncOptions
    outputs: Outputs


def run_options(command: Callable[[RunOptions], None]) -> Callable[..., None]:
    """Add the options to a click command, which is given them as one object."""

    @wraps(command)
    def with_options(table_lr: float, dense_lr: float, **settings: Any) -> None:
        stream, training = take_stream_options(settings), take_training_options(settings)
        learning, outputs = OptimizerOptions(table_lr=table_lr, dense_lr=dense_lr), take_outputs(settings)
        publishing = SyncOptions(**settings)
        command(
            RunOptions(stream=stream, training=training, learning=learning, publishing=publishing, outputs=outputs)
        )

    wrapped = output_options(with_options)
    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return stream_options(managed_option(training_options(service_options(default=None)(wrapped))))


_OPTIONS = [
    click.option("--model", default="clicks", help="Name of the set of tables."),
    click.option("--publish-every", type=click.IntRange(1), default=10, help="Steps between cuts."),
    click.option("--table-lr", default=OptimizerOptions.table_lr, help="Learning rate of the tables."),
    click.option("--dense-lr", default=OptimizerOptions.dense_lr, help="Learning rate of everything else."),
    click.option(
        "--on-refusal",
        type=click.Choice([each.value for each in OnRefusal]),
        default="continue",
        callback=lambda _ctx, _param, value: OnRefusal(value),
        help="What a step does that cannot publish.",
    ),
]

"""What a run of `train.py` leaves behind and shows beside what it publishes."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import click

from deltasync.client import Endpoint
from deltasync.trainer.scalars import ScalarOptions, Scalars, TensorBoard
from deltasync.trainer.sync import DeltaSync

F = TypeVar("F", bound=Callable[..., Any])
_FOLDER = click.Path(path_type=Path)


@dataclass(frozen=True, kw_only=True)
class Outputs:
    """What is left behind and shown.

    Attributes:
        checkpoint: folder to go on from, and to save to; None = neither.
        checkpoint_every: steps between checkpoints.
        tensorboard: folder for scalars, one in it for each rank; None = none are told.
        tensorboard_every: steps between them.
        tensorboard_lag: consumers whose lag is among those of the first rank.
        metrics: HOST:PORT where the first rank of a machine answers /metrics; None = none does.
        results: folder for scores and tables; None = nowhere.
    """

    checkpoint: Path | None = None
    checkpoint_every: int = 1000
    tensorboard: Path | None = None
    tensorboard_every: int = ScalarOptions.every
    tensorboard_lag: tuple[str, ...] = ()
    metrics: str | None = None
    results: Path | None = None

    def scalars(
        self, sync: DeltaSync, rank: int, service: Endpoint | str
    ) -> AbstractContextManager[Scalars | None]:
        """What tells a rank's scalars; nothing, where nobody asked for them."""
        if self.tensorboard is None:
            return nullcontext()
        consumers = self.tensorboard_lag if rank == 0 else ()  # It is the same for all ranks.
        options = ScalarOptions(every=self.tensorboard_every, service=service, consumers=consumers)
        return Scalars(sync, [TensorBoard(self.tensorboard / f"rank-{rank}")], options)


def output_options(command: F) -> F:
    """Add the options to a click command; `take_outputs` makes them one object."""
    whole = click.IntRange(1)
    for option in reversed(
        [
            click.option("--checkpoint", type=_FOLDER, help="Folder to go on from, and to save to."),
            click.option("--checkpoint-every", type=whole, default=Outputs.checkpoint_every,
                         help="Steps between checkpoints."),
            click.option("--tensorboard", type=_FOLDER,
                         help="Folder for TensorBoard's scalars, one in it for each rank."),
            click.option("--tensorboard-every", type=whole, default=Outputs.tensorboard_every,
                         help="Steps between them."),
            click.option("--tensorboard-lag", multiple=True, metavar="CONSUMER",
                         help="Its lag is among them; may be given several times."),
            click.option("--metrics", metavar="HOST:PORT",
                         help="Where the first rank here answers /metrics; others take the next ports."),
            click.option("--results", type=_FOLDER, help="Folder for scores and tables, for comparison."),
        ]
    ):  # fmt: skip
        command = option(command)
    return command


def take_outputs(settings: dict[str, Any]) -> Outputs:
    """Take the options out of a command's settings."""
    outputs = Outputs(**{each.name: settings.pop(each.name) for each in fields(Outputs)})
    if outputs.tensorboard_lag and outputs.tensorboard is None:
        raise click.UsageError("--tensorboard-lag: give --tensorboard too, the folder that it is written to")
    return outputs

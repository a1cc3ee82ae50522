"""Options of the click model's training, shared by the trainer and the commands that start it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click

from deltasync.trainer.checks import check_whole

if TYPE_CHECKING:
    from deltasync.trainer.pipelines import PipelineOptions

F = TypeVar("F", bound=Callable[..., Any])
INPUTS = ("kjt", "tensordict")


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to train.

    Attributes:
        grad_accum: equal micro-batches that each batch is trained in, for one optimizer step.
        accumulate_tables: tables are updated once per step too, not in each micro-batch.
        amp: forward runs under autocast, in bfloat16.
        input: batches are `kjt`: dataclasses with a KeyedJaggedTensor, or `tensordict`: TensorDicts.
    """

    grad_accum: int = 1
    accumulate_tables: bool = False
    amp: bool = False
    input: str = "kjt"

    def __post_init__(self) -> None:
        check_whole("grad_accum", self.grad_accum)

    @property
    def pipeline(self) -> "PipelineOptions":
        """What the pipeline is asked to do."""
        from deltasync.trainer.pipelines import PipelineOptions

        return PipelineOptions(
            grad_accum=self.grad_accum, accumulate_tables=self.accumulate_tables, enable_amp=self.amp
        )

    def arguments(self) -> list[str]:
        """The command-line arguments that say the same to another process."""
        flags = ["--accumulate-tables"] * self.accumulate_tables + ["--amp"] * self.amp
        return ["--grad-accum", str(self.grad_accum), "--input", self.input, *flags]


def training_options(command: F) -> F:
    """Add the options to a click command; `take_training_options` makes them one object."""
    for option in reversed(
        [
            click.option("--grad-accum", type=click.IntRange(1), default=TrainingOptions.grad_accum,
                         help="Micro-batches that a batch is trained in, for one optimizer step."),
            click.option("--accumulate-tables", is_flag=True, help="Update tables once per step, too."),
            click.option("--amp", is_flag=True, help="Forward in mixed precision: bfloat16."),
            click.option("--input", type=click.Choice(INPUTS), default=TrainingOptions.input,
                         help="What batches hold their features in."),
        ]
    ):  # fmt: skip
        command = option(command)
    return command


def take_training_options(settings: dict[str, Any]) -> TrainingOptions:
    """Take the options out of a command's settings."""
    return TrainingOptions(**{name: settings.pop(name) for name in vars(TrainingOptions())})


def why_not_shared(batch_size: int, ranks: int, options: TrainingOptions) -> str:
    """Why batches cannot be shared evenly; empty if they can."""
    if batch_size % (ranks * options.grad_accum) == 0:
        return ""
    micro = f", {options.grad_accum} micro-batches each" if options.grad_accum > 1 else ""
    multiple = ranks * options.grad_accum
    return f"--batch-size {batch_size}: {ranks} ranks share it evenly{micro}; choose a multiple of {multiple}"

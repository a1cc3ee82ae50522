"""What the pipeline benchmark measures: options of the command and of the ranks that it starts."""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])
GRAD_ACCUM = 4
NAMES = {
    "base": "TorchRec's base",
    "base_tensordict": "TorchRec's base, TensorDicts",
    "sparse_dist": "TorchRec's sparse-dist",
    "sparse_dist_tensordict": "TorchRec's sparse-dist, TensorDicts",
    "semi_sync": "TorchRec's semi-sync",
    "semi_sync_tensordict": "TorchRec's semi-sync, TensorDicts",
    "ours": "ours",
    "tensordict": "ours, TensorDicts",
    "accumulation": f"ours, {GRAD_ACCUM} micro-batches",
    "accumulation_tables": f"ours, {GRAD_ACCUM}, tables too",
    "amp": "ours, bfloat16",
    "sparse_dist_preprocessing": "TorchRec's, preprocessing",
    "preprocessing": "ours, preprocessing",
    "tracking": "ours, tracking",
    "publishing": "ours, publishing",
}
"""Of the variants, and how they are printed."""


def _size(default: int, meaning: str) -> Any:
    return field(default=default, metadata={"help": meaning})


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What is trained, and how often it is measured."""

    ranks: int = _size(2, "Trainer processes.")
    batch_size: int = _size(512, "Examples of a rank's batch.")
    tables: int = _size(8, "Tables, each with a feature of its own.")
    rows: int = _size(20_000, "Rows of a table.")
    dim: int = _size(32, "Values of a row.")
    ids: int = _size(10, "Ids of a feature in an example, on average.")
    dense: int = _size(64, "Dense features.")
    over: int = _size(256, "Width of the layers over rows and dense features.")
    steps: int = _size(12, f"Steps of a turn, a multiple of {GRAD_ACCUM}; there is one cut in each.")
    rounds: int = _size(25, "Rounds, in each of which every variant has a turn.")

    def __post_init__(self) -> None:
        if self.steps % GRAD_ACCUM:
            raise click.BadParameter(f"{self.steps} is no multiple of {GRAD_ACCUM}", param_hint="'--steps'")

    def arguments(self) -> list[str]:
        """The command-line arguments that say the same to another process."""
        return [text for name, value in asdict(self).items() for text in (_flag(name), str(value))]


def pipelines_options(command: F) -> F:
    """Add an option for each size, and one for the variants, to a click command."""
    command = click.option(
        "--variant", "variants", type=click.Choice(list(NAMES)), multiple=True,
        help="Measure this one and what it is compared with, instead of all; may be repeated.",
    )(command)  # fmt: skip
    for one in reversed(fields(Sizes)):
        option = click.option(
            _flag(one.name), type=click.IntRange(1), default=one.default, help=one.metadata["help"]
        )
        command = option(command)
    return command


def ratio_name(variant: str) -> str:
    """What the ratio of a variant's step time to that of another is called."""
    return "pipeline" if variant == "ours" else variant


def variant_arguments(variants: Sequence[str]) -> list[str]:
    """The command-line arguments that ask for these variants."""
    return [text for name in variants for text in ("--variant", name)]


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

"""What the pipeline benchmark measures: options of the command and of the ranks that it starts."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


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
    steps: int = _size(12, "Steps of a turn.")
    rounds: int = _size(25, "Rounds, in each of which every pipeline has a turn.")

    def arguments(self) -> list[str]:
        """The command-line arguments that say the same to another process."""
        return [text for name, value in asdict(self).items() for text in (_flag(name), str(value))]


def pipelines_options(command: F) -> F:
    """Add an option for each size to a click command."""
    for one in reversed(fields(Sizes)):
        option = click.option(
            _flag(one.name), type=click.IntRange(1), default=one.default, help=one.metadata["help"]
        )
        command = option(command)
    return command


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"

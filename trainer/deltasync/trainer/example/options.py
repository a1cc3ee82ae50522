"""The options that the example's processes share: dataclasses that become flags, and flags for other processes."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deltasync.base.errors import InvalidInput
from deltasync.trainer.checks import check_positive, check_whole

if TYPE_CHECKING:
    from deltasync.trainer.pipelines import PipelineOptions

HOURS_OF_WEEK = 168
"""Rows of the hour table. Hour 0 begins on Monday at 00:00 UTC."""
RAW_IDS = 2**62
"""Raw ids of users and items are spread evenly from 0 up to here."""
MANAGED = {"user": ["user"], "item": ["item", "history"]}
"""The tables with managed collision, and the features that look rows up in each."""


def _flag(default: Any, says: str, kind: Any = None) -> Any:
    return field(default=default, metadata={"help": says} | ({"type": kind} if kind else {}))


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Sizes of the click model. A trainer and its predictors must have the same."""

    users: int = _flag(20_000, "Number of users and rows of their table; with --managed a fourth of the rows.")
    items: int = _flag(12_000, "Number of items and rows of their table; with --managed a fourth of the rows.")
    cross_buckets: int = _flag(10_000, "Rows of the table of user-item crosses.")
    dim: int = _flag(16, "Values of a row; even.")
    hidden: int = _flag(32, "Width of the hidden layers.")
    managed: bool = _flag(False, "Map raw ids to rows by managed collision; normalise dense layers.")

    def __post_init__(self) -> None:
        for name in ("users", "items", "cross_buckets", "dim", "hidden"):
            check_whole(name, getattr(self, name), least=2)
        if self.dim % 2:
            raise InvalidInput(f"dim: {self.dim}, expected an even number: one table is sharded by columns")

    @property
    def managed_tables(self) -> tuple[str, ...]:
        """The tables whose rows go to raw ids."""
        return tuple(MANAGED) if self.managed else ()

    @property
    def rows(self) -> dict[str, int]:
        """Rows by table."""
        rest = {"cross": self.cross_buckets, "hour": HOURS_OF_WEEK}
        if self.managed:
            # A row for every fourth id, so that rows change hands.
            return {"user": -(-self.users // 4), "item": -(-self.items // 4), **rest}
        return {"user": self.users, "item": self.items, **rest, "history": self.items}

    @property
    def ids(self) -> dict[str, int]:
        """The number of ids of each sparse feature; they count from 0."""
        return {**self.rows, **{name: RAW_IDS for table in self.managed_tables for name in MANAGED[table]}}


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """The stream of events. Processes with equal options see the same events at the same time."""

    data: str = _flag("synthetic", "synthetic, or ratings:PATH, a file of ratings.")
    events: int | None = _flag(None, "Number of events; all by default.", click.IntRange(1))
    events_per_second: float = _flag(1250.0, "Events that arrive per second.")
    batch_size: int = _flag(128, "Events per step, over all ranks.")
    start_file: Path | None = _flag(
        None, "File with the unix time of the first event; the process waits for it.", click.Path(path_type=Path)
    )

    def __post_init__(self) -> None:
        check_whole("batch_size", self.batch_size, least=2)
        check_positive("events_per_second", self.events_per_second)


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How the trainer trains."""

    grad_accum: int = _flag(1, "Micro-batches of a batch; the optimizer steps once per batch.")
    amp: bool = _flag(False, "Run forward in bfloat16.")
    input: str = _flag("kjt", "Container of the features of a batch.", click.Choice(["kjt", "tensordict"]))

    def __post_init__(self) -> None:
        check_whole("grad_accum", self.grad_accum)

    @property
    def pipeline(self) -> "PipelineOptions":
        """The options of the pipeline."""
        from deltasync.trainer.pipelines import PipelineOptions  # It imports torch, which help does not need.

        return PipelineOptions(grad_accum=self.grad_accum, enable_amp=self.amp)

    def check_shares(self, batch_size: int, ranks: int) -> None:
        """Check that ranks and micro-batches share a batch evenly; InvalidInput if they do not."""
        if batch_size % (multiple := ranks * self.grad_accum):
            micro = f", {self.grad_accum} micro-batches each" if self.grad_accum > 1 else ""
            raise InvalidInput(
                f"batch_size: {batch_size}, {ranks} ranks share it evenly{micro}; choose a multiple of {multiple}"
            )


def flags(kind: type[Any], name: str, only: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Give a click command a flag for each field of a dataclass, or for some `only`, and the object as `name`."""
    chosen = [each for each in fields(kind) if not only or each.name in only]

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def packed(**settings: Any) -> Any:
            try:
                options = kind(**{each.name: settings.pop(each.name) for each in chosen})
            except InvalidInput as error:
                raise click.UsageError(str(error)) from error
            return command(**settings, **{name: options})

        for each in reversed(chosen):
            is_flag = isinstance(each.default, bool)
            packed = click.option(_name(each.name), default=each.default, is_flag=is_flag, **each.metadata)(packed)
        return packed

    return decorate


def arguments(*options: Any) -> list[str]:
    """The flags that give another process the same options."""
    words = list[str]()
    for name, value in (item for each in options for item in vars(each).items()):
        if value is True:
            words.append(_name(name))
        elif value is not False and value is not None:
            words += [_name(name), str(value)]
    return words


def _name(field_name: str) -> str:
    return f"--{field_name.replace('_', '-')}"

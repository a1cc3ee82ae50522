"""1. Options that the example's processes share, as dataclasses and as command-line flags."""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import wraps
from pathlib import Path
from typing import Any

import click

from deltasync.base.errors import InvalidInput
from deltasync.trainer.checks import check_positive, check_whole

HOURS_OF_WEEK = 168
"""Rows of the hour table. Hour 0 begins on Monday at 00:00 UTC."""
RAW_IDS = 2**62
"""Upper limit of raw ids of users and items, which are spread evenly from 0."""
MANAGED = {"user": ["user"], "item": ["item", "history"]}
"""The tables with managed collision, and the features that are looked up in each."""


def _flag(default: Any, text: str, kind: Any = None) -> Any:
    return field(default=default, metadata={"help": text} | ({"type": kind} if kind else {}))


@dataclass(frozen=True, kw_only=True)
class ModelOptions:
    """Sizes of the click model, which must be the same for a trainer and its predictors."""

    users: int = _flag(20_000, "Number of users; their table has as many rows, or a quarter with --managed.")
    items: int = _flag(12_000, "Number of items; their table has as many rows, or a quarter with --managed.")
    cross_buckets: int = _flag(10_000, "Rows of the table of user-item crosses.")
    dim: int = _flag(16, "Values per row; even.")
    hidden: int = _flag(32, "Width of the hidden layers.")
    managed: bool = _flag(False, "Map raw ids to rows with managed collision, and add batch normalisation.")

    def __post_init__(self) -> None:
        for name in ("users", "items", "cross_buckets", "dim", "hidden"):
            check_whole(name, getattr(self, name), least=2)
        if self.dim % 2:
            raise InvalidInput(f"dim: {self.dim}, expected an even number, because a table is sharded by columns")

    @property
    def managed_tables(self) -> tuple[str, ...]:
        """The tables whose rows managed collision assigns to raw ids."""
        return tuple(MANAGED) if self.managed else ()

    @property
    def rows(self) -> dict[str, int]:
        """Number of rows by table."""
        rest = {"cross": self.cross_buckets, "hour": HOURS_OF_WEEK}
        if self.managed:
            # Fewer rows than ids, so that managed collision evicts some.
            return {"user": -(-self.users // 4), "item": -(-self.items // 4), **rest}
        return {"user": self.users, "item": self.items, **rest, "history": self.items}

    @property
    def ids(self) -> dict[str, int]:
        """The number of possible ids of each sparse feature, from 0."""
        return {**self.rows, **{name: RAW_IDS for table in self.managed_tables for name in MANAGED[table]}}


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """The stream of events. Processes with equal options get the same events at the same time."""

    data: str = _flag("synthetic", "synthetic, or ratings:PATH, a file of ratings.")
    events: int | None = _flag(None, "Number of events; all by default.", click.IntRange(1))
    events_per_second: float = _flag(1250.0, "Number of events per second.")
    batch_size: int = _flag(128, "Events per step, over all ranks.")
    start_file: Path | None = _flag(
        None, "File to wait for, with the Unix time of the first event.", click.Path(path_type=Path)
    )

    def __post_init__(self) -> None:
        check_whole("batch_size", self.batch_size, least=2)
        check_positive("events_per_second", self.events_per_second)

    def check_ranks(self, ranks: int) -> None:
        """Check that a batch divides evenly among ranks; InvalidInput if it does not."""
        if self.batch_size % ranks:
            raise InvalidInput(f"batch_size: {self.batch_size}, expected a multiple of the {ranks} ranks")


def flags(kind: type[Any], name: str, only: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Any]:
    """Add a flag to a click command for each field of a dataclass, or only for some.

    The command gets an object of the dataclass as argument `name`.
    """
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
    """Command-line flags that pass the same options to another process."""
    words = list[str]()
    for name, value in (item for each in options for item in vars(each).items()):
        if value is True:
            words.append(_name(name))
        elif value is not False and value is not None:
            words += [_name(name), str(value)]
    return words


def _name(field_name: str) -> str:
    return f"--{field_name.replace('_', '-')}"

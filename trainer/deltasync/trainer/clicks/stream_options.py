"""Options that every process of a stream shares: they must be the same for all to see the same events."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from deltasync.trainer.clicks.events import Events
from deltasync.trainer.clicks.features import FeatureOptions
from deltasync.trainer.clicks.model_options import ModelOptions
from deltasync.trainer.clicks.stream import Pace, batches, open_stream, paced
from deltasync.trainer.clicks.synthetic import SyntheticOptions

F = TypeVar("F", bound=Callable[..., Any])
_START_POLL_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True)
class StreamOptions:
    """Which events arrive, how fast, and the sizes of the model that is trained on them.

    Attributes:
        data: `synthetic` or `ratings:PATH`.
        events: how many; None = all there are.
        events_per_second: how fast they arrive.
        batch_size: events per step, over all ranks together.
        seed: of the synthetic stream and of the model's first weights.
        start_file: holds the unix time at which the first event arrives; waited for. None = now.
        model: sizes of the model.
    """

    data: str
    events: int | None
    events_per_second: float
    batch_size: int
    seed: int
    start_file: Path | None
    model: ModelOptions

    @property
    def features(self) -> FeatureOptions:
        """Sizes for the features, which are ids of the model's tables."""
        model = self.model
        sizes = {"users": model.users, "items": model.items, "cross_buckets": model.cross_buckets}
        return FeatureOptions(**sizes, raw_ids=model.managed)

    def pace(self, sleep: Callable[[float], None] = time.sleep, past: int = 0) -> Pace:
        """When events arrive, from now or what the start file says on; those of `past` batches have before."""
        start = self._start(sleep) - past * self.batch_size / self.events_per_second
        return Pace(start_unix=start, events_per_second=self.events_per_second)

    def batches(self, pace: Pace, sleep: Callable[[float], None] = time.sleep) -> Iterator[Events]:
        """The batches, each when its last event arrives."""
        synthetic = SyntheticOptions(seed=self.seed, users=self.model.users, items=self.model.items)
        events = open_stream(self.data, events=self.events, synthetic=synthetic)
        return paced(batches(events, self.batch_size), pace, sleep=sleep)

    def arguments(self) -> list[str]:
        """The command-line arguments that say the same to another process."""
        given = {name: getattr(self, name) for name in ("data", "events", "batch_size", "seed", "start_file")}
        given |= {"events_per_second": self.events_per_second}
        pairs = [(f"--{name.replace('_', '-')}", str(value)) for name, value in given.items() if value is not None]
        return [argument for pair in pairs for argument in pair] + self.model.arguments()

    def _start(self, sleep: Callable[[float], None]) -> float:
        if self.start_file is None:
            return time.time()
        while not self.start_file.exists():
            sleep(_START_POLL_SECONDS)
        return float(self.start_file.read_text())


managed_option = click.option("--managed", is_flag=True, help="Ids are raw and get rows by managed collision.")
"""The one that a command adds itself, after `stream_options` or `size_options`."""


def size_options(command: F) -> F:
    """Add the sizes of the model to a click command; `take_model_options` makes them and `managed` one object."""
    for name, default in reversed(ModelOptions().sizes.items()):
        words = name.replace("_", " ")
        option = f"--{name.replace('_', '-')}"
        command = click.option(
            option, type=click.IntRange(2), default=default, help=f"Size of the model: {words}."
        )(command)
    return command


def stream_options(command: F) -> F:
    """Add the options of a stream to a click command; `take_stream_options` makes them one object."""
    command = size_options(command)
    for option in reversed(
        [
            click.option("--data", default="synthetic", help="synthetic, or ratings:PATH."),
            click.option("--events", type=click.IntRange(1), default=None, help="Events to take; default all."),
            click.option("--events-per-second", type=click.FloatRange(0, min_open=True), default=1250.0,
                         help="How fast they arrive."),
            click.option("--batch-size", type=click.IntRange(2), default=128, help="Events per step, all ranks."),
            click.option("--seed", type=click.IntRange(0), default=0, help="Of the stream and the first weights."),
            click.option("--start-file", type=click.Path(path_type=Path), default=None,
                         help="File with the unix time of the first event, waited for; default now."),
        ]
    ):  # fmt: skip
        command = option(command)
    return command


def take_model_options(settings: dict[str, Any]) -> ModelOptions:
    """Take the sizes of the model, and whether it maps raw ids, out of a command's settings."""
    given = {name: settings.pop(name) for name in vars(ModelOptions())}
    try:
        return ModelOptions(**given)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def take_stream_options(settings: dict[str, Any]) -> StreamOptions:
    """Take the options of a stream out of a command's settings."""
    model = take_model_options(settings)
    names = ("data", "events", "events_per_second", "batch_size", "seed", "start_file")
    return StreamOptions(model=model, **{name: settings.pop(name) for name in names})

"""`deltasync bench`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from deltasync.cli.config import CONTEXT
from deltasync.trainer.bench import (
    apply,
    consumers,
    fanout,
    freshness,
    many,
    memory,
    pause,
    publish,
    quality,
    release,
    scale,
    serve,
    status,
    step_time,
    tracker,
)
from deltasync.trainer.bench.apply import apply_options
from deltasync.trainer.bench.consumers import consumers_options
from deltasync.trainer.bench.pause import pause_options
from deltasync.trainer.bench.pipelines import run as pipelines
from deltasync.trainer.bench.pipelines.options import pipelines_options
from deltasync.trainer.bench.quality import quality_options
from deltasync.trainer.bench.release import release_options
from deltasync.trainer.bench.scale import scale_options
from deltasync.trainer.bench.serve import serve_options


def _list(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo("\n".join(bench.commands))
        ctx.exit()


@click.group()
@click.option("--list", is_flag=True, is_eager=True, expose_value=False, callback=_list, help="List the names.")
def bench() -> None:
    """Measure on this machine, as ratios in one run."""


def _command(run: Callable[..., dict[str, Any]]) -> Callable[..., None]:
    @click.option(
        "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here."
    )
    def measure(json_file: Path | None, **settings: Any) -> None:
        figures = run(Console(soft_wrap=True, highlight=False), **settings)
        if json_file:
            json_file.write_text(json.dumps(figures, indent=2) + "\n")

    return measure


def _add(name: str, command: Callable[..., None], says: str) -> None:
    bench.command(name, help=says, context_settings=CONTEXT)(command)


_add(
    "publish",
    _command(publish.run),
    "Throughput from a trainer's publish to a replica's rows, against a bare gRPC stream.",
)
_add(
    "freshness",
    _command(freshness.run),
    "Time from a trainer's publish of a small cut to a replica's rows, against two bare gRPC hops and one write.",
)
_add(
    "fanout",
    _command(fanout.run),
    "CPU time of the service for forty replicas of one consumer, against one replica.",
)
_add("memory", _command(memory.run), "What the service holds beside its tables and stamps.")
_add(
    "release",
    release_options(_command(release.run)),
    "Time of a release by a consumer's policy, against NumPy's gathers and norms of the same rows.",
)
_add(
    "apply",
    apply_options(_command(apply.run)),
    "Time to apply changed rows, in the service and in a replica, against a bare NumPy scatter.",
)
_add(
    "pause",
    pause_options(_command(pause.run)),
    "Pause of readers while releases are applied, against a bare NumPy scatter of the same rows.",
)
_add(
    "scale",
    scale_options(_command(scale.run)),
    "Time of a cut into a large table, and of /lag, against the same with a small table.",
)
_add(
    "serve",
    serve_options(_command(serve.run)),
    "Lookups of a quantised predictor while its rows are replaced, against the same without updates.",
)
_add(
    "quality",
    quality_options(_command(quality.run)),
    "AUC of replicas with different policies, and the bytes each is sent.",
)
_add(
    "consumers",
    consumers_options(_command(consumers.run)),
    "CPU time and memory of the service for eight consumers with different policies, against one.",
)
_add(
    "many",
    _command(many.run),
    "CPU time of the service for 200 consumers with policies, and for 2,000 tables, against one and 20.",
)
_add(
    "status",
    _command(status.run),
    "Time of a cut while status is asked for 200 times a second, and of /metrics with 1,000 tables.",
)
_add(
    "tracking",
    _command(step_time.run),
    "Step time of the demo's model with tracking and publishing on, against off.",
)
_add(
    "tracker",
    _command(tracker.run),
    "Time and memory of the tracker beside TorchRec's, and step time with it against without.",
)
_add(
    "pipelines",
    pipelines_options(_command(pipelines.run)),
    "Step time (P50, P90) and peak memory of training pipelines: TorchRec's and ours, with KJTs and TensorDicts.",
)

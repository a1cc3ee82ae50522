"""`deltasync bench`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from sync_service.cli.config import CONTEXT
from trainer.bench import memory, publish, tracker, tracking

BENCHES: dict[str, Callable[[Console], dict[str, Any]]] = {
    "publish": publish.run,
    "memory": memory.run,
    "tracking": tracking.run,
    "tracker": tracker.run,
}


def _list(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo("\n".join(BENCHES))
        ctx.exit()


@click.command(context_settings=CONTEXT)
@click.argument("name", type=click.Choice(list(BENCHES)))
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures here."
)
@click.option("--list", is_flag=True, is_eager=True, expose_value=False, callback=_list, help="List the names.")
def bench(name: str, json_file: Path | None) -> None:
    """Measure on this machine, as ratios in one run.

    \b
    publish   throughput from a trainer's publish to a replica's rows, against a bare gRPC stream
    memory    what the service holds beside its tables and stamps
    tracking  step time of the demo's model with tracking and publishing on, against off
    tracker   time and memory of the tracker beside TorchRec's, and step time with it against without
    """
    figures = BENCHES[name](Console(soft_wrap=True, highlight=False))
    if json_file:
        json_file.write_text(json.dumps(figures, indent=2) + "\n")

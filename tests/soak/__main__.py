"""`python -m tests.soak`, which `make soak` runs."""

import json
import signal
import sys
from pathlib import Path
from typing import Any

import click
from tests.soak.schedule import SoakOptions

from deltasync.cli.config import CONTEXT


@click.command(context_settings=CONTEXT)
@click.option("--seconds", type=click.FloatRange(1), default=SoakOptions.seconds, help="How long faults come.")
@click.option("--seed", type=click.IntRange(0), default=SoakOptions.seed, help="Of the schedule of faults.")
@click.option(
    "--mean-gap", type=click.FloatRange(0.1), default=SoakOptions.mean_gap, help="Seconds from fault to fault."
)
@click.option("--small", is_flag=True, help="Few processes, and no TorchRec.")
@click.option("--keep", is_flag=True, help="Keep the folder of logs and journals also when nothing was lost.")
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the report here."
)
def soak(json_file: Path | None, **settings: Any) -> None:
    """Kill, freeze, cut and change everything while trainers publish and replicas follow, and compare the rows.

    The same seed gives the same schedule. The exit status is 0 where no acknowledged row was lost, every replica
    holds what its trainer holds, and nothing was left over.
    """
    if json_file and not json_file.parent.is_dir():  # Not only at the end, when everything has run.
        raise click.UsageError(f"--json {json_file}: there is no folder {json_file.parent}")
    from rich.console import Console
    from tests.soak.report import print_report, sound
    from tests.soak.run import run_soak

    # As any other end: the processes are ended too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    console = Console()
    report = run_soak(SoakOptions(**settings), console)
    print_report(report, console)
    if json_file:
        json_file.write_text(json.dumps(report, indent=2) + "\n")
    sys.exit(0 if sound(report) else 1)


if __name__ == "__main__":
    soak()

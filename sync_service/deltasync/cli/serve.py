"""`deltasync serve`."""

import asyncio
from pathlib import Path
from typing import Any

import click

from deltasync.cli.config import CONTEXT, config_option, from_config
from deltasync.cli.consumer_settings import consumers_of_file, consumers_of_flags, merged
from deltasync.cli.endpoint_options import listening_options
from deltasync.cli.needs import SERVICE, check_needs
from deltasync.consumers.consumer import ConsumerOptions

check_needs(*SERVICE)


@click.command(context_settings=CONTEXT)
@config_option(consumers=consumers_of_file)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("deltasync-data"),
    help="Folder of everything the service keeps; made if missing.",
)
@listening_options
@click.option(
    "--consumer",
    "consumer",
    multiple=True,
    callback=consumers_of_flags,
    metavar="NAME=MODEL",
    help="Consumer to make at the start if missing. May be repeated.",
)
@click.option(
    "--admin-token",
    default=None,
    show_default=False,
    help="Token for calls that change something; without one they are refused.",
)
@click.option(
    "--log-max-bytes",
    type=click.IntRange(1 << 20),
    default=64 << 30,
    help="Hard cap of the log's file, which grows only as needed.",
)
@click.option(
    "--flush-bytes",
    type=click.IntRange(1),
    default=1 << 30,
    help="Flush the tables and cut the log once it holds this many bytes of newer rows.",
)
@click.option(
    "--replica-retention-seconds",
    type=click.FloatRange(0),
    default=3600.0,
    help="A replica away for longer no longer holds its consumer's offset.",
)
@click.option(
    "--drain-seconds",
    type=click.FloatRange(0),
    default=5.0,
    help="How long open cuts may take to finish on SIGTERM.",
)
def serve(consumer: tuple[ConsumerOptions, ...], **settings: Any) -> None:
    """Run the sync service until SIGTERM.

    Every option is also an environment variable, DELTASYNC_ and its name in capitals, and a key of the
    --config file. A flag wins over the environment, the environment over the file.

    A table [consumers.NAME] of the file, with a model and the keys of a policy, makes that consumer. One that
    exists gets this policy at every start.
    """
    from deltasync.api import server
    from deltasync.service.service import ServiceOptions

    kept = ("data_dir", "log_max_bytes", "flush_bytes", "replica_retention_seconds")
    try:
        service = ServiceOptions(**{name: settings.pop(name) for name in kept})
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    wanted = merged(consumer, from_config("consumers", ()))
    asyncio.run(server.serve(server.ServerOptions(service=service, consumers=wanted, **settings)))

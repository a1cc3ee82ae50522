"""`deltasync serve`."""

import asyncio
import signal
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from deltasync.access.limits import LimitOptions
from deltasync.base.logs import FORMATS, LEVELS, log_to_stderr
from deltasync.cli.config import CONTEXT, config_option, from_config, reader_of_config
from deltasync.cli.output import SERVICE, check_needs
from deltasync.cli.probe import probe_options, take_probe_options
from deltasync.cli.serve_options import (
    access_options,
    admin_token_of_file,
    consumers_of_file,
    consumers_of_flags,
    limits_of_file,
    limits_of_flags,
    log_options,
    merged,
    take_admin_token,
    take_log_options,
    take_tls_options,
    tls_options,
)
from deltasync.consumers.consumer import ConsumerOptions

if TYPE_CHECKING:
    from deltasync.api.reload import Reloaded

check_needs(*SERVICE)


@click.command(context_settings=CONTEXT)
@config_option(consumers=consumers_of_file, limits=limits_of_file, admin_token=admin_token_of_file)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("deltasync-data"),
    help="Folder of everything the service keeps; made if missing.",
)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option(
    "--grpc-port",
    type=click.IntRange(0, 65535),
    default=50051,
    help="Port for trainers and replicas; 0 = any free one (see endpoints.json in the data folder).",
)
@click.option(
    "--http-port", type=click.IntRange(0, 65535), default=8080, help="Port for operators; 0 = any free one."
)
@tls_options
@click.option(
    "--consumer",
    "consumer",
    multiple=True,
    callback=consumers_of_flags,
    metavar="NAME=MODEL",
    help="Consumer to make at the start if missing. May be repeated.",
)
@access_options
@log_options
@click.option(
    "--log-max-bytes",
    type=click.IntRange(1 << 20),
    default=64 << 30,
    help="Hard cap of the log's file, which grows only as needed.",
)
@click.option(
    "--checkpoints",
    default=None,
    metavar="URL",
    show_default="only in --data-dir",
    help="Copy every checkpoint to this folder or object storage, too: s3://BUCKET/PATH.",
)
@click.option(
    "--checkpoint-seconds",
    type=click.FloatRange(1),
    default=600.0,
    help="Write a checkpoint of a model that has changed at least this often.",
)
@click.option(
    "--checkpoint-bytes",
    type=click.IntRange(1),
    default=None,
    show_default="256 MiB, at most a quarter of --log-max-bytes",
    help="Write a checkpoint once the log has this many bytes of newer rows of a model.",
)
@click.option(
    "--keep-checkpoints",
    type=click.IntRange(2),
    default=3,
    help="Number of checkpoints of a model to keep. The log reaches back to the second newest.",
)
@click.option(
    "--keep-checkpoints-seconds",
    type=click.FloatRange(0),
    default=0.0,
    help="Also keep every checkpoint that is younger than this.",
)
@click.option(
    "--table-memory",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    show_default="memory",
    metavar="DIR",
    help="Keep tables in scratch files in this folder, on a fast disk: for tables that are larger than memory.",
)
@click.option(
    "--release-memory",
    type=click.IntRange(1 << 20),
    default=64 << 20,
    metavar="BYTES",
    help="Memory for the rows that replicas are being sent. Larger releases are copied block by block.",
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
@click.option(
    "--max-norm-growth",
    type=click.FloatRange(1),
    default=None,
    show_default=False,
    help="By which factor a row's norm may be over the largest that a row of its table has had. No limit unless "
    "given.",
)
@probe_options
@click.option(
    "--log-format",
    type=click.Choice(FORMATS),
    default="auto",
    help="What is written to standard error: text on a terminal and JSON elsewhere, or always one of them.",
)
@click.option(
    "--log-level",
    default="info",
    help=f"From which level on: {', '.join(LEVELS)}; with commas also deltasync.NAME=LEVEL.",
)
@click.option(
    "--poisoned",
    type=click.Choice(["refuse", "quarantine"]),
    default="refuse",
    help="What becomes of a cut with a row over that: refused, or sealed with its consumers paused before.",
)
@click.option(
    "--limit",
    "limit",
    multiple=True,
    callback=limits_of_flags,
    metavar="NAME=NUMBER",
    help="Limit of what peers may take; the README of the service has all of them. May be repeated.",
)
def serve(consumer: tuple[ConsumerOptions, ...], limit: Mapping[str, int], **settings: Any) -> None:
    """Run the sync service until SIGTERM.

    Every option is also an environment variable, DELTASYNC_ and its name in capitals, and a key of the
    --config file. A flag wins over the environment, the environment over the file.

    A table [consumers.NAME] of the file, with a model and the keys of a policy, makes that consumer. One that
    exists gets this policy at every start, and on SIGHUP, when these tables are read again, and so is a table
    [limits], of which a --limit wins.
    """
    log_to_stderr(settings.pop("log_format"), settings.pop("log_level"))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # Which would end a process that does not listen to it yet.
    from deltasync.api import server
    from deltasync.api.server_options import ServerOptions
    from deltasync.cuts.norm_guard import NormLimit
    from deltasync.service.options import ServiceOptions

    try:
        growth, quarantine = settings.pop("max_norm_growth"), settings.pop("poisoned") == "quarantine"
        norm_limit = NormLimit(growth, quarantine) if growth else None
        found, read = _reloaded(consumer, limit, from_config), reader_of_config()
        settings["release_memory_bytes"] = settings.pop("release_memory")
        of_service = {
            each.name: settings.pop(each.name) for each in fields(ServiceOptions) if each.name in settings
        }
        service = ServiceOptions(norm_limit=norm_limit, limits=found.limits, **of_service)
        tls = take_tls_options(settings)
        settings["probe"] = take_probe_options(settings, guarded=tls is not None or settings["roles"] is not None)
        settings["shared"] = take_log_options(settings, service.log_max_bytes)
        settings["admin_token"] = take_admin_token(settings)
        read_settings = partial(_reloaded, consumer, limit, read) if read else None
        options = ServerOptions(
            service=service, consumers=found.consumers, read_settings=read_settings, tls=tls, **settings
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        asyncio.run(server.serve(options))
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # Likewise one that listens no more.


def _reloaded(
    consumers: tuple[ConsumerOptions, ...], limits: Mapping[str, int], read: Callable[[str, Any], Any]
) -> "Reloaded":
    """What flags and the file say of what is read again on SIGHUP; `read` reads a key of the file."""
    from deltasync.api.reload import Reloaded

    described = {**read("limits", {}), **limits}
    return Reloaded(merged(consumers, read("consumers", ())), LimitOptions.described(described))

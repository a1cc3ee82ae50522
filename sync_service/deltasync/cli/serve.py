"""`deltasync serve`: its options, and the settings that they make. The command is at the end."""

import asyncio
import os
import signal
import socket
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from deltasync.access.limits import LimitOptions
from deltasync.access.roles import checked_token
from deltasync.base.errors import InvalidInput
from deltasync.base.logs import FORMATS, LEVELS, log_to_stderr
from deltasync.cli.config import CONTEXT, config_option, from_config, reader_of_config
from deltasync.cli.output import SERVICE, check_needs
from deltasync.cli.probe import probe_options, take_probe_options
from deltasync.consumers.consumer import ConsumerOptions

if TYPE_CHECKING:
    from deltasync.access.tls import TlsOptions
    from deltasync.api.process import SharedLogOptions
    from deltasync.api.reload import Reloaded

check_needs(*SERVICE)


F = TypeVar("F", bound=Callable[..., Any])

_ADMIN_TOKEN = "admin_token"  # noqa: S105  # the name of it
_FILE = click.Path(dir_okay=False, path_type=Path)


def access_options(command: F) -> F:
    """`--roles`, `--admin-token-file` and `--insecure`."""
    for option in (
        click.option(
            "--insecure",
            is_flag=True,
            help="Listen on an address that others reach, also without TLS and roles.",
        ),
        click.option(
            "--admin-token-file",
            type=_FILE,
            help="File with a token that has role admin; also DELTASYNC_ADMIN_TOKEN, or admin_token in the "
            "--config file.",
        ),
        click.option(
            "--roles",
            type=_FILE,
            help="File that says which tokens and certificates have which roles, see `deltasync tokens`. Without "
            "one anyone may publish, subscribe and read.",
        ),
    ):
        command = option(command)
    return command


def admin_token_of_file(token: object) -> str:
    """The admin token that a `--config` file has.

    Raises:
        InvalidInput: it is no text.
    """
    if not isinstance(token, str):
        raise InvalidInput(f"{_ADMIN_TOKEN}: expected a text")
    return token


def take_admin_token(settings: dict[str, Any]) -> str | None:
    """The admin token: of its file, of the environment or of the `--config` file, in that order; None without one.

    Raises:
        InvalidInput: its file cannot be read, or has no token that could be sent.
    """
    path: Path | None = settings.pop(f"{_ADMIN_TOKEN}_file")
    if path is None:
        variable = f"DELTASYNC_{_ADMIN_TOKEN.upper()}"
        if token := os.environ.get(variable):
            return checked_token(variable, token)
        token = from_config(_ADMIN_TOKEN, None)
        return checked_token(f"{_ADMIN_TOKEN} in the --config file", token) if token else None
    try:
        return checked_token(f"--admin-token-file {path}", path.read_text("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"--admin-token-file {path}: {getattr(error, 'strerror', 'no text')}") from error


def consumers_of_flags(
    _ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]
) -> tuple[ConsumerOptions, ...]:
    """The consumers of `--consumer NAME=MODEL`, which keep the policy that they have."""
    pairs = [value.split("=", 1) for value in values]
    if wrong := [value for value, pair in zip(values, pairs, strict=True) if len(pair) != 2]:
        raise click.BadParameter(f"{wrong[0]!r}: expected NAME=MODEL")
    return tuple(ConsumerOptions(name, model) for name, model in pairs)


def consumers_of_file(described: Any) -> tuple[ConsumerOptions, ...]:
    """The consumers of the file's tables `[consumers.NAME]`: a model, and the keys of a policy.

    Raises:
        InvalidInput: what is wrong, and of which consumer.
    """
    if not isinstance(described, dict):
        raise InvalidInput("consumers: expected tables [consumers.NAME]")
    return tuple(_consumer(name, each) for name, each in described.items())


def _consumer(name: str, described: Any) -> ConsumerOptions:
    try:
        if not isinstance(described, dict):
            raise InvalidInput("expected a table")
        policy = {key: value for key, value in described.items() if key != "model"}
        return ConsumerOptions.described(name, described.get("model"), policy)
    except InvalidInput as error:
        raise InvalidInput(f"[consumers.{name}]: {error}") from error


def merged(flags: tuple[ConsumerOptions, ...], file: tuple[ConsumerOptions, ...]) -> tuple[ConsumerOptions, ...]:
    """Those of both; of a consumer that both name the file has the policy.

    Raises:
        InvalidInput: they name different models for one consumer.
    """
    models = {each.name: each.model for each in file}
    for each in flags:
        if models.get(each.name, each.model) != each.model:
            raise InvalidInput(
                f"consumer {each.name!r} follows model {each.model!r} by --consumer, but {models[each.name]!r} by "
                f"[consumers.{each.name}] of the --config file"
            )
    return (*(each for each in flags if each.name not in models), *file)


def limits_of_flags(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    """The limits of `--limit NAME=NUMBER`, by name."""
    found = dict[str, int]()
    for value in values:
        name, equals, number = value.partition("=")
        if not equals or not number.replace("_", "").isdecimal():
            raise click.BadParameter(f"{value!r}: expected NAME=NUMBER")
        found[name] = int(number)
    try:
        LimitOptions.described(found)
    except InvalidInput as error:
        raise click.BadParameter(str(error)) from error
    return found


def limits_of_file(described: Any) -> Mapping[str, int]:
    """The limits of the file's table `[limits]`, by name.

    Raises:
        InvalidInput: one that there is not, or that is no number.
    """
    LimitOptions.described(described)
    found: Mapping[str, int] = described
    return found


def log_options(command: F) -> F:
    """`--log` and the options that belong to it; see `take_log_options`."""
    for option in reversed(
        (
            click.option(
                "--log",
                default=None,
                metavar="URL[,URL]",
                show_default="with the process",
                help="NATS brokers that keep the log, nats://HOST:PORT: several processes then share the models.",
            ),
            click.option("--log-credentials", type=_FILE, help="File with the credentials for the brokers."),
            click.option("--log-ca", type=_FILE, help="PEM file of the brokers' CA."),
            click.option("--log-cert", type=_FILE, help="PEM file of the process's certificate for the brokers."),
            click.option("--log-key", type=_FILE, help="PEM file of that certificate's key."),
            click.option(
                "--log-monitor",
                default="",
                metavar="URL[,URL]",
                help="Monitoring ports of the brokers, http://HOST:PORT, which say whether they sync to disk.",
            ),
            click.option("--log-prefix", default="deltasync", help="Of the names of all that brokers keep."),
            click.option("--log-replicas", type=click.IntRange(1), default=3, help="Brokers that keep each log."),
            click.option(
                "--accept-log-risk", is_flag=True, help="Serve although brokers could lose what they acknowledge."
            ),
            click.option(
                "--process",
                default=None,
                show_default="the host's name",
                help="Name of this process among those that share the log.",
            ),
            click.option(
                "--advertise-grpc", default="", metavar="HOST:PORT", help="Where others reach it by gRPC."
            ),
            click.option("--advertise-http", default="", metavar="URL", help="Where others reach it by HTTP."),
            click.option(
                "--lease-seconds",
                type=click.FloatRange(0.5, 3600),
                default=6.0,
                help="After so long without a word of a process, others take its models.",
            ),
        )
    ):
        command = option(command)
    return command


def take_log_options(settings: dict[str, Any], max_bytes: int) -> "SharedLogOptions | None":
    """Take what says which brokers keep the log out of a command's settings; None where it is the process's own.

    Raises:
        InvalidInput: something of it is not right.
    """
    from deltasync.api.process import SharedLogOptions
    from deltasync.cluster.member import OwnershipOptions
    from deltasync.log.brokers import BrokerOptions

    urls, monitors = settings.pop("log"), _listed(settings.pop("log_monitor"))
    files = {name: settings.pop(f"log_{name}") for name in ("credentials", "ca", "cert", "key")}
    prefix, replicas = settings.pop("log_prefix"), settings.pop("log_replicas")
    process = settings.pop("process") or socket.gethostname().partition(".")[0]
    grpc, http = settings.pop("advertise_grpc"), settings.pop("advertise_http")
    lease, accept_risk = settings.pop("lease_seconds"), settings.pop("accept_log_risk")
    if not urls:
        return None
    return SharedLogOptions(
        brokers=BrokerOptions(
            urls=_listed(urls), prefix=prefix, replicas=replicas, monitors=monitors, max_bytes=max_bytes, **files
        ),
        process=process,
        grpc=grpc,
        http=http,
        ownership=OwnershipOptions(lease_seconds=lease),
        accept_risk=accept_risk,
    )


def _listed(text: str) -> tuple[str, ...]:
    return tuple(each.strip() for each in text.split(",") if each.strip())


def tls_options(command: F) -> F:
    """`--tls-cert`, `--tls-key` and `--tls-client-ca`; see `take_tls_options`."""
    for option in (
        click.option(
            "--tls-client-ca",
            type=_FILE,
            help="PEM file of the CAs of clients: gRPC then needs a certificate of theirs, HTTP asks for one.",
        ),
        click.option("--tls-key", type=_FILE, help="PEM file of the certificate's key."),
        click.option(
            "--tls-cert",
            type=_FILE,
            help="PEM file of the service's certificate: both ports then speak TLS. All three are read again when "
            "they change.",
        ),
    ):
        command = option(command)
    return command


def take_tls_options(settings: dict[str, Any]) -> "TlsOptions | None":
    """Take the options out of a command's settings; None where there is to be no TLS.

    Raises:
        InvalidInput: they do not go together.
    """
    from deltasync.access.tls import TlsOptions

    return TlsOptions.of_settings(*(settings.pop(name) for name in ("tls_cert", "tls_key", "tls_client_ca")))


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
    from deltasync.api import process
    from deltasync.api.process import ServerOptions
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
        asyncio.run(process.serve(options))
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # Likewise one that listens no more.


def _reloaded(
    consumers: tuple[ConsumerOptions, ...], limits: Mapping[str, int], read: Callable[[str, Any], Any]
) -> "Reloaded":
    """What flags and the file say of what is read again on SIGHUP; `read` reads a key of the file."""
    from deltasync.api.reload import Reloaded

    described = {**read("limits", {}), **limits}
    return Reloaded(merged(consumers, read("consumers", ())), LimitOptions.described(described))

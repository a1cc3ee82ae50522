"""`deltasync serve` and the groups of its options."""

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

_ADMIN_TOKEN = "admin_token"  # noqa: S105  # a name, no secret
_FILE = click.Path(dir_okay=False, path_type=Path)


def access_options(command: F) -> F:
    """`--roles`, `--admin-token-file` and `--insecure`."""
    for option in (
        click.option(
            "--insecure",
            is_flag=True,
            help="Listen on an address that other machines can reach, even without TLS and roles.",
        ),
        click.option(
            "--admin-token-file",
            type=_FILE,
            help="File with a token that gets role admin. Or set DELTASYNC_ADMIN_TOKEN, or admin_token in the "
            "--config file.",
        ),
        click.option(
            "--roles",
            type=_FILE,
            help="File with the roles of tokens and certificates, see `deltasync tokens`. Without it anyone may "
            "publish, subscribe and read.",
        ),
    ):
        command = option(command)
    return command


def admin_token_of_file(token: object) -> str:
    """The admin token of a `--config` file.

    Raises:
        InvalidInput: it is not a string.
    """
    if not isinstance(token, str):
        raise InvalidInput(f"{_ADMIN_TOKEN}: expected a string")
    return token


def take_admin_token(settings: dict[str, Any]) -> str | None:
    """Pop the admin token: from its file, the environment or the `--config` file, in that order; None without one.

    Raises:
        InvalidInput: the file is unreadable, or its token cannot be sent.
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
        raise InvalidInput(f"--admin-token-file {path}: {getattr(error, 'strerror', 'not text')}") from error


def consumers_of_flags(
    _ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]
) -> tuple[ConsumerOptions, ...]:
    """The consumers of `--consumer NAME=MODEL`. Existing ones keep their policy."""
    pairs = [value.split("=", 1) for value in values]
    if wrong := [value for value, pair in zip(values, pairs, strict=True) if len(pair) != 2]:
        raise click.BadParameter(f"{wrong[0]!r}: expected NAME=MODEL")
    return tuple(ConsumerOptions(name, model) for name, model in pairs)


def consumers_of_file(described: Any) -> tuple[ConsumerOptions, ...]:
    """The consumers of the file's tables `[consumers.NAME]`, each with a model and policy fields.

    Raises:
        InvalidInput: a consumer is wrong; the message names it.
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
    """The consumers of flags and file. If both name one, the file's policy wins.

    Raises:
        InvalidInput: they name different models for one consumer.
    """
    models = {each.name: each.model for each in file}
    for each in flags:
        if models.get(each.name, each.model) != each.model:
            raise InvalidInput(
                f"consumer {each.name!r}: model {each.model!r} in --consumer, but {models[each.name]!r} in "
                f"[consumers.{each.name}] of the --config file; name the same model in both"
            )
    return (*(each for each in flags if each.name not in models), *file)


def limits_of_flags(_ctx: click.Context, _param: click.Parameter, values: tuple[str, ...]) -> dict[str, int]:
    """The limits of `--limit NAME=NUMBER`, by name."""
    limits = dict[str, int]()
    for value in values:
        name, _, number = value.partition("=")
        try:
            limits[name] = int(number)
        except ValueError as error:
            raise click.BadParameter(f"{value!r}: expected NAME=NUMBER") from error
    try:
        LimitOptions.described(limits)
    except InvalidInput as error:
        raise click.BadParameter(str(error)) from error
    return limits


def limits_of_file(described: Any) -> Mapping[str, int]:
    """The limits of the file's table `[limits]`, by name.

    Raises:
        InvalidInput: a limit does not exist or is not a number.
    """
    LimitOptions.described(described)
    limits: Mapping[str, int] = described
    return limits


def log_options(command: F) -> F:
    """`--log` and its companions; see `take_log_options`."""
    for option in reversed(
        (
            click.option(
                "--log",
                default=None,
                metavar="URL[,URL]",
                show_default="a file in --data-dir",
                help="NATS brokers that keep the log, nats://HOST:PORT. Several processes then share the models.",
            ),
            click.option("--log-credentials", type=_FILE, help="File with credentials for the brokers."),
            click.option("--log-ca", type=_FILE, help="PEM file of the brokers' CA."),
            click.option("--log-cert", type=_FILE, help="PEM file of the certificate to show the brokers."),
            click.option("--log-key", type=_FILE, help="PEM file of that certificate's key."),
            click.option(
                "--log-monitor",
                default="",
                metavar="URL[,URL]",
                help="Monitoring ports of the brokers, http://HOST:PORT. Used to check that they sync to disk.",
            ),
            click.option("--log-prefix", default="deltasync", help="Prefix of all names in the brokers."),
            click.option("--log-replicas", type=click.IntRange(1), default=3, help="Copies of each log."),
            click.option(
                "--accept-log-risk", is_flag=True, help="Serve even if the brokers could lose acknowledged data."
            ),
            click.option(
                "--process",
                default=None,
                show_default="the host's name",
                help="Name of this process among those that share the log.",
            ),
            click.option(
                "--advertise-grpc",
                default="",
                metavar="HOST:PORT",
                help="gRPC address at which clients and other processes reach this one.",
            ),
            click.option(
                "--advertise-http",
                default="",
                metavar="URL",
                help="HTTP address at which clients and other processes reach this one.",
            ),
            click.option(
                "--lease-seconds",
                type=click.FloatRange(0.5, 3600),
                default=6.0,
                help="Take over the models of a process that has been silent for this long.",
            ),
        )
    ):
        command = option(command)
    return command


def take_log_options(settings: dict[str, Any], max_bytes: int) -> "SharedLogOptions | None":
    """Pop the settings of a shared log; None if the process keeps its own.

    Raises:
        InvalidInput: a setting is wrong.
    """
    from deltasync.api.process import SharedLogOptions
    from deltasync.cluster.member import ClusterOptions
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
        ownership=ClusterOptions(lease_seconds=lease),
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
            help="PEM file of the CAs of clients. gRPC then requires a client certificate, HTTP accepts one.",
        ),
        click.option("--tls-key", type=_FILE, help="PEM file of the certificate's key."),
        click.option(
            "--tls-cert",
            type=_FILE,
            help="PEM file of the service's certificate. Both ports then use TLS. The service reloads the three "
            "files when they change.",
        ),
    ):
        command = option(command)
    return command


def take_tls_options(settings: dict[str, Any]) -> "TlsOptions | None":
    """Pop the TLS options; None without TLS.

    Raises:
        InvalidInput: the options contradict each other.
    """
    from deltasync.access.tls import TlsOptions

    return TlsOptions.of_settings(*(settings.pop(name) for name in ("tls_cert", "tls_key", "tls_client_ca")))


@click.command(context_settings=CONTEXT)
@config_option(consumers=consumers_of_file, limits=limits_of_file, admin_token=admin_token_of_file)
@click.option(
    "--data-dir",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("deltasync-data"),
    help="Folder for all of the service's data; created if missing.",
)
@click.option("--host", default="127.0.0.1", help="Address to listen on.")
@click.option(
    "--grpc-port",
    type=click.IntRange(0, 65535),
    default=50051,
    help="gRPC port for trainers and replicas; 0 = any free port, written to endpoints.json in --data-dir.",
)
@click.option(
    "--http-port", type=click.IntRange(0, 65535), default=8080, help="HTTP port for operators; 0 = any free port."
)
@tls_options
@click.option(
    "--consumer",
    "consumer",
    multiple=True,
    callback=consumers_of_flags,
    metavar="NAME=MODEL",
    help="Create this consumer at the start if it is missing. May be repeated.",
)
@access_options
@log_options
@click.option(
    "--log-max-bytes",
    type=click.IntRange(1 << 20),
    default=64 << 30,
    help="Maximum size of the log file, which grows as needed.",
)
@click.option(
    "--checkpoints",
    default=None,
    metavar="URL",
    show_default="only in --data-dir",
    help="Also copy every checkpoint to this folder or object storage, s3://BUCKET/PATH.",
)
@click.option(
    "--checkpoint-seconds",
    type=click.FloatRange(1),
    default=600.0,
    help="Write a checkpoint of each changed model at least once in this many seconds.",
)
@click.option(
    "--checkpoint-bytes",
    type=click.IntRange(1),
    default=None,
    show_default="256 MiB, at most a quarter of --log-max-bytes",
    help="Write a checkpoint of a model once the log has this many bytes of newer rows.",
)
@click.option(
    "--keep-checkpoints",
    type=click.IntRange(2),
    default=3,
    help="Checkpoints to keep for each model. The log reaches back to the second newest.",
)
@click.option(
    "--keep-every-seconds",
    type=click.FloatRange(1),
    default=None,
    show_default="only `deltasync versions keep`",
    help="Keep a version of each changed model this often.",
)
@click.option(
    "--keep-last",
    type=click.IntRange(1),
    default=10,
    help="Number of the newest versions kept by --keep-every-seconds that stay. Versions with a name always stay.",
)
@click.option(
    "--keep-for-seconds",
    type=click.FloatRange(0),
    default=0.0,
    help="Versions kept by --keep-every-seconds that are younger than this also stay.",
)
@click.option(
    "--history-seconds",
    type=click.FloatRange(120),
    default=86_400.0,
    help="How long to store what consumers served. A consumer can follow another one at most this far behind.",
)
@click.option(
    "--table-memory",
    type=click.Path(file_okay=False, path_type=Path),
    default=None,
    show_default="memory",
    metavar="DIR",
    help="Keep tables in scratch files in this folder, on a fast disk. For tables larger than memory.",
)
@click.option(
    "--release-memory",
    type=click.IntRange(1 << 20),
    default=64 << 20,
    metavar="BYTES",
    help="Memory for rows on their way to replicas. Larger releases are copied block by block.",
)
@click.option(
    "--replica-retention-seconds",
    type=click.FloatRange(0),
    default=3600.0,
    help="Stop counting a replica in its consumer's offset once it has been away this long.",
)
@click.option(
    "--drain-seconds",
    type=click.FloatRange(0),
    default=5.0,
    help="On SIGTERM, wait this long for open cuts to finish.",
)
@click.option(
    "--max-norm-growth",
    type=click.FloatRange(1),
    default=None,
    show_default=False,
    help="Refuse a cut with a row whose norm exceeds the table's largest so far by this factor. See --poisoned. "
    "No limit by default.",
)
@probe_options
@click.option(
    "--log-format",
    type=click.Choice(FORMATS),
    default="auto",
    help="Format of the log on standard error. auto is text on a terminal and JSON elsewhere.",
)
@click.option(
    "--log-level",
    default="info",
    help=f"Lowest level to log: {', '.join(LEVELS)}. Add ,deltasync.NAME=LEVEL for single loggers.",
)
@click.option(
    "--poisoned",
    type=click.Choice(["refuse", "quarantine"]),
    default="refuse",
    help="What to do with a cut over --max-norm-growth: refuse it, or pause the model's consumers and seal it.",
)
@click.option(
    "--limit",
    "limit",
    multiple=True,
    callback=limits_of_flags,
    metavar="NAME=NUMBER",
    help="Limit on what a peer may use, see sync_service/docs/reference/settings.md. May be repeated.",
)
def serve(consumer: tuple[ConsumerOptions, ...], limit: Mapping[str, int], **settings: Any) -> None:
    """Run the sync service until SIGTERM.

    Every option is also an environment variable, DELTASYNC_ plus its name in capitals, and a key of the
    --config file. A flag overrides the environment, and the environment overrides the file.

    The file may also have tables [consumers.NAME], with a model and policy fields, and a table [limits]. The
    service creates these consumers, or gives existing ones this policy. It reads both tables at the start and
    again on SIGHUP. A --limit overrides the table.
    """
    log_to_stderr(settings.pop("log_format"), settings.pop("log_level"))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # It would end a process without a handler.
    from deltasync.api import process
    from deltasync.api.process import ServerOptions
    from deltasync.cuts.norm_guard import NormLimit
    from deltasync.service.options import ServiceOptions

    try:
        growth, quarantine = settings.pop("max_norm_growth"), settings.pop("poisoned") == "quarantine"
        norm_limit = NormLimit(growth, quarantine) if growth else None
        reloaded, read = _reloaded(consumer, limit, from_config), reader_of_config()
        settings["release_memory_bytes"] = settings.pop("release_memory")
        of_service = {
            each.name: settings.pop(each.name) for each in fields(ServiceOptions) if each.name in settings
        }
        service = ServiceOptions(norm_limit=norm_limit, limits=reloaded.limits, **of_service)
        tls = take_tls_options(settings)
        settings["probe"] = take_probe_options(settings, guarded=tls is not None or settings["roles"] is not None)
        settings["shared"] = take_log_options(settings, service.log_max_bytes)
        settings["admin_token"] = take_admin_token(settings)
        read_settings = partial(_reloaded, consumer, limit, read) if read else None
        options = ServerOptions(
            service=service, consumers=reloaded.consumers, read_settings=read_settings, tls=tls, **settings
        )
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    try:
        asyncio.run(process.serve(options))
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # The loop's handler no longer works.


def _reloaded(
    consumers: tuple[ConsumerOptions, ...], limits: Mapping[str, int], read: Callable[[str, Any], Any]
) -> "Reloaded":
    """The settings that SIGHUP reloads, from flags and the file; `read` reads a key of the file."""
    from deltasync.api.reload import Reloaded

    described = {**read("limits", {}), **limits}
    return Reloaded(merged(consumers, read("consumers", ())), LimitOptions.described(described))

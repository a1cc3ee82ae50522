"""Where the log is kept: with the process, or by brokers that several processes share."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from deltasync.api.shared_options import SharedLogOptions

F = TypeVar("F", bound=Callable[..., Any])

_FILE = click.Path(dir_okay=False, path_type=Path)


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
    from deltasync.api.shared_options import SharedLogOptions
    from deltasync.ownership.options import OwnershipOptions
    from deltasync.storage.brokers import BrokerOptions

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

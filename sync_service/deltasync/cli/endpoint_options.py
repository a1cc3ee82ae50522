"""Which service a command talks to, and with which rights; and where a service listens."""

import getpass
import os
import socket
from collections.abc import Callable
from functools import wraps
from typing import Any, TypeVar

import click

from deltasync.client.endpoint import Endpoint
from deltasync.core.errors import InvalidInput

Command = Callable[..., Any]
F = TypeVar("F", bound=Command)

_TOKEN = click.option(
    "--admin-token",
    default="",
    show_default=False,
    help="The service's admin token; also DELTASYNC_ADMIN_TOKEN.",
)


_BY = click.option(
    "--by",
    default=lambda: f"{_user()}@{socket.gethostname()}",
    show_default="USER@HOST",
    help="Who asks, for the service's log.",
)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # Of a number without a name, as in some containers.
        return str(os.getuid())


def service_options(*, default: str | None = "127.0.0.1:50051", rights: bool = False) -> Callable[[F], Command]:
    """`--service`, and with `rights` `--admin-token` and `--by`; the command is given all as `service`, an
    `Endpoint`.

    Args:
        default: the address unless one is given; None = one has to be.
        rights: whether the command changes something.
    """
    help_text = "Where the service answers gRPC, as HOST:PORT."
    # Click takes a None that it is given for a value.
    value: dict[str, Any] = {"required": True} if default is None else {"default": default}
    service = click.option("--service", help=help_text, **value)
    return _endpoint_option("service", Endpoint.of_grpc, service, *([_TOKEN, _BY] if rights else []))


def http_options(command: F) -> Command:
    """`--http`; the command is given it as `http`, an `Endpoint`."""
    http = click.option("--http", default="http://127.0.0.1:8080", help="Where the service answers operators.")
    return _endpoint_option("http", Endpoint.of_http, http)(command)


def listening_options(command: F) -> F:
    """`--host`, `--grpc-port` and `--http-port`."""
    port = click.IntRange(0, 65535)
    for option in (
        click.option("--http-port", type=port, default=8080, help="Port for operators; 0 = any free one."),
        click.option(
            "--grpc-port",
            type=port,
            default=50051,
            help="Port for trainers and replicas; 0 = any free one (see endpoints.json in the data folder).",
        ),
        click.option("--host", default="127.0.0.1", help="Address to listen on."),
    ):
        command = option(command)
    return command


def _endpoint_option(
    name: str, check: Callable[[Endpoint], Endpoint], *options: Callable[[Command], Command]
) -> Callable[[F], Command]:
    def decorated(command: F) -> Command:
        @wraps(command)
        def with_endpoint(**settings: Any) -> Any:
            address, token, by = settings.pop(name), settings.pop("admin_token", ""), settings.pop("by", "")
            try:
                endpoint = check(Endpoint(address, token, by=by))
            except InvalidInput as error:
                raise click.UsageError(str(error)) from error
            return command(**settings, **{name: endpoint})

        wrapped: Command = with_endpoint
        for option in reversed(options):
            wrapped = option(wrapped)
        return wrapped

    return decorated

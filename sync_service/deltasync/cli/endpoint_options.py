"""Which service a command talks to, and with which rights; and where a service listens."""

import getpass
import os
import socket
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar, cast

import click

from deltasync.client.endpoint import Endpoint
from deltasync.client.endpoint_settings import endpoint_settings
from deltasync.client.other_side import grpc_of, http_of
from deltasync.core.errors import InvalidInput

Command = Callable[..., Any]
F = TypeVar("F", bound=Command)

_FILE = click.Path(dir_okay=False, path_type=Path)


def _option(flag: str, help_text: str, **settings: Any) -> Callable[[F], F]:
    # `endpoint_settings` looks into the environment, and into the endpoint's file after that.
    return click.option(flag, help=help_text, allow_from_autoenv=False, **settings)


_RIGHTS = (
    _option("--ca", "PEM file of the CA that the service's certificate is from: TLS is spoken.", type=_FILE),
    _option("--cert", "PEM file of a certificate to show.", type=_FILE),
    _option("--key", "PEM file of its key.", type=_FILE),
    _option("--server-name", "The name that the service's certificate is for, where it is not the host."),
    _option("--token-file", "File with a token to show; also DELTASYNC_TOKEN, with the token itself.", type=_FILE),
    _option("--endpoint", "TOML file with any of these, and the address.", type=_FILE, metavar="FILE"),
    _option("--insecure", "Send the token over plain text, which others can read.", is_flag=True),
)
_NAMES = ("ca", "cert", "key", "server_name", "token_file", "endpoint", "insecure")

_SERVICE = "The service: where it answers gRPC, as HOST:PORT, or HTTP, as http://HOST:PORT."

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
    """`--service` and what is shown there, and with `rights` `--by`; the command is given all as `service`, an
    `Endpoint`.

    Each is also a variable of the environment, DELTASYNC_ and its name in capitals, and a key of the `--endpoint`
    file, in this order.

    Args:
        default: the address unless one is given; None = one has to be.
        rights: whether the command changes something.
    """
    service = _option("--service", _SERVICE, show_default=default or False)
    return _endpoint_option("service", grpc_of, default, service, *([_BY] if rights else []))


def http_options(command: F) -> Command:
    """`--service` and what is shown there, for a command that asks over HTTP; it is given all as `http`, an
    `Endpoint`.
    """
    default = "http://127.0.0.1:8080"
    service = _option("--service", _SERVICE, show_default=default)
    http = _option("--http", "The same where only HTTP is reached, as http://HOST:PORT.")
    return _endpoint_option("http", http_of, default, service, http)(command)


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
    name: str, check: Callable[[Endpoint], Endpoint], default: str | None, *options: Callable[[Command], Command]
) -> Callable[[F], Command]:
    def decorated(command: F) -> Command:
        @wraps(command)
        def with_endpoint(**settings: Any) -> Any:
            given = {each: settings.pop(each) for each in _NAMES} | {"by": settings.pop("by", "")}
            try:
                addresses = settings.pop("service"), settings.pop("http", None)
                endpoint = check(_endpoint(name, *addresses, default, given))
            except InvalidInput as error:
                raise click.UsageError(str(error)) from error
            return command(**settings, **{name: endpoint})

        wrapped: Command = with_endpoint
        for option in reversed((*options, *_RIGHTS)):
            wrapped = cast("Command", option(wrapped))
        return wrapped

    return decorated


def _endpoint(
    name: str, service: str | None, http: str | None, default: str | None, given: dict[str, Any]
) -> Endpoint:
    """The endpoint that is given: what the command line says wins over what goes with its kind better."""
    found = endpoint_settings({**given, "address": service, "http": http}, os.environ)
    address, other = found.pop("address", None), found.pop("http", None)
    if name == "http" and not service:
        address = other or address
    if http:
        Endpoint.of_http(Endpoint(**found | {"address": http}))
    if (where := address or default) is None:
        raise InvalidInput("Missing option '--service': where the service answers.")
    return Endpoint(**found | {"address": where})

"""The options for a command's service and credentials."""

import getpass
import os
import shlex
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from deltasync.base.errors import (
    DeltasyncError,
    InvalidInput,
    NotFound,
    NotPermitted,
    ServiceFailed,
    ServiceUnavailable,
)
from deltasync.base.process import built_commit, built_version
from deltasync.client.endpoint import Endpoint, endpoint_settings

# Errors of a service that lacks a route, a key or a parameter, or understands it differently.
_MAY_BE = (InvalidInput, NotPermitted, ServiceFailed, ServiceUnavailable)
_NO_ROUTE = "/openapi.json names all routes"
_SECONDS = 2.0
_SHOWN = 12


@contextmanager
def naming_versions(service: Endpoint) -> Iterator[None]:
    """Add both versions to an error if they differ and may be its cause.

    After such an error, this asks the service for its version, for at most two seconds.
    """
    try:
        yield
    except DeltasyncError as error:
        if hint := _hint(error, service):
            raise type(error)(f"{error}; {hint}") from error
        raise
    except KeyError as error:
        if hint := _difference(service):
            raise ServiceUnavailable(f"the answer has no {error}; {hint}") from error
        raise


def _hint(error: DeltasyncError, service: Endpoint) -> str:
    if not isinstance(error, _MAY_BE) and not (isinstance(error, NotFound) and _NO_ROUTE in str(error)):
        return ""
    if hint := _difference(service):
        return hint
    if isinstance(error, ServiceUnavailable) and ": HTTP 404: " in str(error):
        ours = _words(built_version(), built_commit())
        return f"this command is deltasync {ours}; check that the address is that of a deltasync service"
    return ""


def _difference(service: Endpoint) -> str:
    """How the service's version differs, and the remedy; empty if it is the same or unknown."""
    try:
        answer = replace(Endpoint.of_http(service).alone()[0], timeout_seconds=_SECONDS).ask("GET", "/version")
        version, commit = str(answer["version"]), str(answer.get("commit") or "")
    except (DeltasyncError, AttributeError, LookupError, TypeError):
        return ""
    ours, our_commit = built_version(), built_commit()
    same = not (commit and our_commit) or commit.removesuffix("-dirty") == our_commit.removesuffix("-dirty")
    if version == ours and same:
        return ""
    return (
        f"this command is deltasync {_words(ours, our_commit)}, the service {_words(version, commit)}: use a "
        "command of the service's version, or update the service"
    )


def _words(version: str, commit: str) -> str:
    return (version or "of an unknown version") + (f" (commit {commit[:_SHOWN]})" if commit else "")


Command = Callable[..., Any]
F = TypeVar("F", bound=Command)

_FILE = click.Path(dir_okay=False, path_type=Path)


def _option(flag: str, help_text: str, **settings: Any) -> Callable[[F], F]:
    # `endpoint_settings` reads the environment, and then the endpoint file.
    return click.option(flag, help=help_text, allow_from_autoenv=False, **settings)


_RIGHTS = (
    _option("--ca", "PEM file of the CA of the service's certificate. Turns TLS on.", type=_FILE),
    _option("--cert", "PEM file of the client certificate.", type=_FILE),
    _option("--key", "PEM file of the key of --cert.", type=_FILE),
    _option("--server-name", "Name in the service's certificate, if it differs from the host."),
    _option("--token-file", "File with a token. Or set DELTASYNC_TOKEN to the token itself.", type=_FILE),
    _option("--endpoint", "TOML file with the address and any of these options.", type=_FILE, metavar="FILE"),
    _option("--insecure", "Send the token without TLS, readable on the network.", is_flag=True),
)
_HTTP, _HTTPS = "http://127.0.0.1:8080", "https://127.0.0.1:8080"
_NAMES = ("ca", "cert", "key", "server_name", "token_file", "endpoint", "insecure")


_BY = click.option(
    "--by",
    default=lambda: f"{_user()}@{socket.gethostname()}",
    show_default="USER@HOST",
    help="Your name for the service's log.",
)


def suggested(command: str) -> str:
    """A command to suggest, with this command's options for service and credentials.

    Environment variables apply to it anyway.
    """
    words, context = [f"deltasync {command}"], click.get_current_context(silent=True)
    for option in context.command.params if context else ():
        if context and option.name in ("service", *_NAMES) and _is_given(context, option.name):
            value = context.params[option.name]
            words.append(option.opts[0] if value is True else f"{option.opts[0]} {shlex.quote(str(value))}")
    return " ".join(words)


def _is_given(context: click.Context, name: str) -> bool:
    return context.get_parameter_source(name) is ParameterSource.COMMANDLINE


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # Some containers run as a user without a name.
        return str(os.getuid())


def operator_options(*, changes: bool = False) -> Callable[[F], Command]:
    """`--service` and the options for credentials. The command gets them as `service`, an HTTP `Endpoint`.

    Each option is also an environment variable, DELTASYNC_ plus its name in capitals, and then a key of the
    `--endpoint` file. Both can name two addresses of one service: DELTASYNC_HTTP, or key `http`, for operators,
    and DELTASYNC_SERVICE, or key `address`, for trainers and replicas. Operators use the second if it is an HTTP
    address. A command that `changes` something also takes `--by`.
    """
    text = "HTTP address of the service, http://HOST:PORT; with --ca the default is https."
    service = _option("--service", text, show_default=_HTTP)
    return _endpoint_option(_of_operator, service, *([_BY] if changes else []))


def service_options(*, default: str | None = "127.0.0.1:50051") -> Callable[[F], Command]:
    """Like `operator_options`, for a command that publishes or subscribes over gRPC. None = no default."""
    text = "gRPC address of the service, HOST:PORT."
    service = _option("--service", text, show_default=default or False)
    return _endpoint_option(partial(_of_stream, default), service)


# Makes an endpoint from `--service`, which only replaces the address of the protocol, and the other settings.
_Make = Callable[[str | None, dict[str, Any]], Endpoint]


def _endpoint_option(make: _Make, *options: Callable[[Command], Command]) -> Callable[[F], Command]:
    def decorated(command: F) -> Command:
        @wraps(command)
        def with_endpoint(**settings: Any) -> Any:
            credentials = {each: settings.pop(each) for each in _NAMES} | {"by": settings.pop("by", "")}
            try:
                endpoint = make(settings.pop("service"), endpoint_settings(credentials, os.environ))
            except InvalidInput as error:
                raise click.UsageError(str(error)) from error
            with naming_versions(endpoint):
                return command(**settings, service=endpoint)

        wrapped: Command = with_endpoint
        every: list[Callable[[Command], Command]] = [*options, *_RIGHTS]
        for option in reversed(every):
            wrapped = option(wrapped)
        return wrapped

    return decorated


def _of_operator(service: str | None, settings: dict[str, Any]) -> Endpoint:
    if service:
        settings |= {"address": service, "http": ""}
    default = _HTTPS if any(settings.get(name) for name in ("ca", "cert", "server_name")) else _HTTP
    address = settings.pop("address", None) or settings.get("http") or default
    return Endpoint.of_http(Endpoint(**settings | {"address": address}))


def _of_stream(default: str | None, service: str | None, settings: dict[str, Any]) -> Endpoint:
    address = service or settings.pop("address", None) or default
    if address is None:
        raise InvalidInput("Missing option '--service': the address of the service.")
    return Endpoint.of_grpc(Endpoint(**settings | {"address": address}))

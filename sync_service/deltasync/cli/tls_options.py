"""The files that a service speaks TLS with."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from deltasync.api.tls_options import TlsOptions

F = TypeVar("F", bound=Callable[..., Any])

_FILE = click.Path(dir_okay=False, path_type=Path)


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
    from deltasync.api.tls_options import TlsOptions

    return TlsOptions.of_settings(*(settings.pop(name) for name in ("tls_cert", "tls_key", "tls_client_ca")))

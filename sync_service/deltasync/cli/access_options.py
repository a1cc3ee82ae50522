"""Who a service lets in. What is secret is in no option: every user of a machine can read those of a process."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from deltasync.cli.config import from_config
from deltasync.core.errors import InvalidInput
from deltasync.core.roles import checked_token

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

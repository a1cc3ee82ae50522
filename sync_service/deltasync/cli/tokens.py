"""`deltasync tokens`."""

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from deltasync.cli import roles_document
from deltasync.cli.config import CONTEXT
from deltasync.cli.text_table import say, text_table
from deltasync.core.roles import read_roles

F = TypeVar("F", bound=Callable[..., Any])

_BYTES = 32


@click.group()
def tokens() -> None:
    """Make and revoke tokens, and give certificates roles: in the file of `deltasync serve --roles`.

    A running service takes over what has changed within seconds; what is revoked ends its streams, too.
    """


def _roles_option(help_text: str) -> Callable[[F], F]:
    path = click.Path(dir_okay=False, path_type=Path)
    return click.option("--roles", type=path, required=True, help=help_text)


_made = _roles_option("The roles file; made if missing.")
_read = _roles_option("The roles file.")


def _role_option(command: F) -> F:
    return click.option(
        "--role",
        multiple=True,
        required=True,
        metavar="ROLE[:PATTERN]",
        help="publish, subscribe, read or admin; publish:clicks* for the models whose names match, "
        "subscribe:mobile-* for such consumers. May be repeated.",
    )(command)


@tokens.command(context_settings=CONTEXT)
@click.argument("name")
@_role_option
@_made
def create(name: str, role: tuple[str, ...], roles: Path) -> None:
    """Make a token, and print it: it is shown this once, and kept nowhere."""
    token = secrets.token_urlsafe(_BYTES)
    roles_document.add_token(roles, name, token, role)
    say(token)


@tokens.command(context_settings=CONTEXT)
@click.argument("name")
@_role_option
@_made
def allow(name: str, role: tuple[str, ...], roles: Path) -> None:
    """Give certificates with a name (DNS, URI, e-mail or common name) roles, instead of those they had."""
    roles_document.allow_certificate(roles, name, role)
    say(f"certificate {name}: {' '.join(role)}")


@tokens.command("list", context_settings=CONTEXT)
@_read
def list_(roles: Path) -> None:
    """List tokens and certificates with their roles."""
    found = read_roles(roles)
    named = [("token", token.name, token.grants) for token in found.tokens]
    named += [("certificate", name, grants) for name, grants in found.certificates.items()]
    rows = ((kind, name, " ".join(map(str, grants))) for kind, name, grants in named)
    say(*text_table(("kind", "name", "roles"), rows))


@tokens.command(context_settings=CONTEXT)
@click.argument("name")
@_read
def revoke(name: str, roles: Path) -> None:
    """Take all roles from a token, or from certificates, of that name."""
    say(f"{roles_document.revoke(roles, name)} {name} revoked")

"""`deltasync tokens`, which changes a roles file and leaves its comments and order as they are."""

import os
import secrets
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import click
import tomlkit
from tomlkit.exceptions import TOMLKitError

from deltasync.access.roles import read_roles, roles_of, token_digest
from deltasync.base.errors import Contradiction, InvalidInput, NotFound
from deltasync.base.words import listed
from deltasync.cli.config import CONTEXT
from deltasync.cli.output import say, text_table


def add_token(path: Path, name: str, token: str, roles: Sequence[str]) -> None:
    """Give a token roles. Of the token itself only the digest is kept.

    Raises:
        InvalidInput: the file cannot be read or written, or the name or a role is none.
        Contradiction: there is one of that name, or somebody else changes the file just now.
    """

    def add(document: tomlkit.TOMLDocument) -> None:
        tokens = _table(document, "tokens")
        if name in tokens:
            raise Contradiction(f"{path}: there is a token {name!r}: revoke it first, or choose another name")
        entry = tomlkit.table()
        entry["sha256"], entry["roles"] = token_digest(token).hex(), list(roles)
        entry["created"] = datetime.now(UTC).replace(microsecond=0)
        tokens[name] = entry

    _change(path, add)


def allow_certificate(path: Path, name: str, roles: Sequence[str]) -> None:
    """Give the certificates that have a name roles, instead of those that they had.

    Raises:
        InvalidInput: the file cannot be read or written, or the name or a role is none.
        Contradiction: somebody else changes the file just now.
    """

    def allow(document: tomlkit.TOMLDocument) -> None:
        entry = tomlkit.table()
        entry["roles"] = list(roles)
        _table(document, "certificates")[name] = entry

    _change(path, allow)


def take_roles(path: Path, name: str) -> str:
    """Take all roles from the token, and from the certificates, of that name; which it was, in words.

    Raises:
        InvalidInput: the file cannot be read or written.
        NotFound: there is none; the message names those that exist.
        Contradiction: somebody else changes the file just now.
    """
    found = []

    def remove(document: tomlkit.TOMLDocument) -> None:
        for key in ("tokens", "certificates"):
            if name in document.get(key, {}):
                del document[key][name]
                found.append(key.removesuffix("s"))
        if not found:
            names = listed([*document.get("tokens", {}), *document.get("certificates", {})]) or "none"
            raise NotFound(f"{path}: no token and no certificate {name!r}; there are: {names}")

    _change(path, remove)
    return " and ".join(found)


def _table(document: tomlkit.TOMLDocument, key: str) -> Any:
    if key not in document:
        document[key] = tomlkit.table(is_super_table=True)
    return document[key]


def _change(path: Path, change: Callable[[tomlkit.TOMLDocument], None]) -> None:
    """Change a file: as a whole, or not at all. One that is new is for its owner alone."""
    path = path.resolve()  # Behind a link it is the file that changes.
    try:
        document = tomlkit.parse(path.read_text()) if path.exists() else tomlkit.document()
        roles_of(document.unwrap())  # Of a file that is wrong already, nothing is to be changed.
        change(document)
        roles_of(document.unwrap())
        _write(path, tomlkit.dumps(document))
    except FileExistsError as error:
        text = f"{error.filename} is there: somebody else changes the file just now; if nobody does, remove it"
        raise Contradiction(text) from error
    except (OSError, TOMLKitError, InvalidInput) as error:
        raise InvalidInput(f"{path}: {error}") from error


def _write(path: Path, text: str) -> None:
    new = path.with_name(f"{path.name}.new")
    before = path.stat() if path.exists() else None
    file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(file, "w") as writer:
            writer.write(text)
            writer.flush()
            if before:
                os.fchmod(file, before.st_mode & 0o777)
                if (before.st_uid, before.st_gid) != (os.geteuid(), os.getegid()):
                    os.fchown(file, before.st_uid, before.st_gid)
            os.fsync(file)
        new.replace(path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


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
    add_token(roles, name, token, role)
    say(token)


@tokens.command(context_settings=CONTEXT)
@click.argument("name")
@_role_option
@_made
def allow(name: str, role: tuple[str, ...], roles: Path) -> None:
    """Give certificates with a name (DNS, URI, e-mail or common name) roles, instead of those they had."""
    allow_certificate(roles, name, role)
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
    say(f"{take_roles(roles, name)} {name} revoked")

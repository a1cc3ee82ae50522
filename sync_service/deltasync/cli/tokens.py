"""`deltasync tokens`: edit a roles file, keeping its comments and order."""

import os
import secrets
from collections.abc import Callable
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


def _table(document: tomlkit.TOMLDocument, key: str) -> Any:
    if key not in document:
        document[key] = tomlkit.table(is_super_table=True)
    return document[key]


def _change(path: Path, change: Callable[[tomlkit.TOMLDocument], None]) -> None:
    """Change a file atomically. Only its owner may read a new one."""
    path = path.resolve()  # Change the file behind a link, not the link.
    try:
        document = tomlkit.parse(path.read_text()) if path.exists() else tomlkit.document()
        roles_of(document.unwrap())  # Refuse a file that is already wrong.
        change(document)
        roles_of(document.unwrap())
        _write(path, tomlkit.dumps(document))
    except FileExistsError as error:
        text = f"{error.filename} exists: another process is changing the file; if none is, remove it"
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
    """Create and revoke tokens, and set the roles of certificates, in the file of `deltasync serve --roles`.

    A running service applies changes within seconds. It also ends the streams of a revoked token or certificate.
    """


def _roles_option(help_text: str) -> Callable[[F], F]:
    path = click.Path(dir_okay=False, path_type=Path)
    return click.option("--roles", type=path, required=True, help=help_text)


_made = _roles_option("The roles file; created if missing.")
_read = _roles_option("The roles file.")


def _role_option(command: F) -> F:
    return click.option(
        "--role",
        multiple=True,
        required=True,
        metavar="ROLE[:PATTERN]",
        help="publish, subscribe, read or admin. publish:clicks* covers only models whose names match, "
        "subscribe:mobile-* only such consumers. May be repeated.",
    )(command)


@tokens.command(context_settings=CONTEXT)
@click.argument("name")
@_role_option
@_made
def create(name: str, role: tuple[str, ...], roles: Path) -> None:
    """Create a token and print it. It is shown only once; the file stores only its digest."""
    token = secrets.token_urlsafe(_BYTES)

    def add(document: tomlkit.TOMLDocument) -> None:
        tokens = _table(document, "tokens")
        if name in tokens:
            raise Contradiction(f"{roles}: token {name!r} exists; revoke it first, or choose another name")
        tokens[name] = entry = tomlkit.table()
        entry["sha256"], entry["roles"] = token_digest(token).hex(), list(role)
        entry["created"] = datetime.now(UTC).replace(microsecond=0)

    _change(roles, add)
    say(token)


@tokens.command(context_settings=CONTEXT)
@click.argument("name")
@_role_option
@_made
def allow(name: str, role: tuple[str, ...], roles: Path) -> None:
    """Set the roles of certificates with this DNS, URI, e-mail or common name, replacing earlier ones."""

    def allow(document: tomlkit.TOMLDocument) -> None:
        _table(document, "certificates")[name] = entry = tomlkit.table()
        entry["roles"] = list(role)

    _change(roles, allow)
    say(f"certificate {name}: {' '.join(role)}")


@tokens.command("list", context_settings=CONTEXT)
@_read
def list_(roles: Path) -> None:
    """List tokens and certificates with their roles."""
    listing = read_roles(roles)
    named = [("token", token.name, token.grants) for token in listing.tokens]
    named += [("certificate", name, grants) for name, grants in listing.certificates.items()]
    rows = ((kind, name, " ".join(map(str, grants))) for kind, name, grants in named)
    say(*text_table(("kind", "name", "roles"), rows))


@tokens.command(context_settings=CONTEXT)
@click.argument("name")
@_read
def revoke(name: str, roles: Path) -> None:
    """Remove the token or the certificates of this name, with all their roles."""

    removed = list[str]()

    def remove(document: tomlkit.TOMLDocument) -> None:
        for key in ("tokens", "certificates"):
            if name in document.get(key, {}):
                del document[key][name]
                removed.append(key.removesuffix("s"))
        if not removed:
            names = listed([*document.get("tokens", {}), *document.get("certificates", {})]) or "none"
            raise NotFound(f"{roles}: no token and no certificate {name!r}; existing names: {names}")

    _change(roles, remove)
    say(f"{' and '.join(removed)} {name} revoked")

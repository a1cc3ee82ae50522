"""Roles: what they grant, who makes the call that is being answered, and the roles file.

[tokens.trainer]
sha256 = "9f86d0..."            # of the token, in hexadecimal digits: the token itself is kept nowhere
roles = ["publish:clicks*"]
created = 2026-01-31T12:00:00Z  # optional, for people

[certificates."predictor.example.org"]
roles = ["subscribe:mobile-*", "read"]
"""

import hashlib
import hmac
import re
import tomllib
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import date, datetime
from enum import Enum
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from deltasync.base.arguments import check_name
from deltasync.base.decision import Decision
from deltasync.base.errors import InvalidInput


class Role(Enum):
    """What a caller needs for a call or a route; the value is its name in files and on the command line."""

    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"
    READ = "read"
    ADMIN = "admin"

    @property
    def of(self) -> str:
        """What the pattern of its grants names, in words; empty if its grants have no pattern."""
        return {Role.PUBLISH: "model", Role.SUBSCRIBE: "consumer"}.get(self, "")


@dataclass(frozen=True)
class Grant:
    """A role, for the models or consumers whose names a pattern matches (`*`, `?`, `[a-z]`)."""

    role: Role
    pattern: str = "*"

    @classmethod
    def parse(cls, text: str) -> "Grant":
        """The grant that a text describes: `read`, `admin`, `publish:clicks`, `subscribe:mobile-*`.

        Raises:
            InvalidInput: it describes no grant.
        """
        name, colon, pattern = text.partition(":")
        roles = {role.value: role for role in Role}
        role = roles.get(name)
        if role is None:
            raise InvalidInput(f"role {name!r}: expected one of {', '.join(roles)}")
        if colon and not role.of:
            raise InvalidInput(f"role {text!r}: {name} is of everything, and takes no pattern")
        if colon and not pattern:
            raise InvalidInput(f"role {text!r}: expected the pattern of a {role.of} after the colon")
        return cls(role, pattern or "*")

    def __str__(self) -> str:
        return f"{self.role.value}:{self.pattern}" if self.role.of else self.role.value

    def covers(self, role: Role, name: str | None) -> bool:
        """Whether it grants a role for a name; None = for at least one name. Role admin includes read."""
        if self.role is Role.ADMIN and role is Role.READ:
            return True
        return self.role is role and (name is None or fnmatchcase(name, self.pattern))


def grants(texts: Iterable[str]) -> tuple[Grant, ...]:
    """The grants that texts describe.

    Raises:
        InvalidInput: a text describes no grant.
    """
    return tuple(Grant.parse(text) for text in texts)


@dataclass(frozen=True)
class Identity:
    """The caller of a call, as far as it has proved who it is.

    Attributes:
        name: of its token or its certificate; empty if it has shown neither.
        grants: what it may do.
        address: where the call came from.
    """

    name: str = ""
    grants: tuple[Grant, ...] = ()
    address: str = ""

    def __str__(self) -> str:
        return f"{self.name or 'nobody'} ({self.address})" if self.address else self.name or "nobody"

    def may(self, role: Role, name: str | None = None) -> Decision:
        """Whether it has a role for a model or a consumer; None = for at least one. The reason names only what is
        missing.
        """
        if any(grant.covers(role, name) for grant in self.grants):
            return Decision(True, f"{self.name or 'anyone'} has role {role.value}")
        need = f"role {role.value}" + (f" for {role.of} {name!r}" if role.of and name is not None else "")
        if not self.name:
            return Decision(False, f"no token and no certificate that the service knows: {need} is needed")
        return Decision(False, f"{self.name!r} has no {need}")


@dataclass
class Call:
    """A call, or a request, under way.

    Attributes:
        name: what is called: `Publish` for gRPC, `DELETE /models/clicks` for HTTP.
        identity: its caller.
        says: the name that the caller gives, in `deltasync-by`; it proves nothing.
        role: the role that it needs; None = nothing.
        changes: what it has changed, in words.
        error: the error that ended it; None if it succeeded.
    """

    name: str = ""
    identity: Identity = field(default_factory=Identity)
    says: str = ""
    role: Role | None = None
    changes: list[str] = field(default_factory=list)
    error: BaseException | None = None


# Tasks that a call starts inherit it.
CALL: ContextVar[Call | None] = ContextVar("call", default=None)


def current_call() -> Call:
    """The call that is being answered; a call of nobody for what the service does by itself."""
    return CALL.get() or Call()


def caller() -> Identity:
    """The caller of the current call."""
    return current_call().identity


def author() -> str:
    """The author of a change: the name that the caller gives, and its identity: `anna as ops (10.0.0.7:4711)`."""
    call = current_call()
    return f"{call.says} as {call.identity}" if call.says else str(call.identity)


def may_read() -> bool:
    """Whether answers to the current caller may contain names, runs and counts."""
    return caller().may(Role.READ).yes


_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class TokenRoles:
    """The name and the digest of a token, and what it grants."""

    name: str
    digest: bytes
    grants: tuple[Grant, ...]


@dataclass(frozen=True)
class Roles:
    """Who has which roles.

    Attributes:
        tokens: of tokens.
        certificates: of certificates, by a name that is in them.
    """

    tokens: tuple[TokenRoles, ...] = ()
    certificates: Mapping[str, tuple[Grant, ...]] = field(default_factory=dict)

    def of_token(self, digest: bytes) -> TokenRoles | None:
        """The token with that digest. The comparison takes the same time for every digest: it reveals nothing."""
        match = None
        for each in self.tokens:
            if hmac.compare_digest(each.digest, digest):
                match = each
        return match

    def of_certificate(self, names: Iterable[str]) -> tuple[str, tuple[Grant, ...]] | None:
        """The first of a certificate's names that has roles, and what they grant."""
        return next(((name, self.certificates[name]) for name in names if name in self.certificates), None)


def read_roles(path: Path) -> Roles:
    """Read a roles file; blocks.

    Raises:
        InvalidInput: it cannot be read, or is wrong.
    """
    try:
        return roles_of(tomllib.loads(path.read_text()))
    except FileNotFoundError as error:
        raise InvalidInput(f"{path}: there is no such roles file: `deltasync tokens` makes one") from error
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: {error}") from error


def roles_of(described: Mapping[str, Any]) -> Roles:
    """The roles in the content of a roles file.

    Raises:
        InvalidInput: the content is wrong.
    """
    _check_keys("roles file", described, {"tokens", "certificates"})
    tokens = [_token(name, each) for name, each in _tables("tokens", described)]
    certificates = {name: _certificate(name, each) for name, each in _tables("certificates", described)}
    digests = [each.digest for each in tokens]
    if twice := [each.name for each in tokens if digests.count(each.digest) > 1]:
        raise InvalidInput(
            f"[tokens.{twice[-1]}] has the same token as [tokens.{twice[0]}]: make it one of its own"
        )
    return Roles(tuple(tokens), certificates)


_LONGEST_NAME = 256


def checked_token(where: str, token: str) -> str:
    """A token without blanks, line breaks or a byte order mark around it.

    Raises:
        InvalidInput: it could not be sent. The message says where the token is from, but shows nothing of it.
    """
    stripped = token.strip().strip("\ufeff").strip()
    if not stripped or not (stripped.isascii() and stripped.isprintable()):
        raise InvalidInput(f"{where}: expected one line of printable ASCII characters")
    return stripped


def token_digest(token: str) -> bytes:
    """The SHA-256 of a token, which is stored instead of it. A token is 256 random bits: nobody can guess it."""
    return hashlib.sha256(token.encode()).digest()


def _tables(key: str, described: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    tables = described.get(key, {})
    if not isinstance(tables, Mapping) or not all(isinstance(each, Mapping) for each in tables.values()):
        raise InvalidInput(f"{key}: expected tables [{key}.NAME]")
    return tables.items()


def _token(name: str, described: Mapping[str, Any]) -> TokenRoles:
    check_name("token", name)
    where = f"[tokens.{name}]"
    _check_keys(where, described, {"sha256", "roles", "created"})
    digest = described.get("sha256")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise InvalidInput(f"{where}: sha256: expected the 64 hexadecimal digits that `deltasync tokens` writes")
    if not isinstance(described.get("created", ""), str | date | datetime):
        raise InvalidInput(f"{where}: created: expected a time")
    return TokenRoles(name, bytes.fromhex(digest), _roles(where, described))


def _certificate(name: str, described: Mapping[str, Any]) -> tuple[Grant, ...]:
    if not 1 <= len(name) <= _LONGEST_NAME or not name.isprintable():
        raise InvalidInput(f"certificate {name[:_LONGEST_NAME]!r}: use 1 to {_LONGEST_NAME} printable characters")
    where = f'[certificates."{name}"]'
    _check_keys(where, described, {"roles"})
    return _roles(where, described)


def _roles(where: str, described: Mapping[str, Any]) -> tuple[Grant, ...]:
    texts = described.get("roles")
    if not isinstance(texts, list) or not texts or not all(isinstance(each, str) for each in texts):
        raise InvalidInput(f'{where}: roles: expected a list of at least one, such as ["publish:clicks*", "read"]')
    try:
        return grants(texts)
    except InvalidInput as error:
        raise InvalidInput(f"{where}: {error}") from error


def _check_keys(where: str, described: Mapping[str, Any], known: set[str]) -> None:
    if unknown := sorted(described.keys() - known):
        raise InvalidInput(f"{where}: unknown key {unknown[0]!r}; keys: {', '.join(sorted(known))}")

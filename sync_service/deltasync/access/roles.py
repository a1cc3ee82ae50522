"""Roles and their grants, the identity of the current caller, and the roles file.

[tokens.trainer]
sha256 = "9f86d0..."            # hexadecimal digest of the token; the token itself is not stored
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
from deltasync.base.errors import InvalidInput, NotPermitted


class Role(Enum):
    """A role; the value is its name in files and on the command line."""

    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"
    READ = "read"
    ADMIN = "admin"

    @property
    def of(self) -> str:
        """What the pattern of a grant selects, model or consumer; empty for a role without patterns."""
        return {Role.PUBLISH: "model", Role.SUBSCRIBE: "consumer"}.get(self, "")


@dataclass(frozen=True)
class Grant:
    """A role for the models or consumers that match a pattern (`*`, `?`, `[a-z]`)."""

    role: Role
    pattern: str = "*"

    @classmethod
    def parse(cls, text: str) -> "Grant":
        """Parse a grant such as `read`, `admin`, `publish:clicks` or `subscribe:mobile-*`."""
        name, colon, pattern = text.partition(":")
        roles = {role.value: role for role in Role}
        role = roles.get(name)
        if role is None:
            raise InvalidInput(f"role {name!r}: expected one of {', '.join(roles)}")
        if colon and not role.of:
            raise InvalidInput(f"role {text!r}: {name} covers everything and takes no pattern")
        if colon and not pattern:
            raise InvalidInput(f"role {text!r}: expected a {role.of} pattern after the colon")
        return cls(role, pattern or "*")

    def __str__(self) -> str:
        return f"{self.role.value}:{self.pattern}" if self.role.of else self.role.value

    def covers(self, role: Role, name: str | None) -> bool:
        """Whether this grants a role for a name; None = for at least one name. Role admin includes read."""
        if self.role is Role.ADMIN and role is Role.READ:
            return True
        return self.role is role and (name is None or fnmatchcase(name, self.pattern))


def grants(texts: Iterable[str]) -> tuple[Grant, ...]:
    """Parse several grants."""
    return tuple(Grant.parse(text) for text in texts)


@dataclass(frozen=True)
class Identity:
    """The verified identity of a caller: the name of its token or certificate, its grants, its network address."""

    name: str = ""
    grants: tuple[Grant, ...] = ()
    address: str = ""

    def __str__(self) -> str:
        return f"{self.name or 'nobody'} ({self.address})" if self.address else self.name or "nobody"

    def may(self, role: Role, name: str | None = None) -> Decision:
        """Whether it has a role for a model or consumer; None = for any. The reason names only what is missing."""
        if any(grant.covers(role, name) for grant in self.grants):
            return Decision(True, f"{self.name or 'anyone'} has role {role.value}")
        need = f"role {role.value}" + (f" for {role.of} {name!r}" if role.of and name is not None else "")
        if not self.name:
            return Decision(False, f"no valid token or certificate: {need} is required")
        return Decision(False, f"{self.name!r} has no {need}")


@dataclass
class Call:
    """A running gRPC call (`Publish`) or HTTP request (`DELETE /models/clicks`), and the role that it requires.

    `says` is the caller's own name for itself, unverified. `changes` has the changes that it made, in words.
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
    """The call being answered; an empty one for the service's own work."""
    return CALL.get() or Call()


def caller() -> Identity:
    """The caller of the current call."""
    return current_call().identity


def author() -> str:
    """The author of a change: the caller's own name and its identity, `anna as ops (10.0.0.7:4711)`."""
    call = current_call()
    return f"{call.says} as {call.identity}" if call.says else str(call.identity)


def may_read() -> bool:
    """Whether answers to the current caller may contain names, runs and counts."""
    return caller().may(Role.READ).yes


def check_may(role: Role, name: str) -> None:
    """Check that the current caller has a role for a model or consumer."""
    decision = caller().may(role, name)
    if not decision.yes:
        raise NotPermitted(decision.reason)


_DIGEST = re.compile("[0-9a-f]{64}")


@dataclass(frozen=True)
class TokenRoles:
    """The name, digest and grants of a token."""

    name: str
    digest: bytes
    grants: tuple[Grant, ...]


@dataclass(frozen=True)
class Roles:
    """The content of a roles file: tokens, and the grants of certificates by a name in the certificate."""

    tokens: tuple[TokenRoles, ...] = ()
    certificates: Mapping[str, tuple[Grant, ...]] = field(default_factory=dict)

    def of_token(self, digest: bytes) -> TokenRoles | None:
        """The token with this digest, compared in constant time."""
        match = None
        for each in self.tokens:
            if hmac.compare_digest(each.digest, digest):
                match = each
        return match

    def of_certificate(self, names: Iterable[str]) -> tuple[str, tuple[Grant, ...]] | None:
        """The first name of a certificate that has roles, and its grants."""
        return next(((name, self.certificates[name]) for name in names if name in self.certificates), None)


def read_roles(path: Path) -> Roles:
    """Read a roles file; blocks."""
    try:
        return roles_of(tomllib.loads(path.read_text()))
    except FileNotFoundError as error:
        raise InvalidInput(f"{path}: no such roles file; create one with `deltasync tokens`") from error
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: {error}") from error


def roles_of(described: Mapping[str, Any]) -> Roles:
    """The roles in the content of a roles file."""
    _check_keys("roles file", described, {"tokens", "certificates"})
    tokens = [_token(name, each) for name, each in _tables("tokens", described)]
    certificates = {name: _certificate(name, each) for name, each in _tables("certificates", described)}
    digests = [each.digest for each in tokens]
    if twice := [each.name for each in tokens if digests.count(each.digest) > 1]:
        raise InvalidInput(
            f"[tokens.{twice[-1]}] has the same token as [tokens.{twice[0]}]; create a separate one"
        )
    return Roles(tuple(tokens), certificates)


_LONGEST_NAME = 256


def checked_token(where: str, token: str) -> str:
    """Strip blanks, line breaks and a byte order mark from a token. An error shows none of its characters."""
    stripped = token.strip().strip("\ufeff").strip()
    if not stripped or not (stripped.isascii() and stripped.isprintable()):
        raise InvalidInput(f"{where}: expected one line of printable ASCII characters")
    return stripped


def token_digest(token: str) -> bytes:
    """The SHA-256 of a token, stored in its place. It needs no salt, as a token is 256 random bits."""
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


def _check_keys(where: str, described: Mapping[str, Any], keys: set[str]) -> None:
    if unknown := sorted(described.keys() - keys):
        raise InvalidInput(f"{where}: unknown key {unknown[0]!r}; keys: {', '.join(sorted(keys))}")

"""The roles file: which token and which certificate has which roles.

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
from dataclasses import dataclass, field
from datetime import date, datetime
from pathlib import Path
from typing import Any

from deltasync.access.caller import Grant, grants
from deltasync.base.arguments import check_name
from deltasync.base.errors import InvalidInput

_DIGEST = re.compile("[0-9a-f]{64}")
_LONGEST_NAME = 256


@dataclass(frozen=True)
class TokenRoles:
    """A token, by its name and its digest, and what it grants."""

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
        """The token with that digest. All are compared, each in constant time: how long it takes says nothing."""
        found = None
        for each in self.tokens:
            if hmac.compare_digest(each.digest, digest):
                found = each
        return found

    def of_certificate(self, names: Iterable[str]) -> tuple[str, tuple[Grant, ...]] | None:
        """The first of a certificate's names that has roles, and what they grant."""
        return next(((name, self.certificates[name]) for name in names if name in self.certificates), None)


def checked_token(where: str, token: str) -> str:
    """A token as it is sent, without blanks, line breaks or a byte order mark around it.

    Raises:
        InvalidInput: it could not be sent. The message says where it is from, and nothing of it.
    """
    found = token.strip().strip("\ufeff").strip()
    if not found or not (found.isascii() and found.isprintable()):
        raise InvalidInput(f"{where}: expected one line of printable ASCII characters")
    return found


def token_digest(token: str) -> bytes:
    """What is kept of a token, and compared: its SHA-256. A token is 256 random bits: trying some is no use."""
    return hashlib.sha256(token.encode()).digest()


def read_roles(path: Path) -> Roles:
    """What a roles file says; blocks.

    Raises:
        InvalidInput: it cannot be read, or says what cannot be: the message names the file and what is wrong.
    """
    try:
        return roles_of(tomllib.loads(path.read_text()))
    except FileNotFoundError as error:
        raise InvalidInput(f"{path}: there is no such roles file: `deltasync tokens` makes one") from error
    except (OSError, ValueError) as error:
        raise InvalidInput(f"{path}: {error}") from error


def roles_of(described: Mapping[str, Any]) -> Roles:
    """What the content of a roles file says.

    Raises:
        InvalidInput: it says what cannot be.
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


def _tables(key: str, described: Mapping[str, Any]) -> Iterable[tuple[str, Mapping[str, Any]]]:
    found = described.get(key, {})
    if not isinstance(found, Mapping) or not all(isinstance(each, Mapping) for each in found.values()):
        raise InvalidInput(f"{key}: expected tables [{key}.NAME]")
    return found.items()


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

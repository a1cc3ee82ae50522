"""Who calls, and what they may: where the roles are known."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

from deltasync.api.access_table import Need
from deltasync.api.audit import Audit
from deltasync.api.caller import CALL, Call
from deltasync.core.access import Grant, Identity, Role
from deltasync.core.errors import InvalidInput, NotPermitted
from deltasync.core.roles import Roles, TokenRoles, token_digest

# Where there is no roles file: whoever reaches the service may do what the admin token is not needed for.
_ANYONE = (Grant(Role.PUBLISH), Grant(Role.SUBSCRIBE), Grant(Role.READ))

# Metadata of gRPC, a header of HTTP.
_BY = "deltasync-by"
_LONGEST_BY = 128
# As a model's, or a consumer's. A pattern is compared with no longer one.
_LONGEST_NAME = 128


@dataclass(frozen=True)
class Credentials:
    """What a call shows of whoever makes it.

    Attributes:
        digest: of its token; empty without one.
        certificate_names: the names in its certificate; empty without one.
        address: where it comes from.
        says: the name that it gives, which proves nothing.
    """

    digest: bytes = b""
    certificate_names: tuple[str, ...] = ()
    address: str = ""
    says: str = ""

    @classmethod
    def of(cls, sent: Mapping[str, str | bytes], names: tuple[str, ...], address: str) -> "Credentials":
        """Those of a call with this metadata, or of a request with these headers."""
        scheme, _, token = str(sent.get("authorization", "")).partition(" ")
        digest = token_digest(token) if scheme == "Bearer" else b""
        return cls(digest, names, address, str(sent.get(_BY, "")))


@dataclass(eq=False)
class OpenCall:
    """A call under way, and what it was let in for: its rights may be taken from it meanwhile."""

    call: Call
    credentials: Credentials
    need: Need
    task: "asyncio.Task[object] | None"
    name: str | None = None
    revoked: NotPermitted | None = None


class Access:
    """Tells who calls, and lets them or not. Used in the event loop.

    Args:
        admin_token: a token with role admin, beside those of the roles; None, or an empty one, is none.
        roles: who has which roles; None = anyone has all but admin.
        audit: where it is written down who did what.

    Attributes:
        roles: who has which roles, but for the admin token.
        exposure: where the service listens although others reach it there, in words; empty if it does not.
        trouble: what is wrong with the roles file as it is now; empty if nothing is.
    """

    def __init__(self, admin_token: str | None, roles: Roles | None, audit: Audit) -> None:
        digest = token_digest(admin_token) if admin_token else None
        self._admin = (TokenRoles("admin token", digest, (Grant(Role.ADMIN),)),) if digest else ()
        self._anyone = _ANYONE if roles is None else ()
        self._audit = audit
        self._open = set[OpenCall]()
        self.roles = roles or Roles()
        self.exposure = self.trouble = ""

    @property
    def troubles(self) -> list[str]:
        """What operators should know of who may do what."""
        return [each for each in (self.exposure, self.trouble) if each]

    def take(self, roles: Roles) -> None:
        """Take over other roles. Calls under way end, if they need what is granted no more."""
        self.roles = roles
        for each in self._open:
            identity = self.identify(each.credentials)
            missing = _missing(identity, each.need, each.name)
            if missing and each.task and not each.revoked:
                each.revoked = each.call.error = NotPermitted(f"revoked: {missing}")
                each.task.cancel()
            # The audit goes on to say by which name it was let in.
            each.call.identity = replace(identity, name=identity.name or each.call.identity.name)

    def identify(self, credentials: Credentials) -> Identity:
        """Who makes a call: whose token it shows; without one that is known, whose certificate."""
        known = Roles((*self.roles.tokens, *self._admin))
        if found := known.of_token(credentials.digest):
            return Identity(found.name, found.grants + self._anyone, credentials.address)
        name, grants = self.roles.of_certificate(credentials.certificate_names) or ("", ())
        return Identity(name, grants + self._anyone, credentials.address)

    @contextmanager
    def call(self, name: str, need: Need, credentials: Credentials) -> Iterator[OpenCall]:
        """What is to run while a call is answered, which `check` then lets in; who made it, and what came of it,
        is known throughout.
        """
        call = Call(name, self.identify(credentials), role=need.role)
        opened = OpenCall(call, credentials, need, asyncio.current_task())
        self._open.add(opened)
        before = CALL.set(call)
        try:
            yield opened
        except BaseException as error:
            call.error = call.error or error
            raise
        finally:
            CALL.reset(before)
            self._open.discard(opened)
            self._audit.note(call)
            call.error = None  # Whose traceback holds what the call has held: a release, with its room.


def check(opened: OpenCall) -> None:
    """Check that whoever calls has the role that is needed, and says who asks as it can be written down.

    Raises:
        NotPermitted: the role is missing.
        InvalidInput: the name that is given is too long, or not printable.
    """
    _check(opened)
    says = opened.credentials.says
    if len(says) > _LONGEST_BY or not says.isprintable():
        raise InvalidInput(f"{_BY}: expected at most {_LONGEST_BY} printable characters")
    opened.call.says = says


def check_name(opened: OpenCall, message: object) -> None:
    """Check that whoever calls has the role for what the first message names.

    Raises:
        NotPermitted: the role is missing.
        InvalidInput: the name is too long to be one.
    """
    name = opened.need.name(message)
    if name and len(name) > _LONGEST_NAME:
        raise InvalidInput(
            f"{opened.need.of}: a name of {len(name)} characters, at most {_LONGEST_NAME} are allowed"
        )
    opened.name = name
    _check(opened)


def _check(opened: OpenCall) -> None:
    if missing := _missing(opened.call.identity, opened.need, opened.name):
        raise NotPermitted(missing)


def _missing(identity: Identity, need: Need, name: str | None) -> str:
    """What an identity lacks; empty if nothing."""
    if need.role is None:
        return ""
    decision = identity.may(need.role, name)
    return "" if decision.yes else decision.reason

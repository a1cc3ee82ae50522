"""Access control: the role for each call, and the check of its caller."""

import asyncio
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from google.protobuf.message import Message

from deltasync.access.audit import Audit
from deltasync.access.roles import CALL, Call, Grant, Identity, Role, Roles, TokenRoles, read_roles, token_digest
from deltasync.base.errors import DeltasyncError, InvalidInput, NotPermitted
from deltasync.base.events import EventKind, Events
from deltasync.base.files import FileWatch, readable_by_all
from deltasync.base.words import counted


@dataclass(frozen=True)
class Need:
    """The role that a call or route requires; None = open to anyone.

    `of` is the field of the first message that names the model or consumer for the role; empty without one.
    """

    role: Role | None
    of: str = ""

    def name(self, message: Any) -> str | None:
        """The model or consumer that a first message names; None without one."""
        *outer, last = self.of.split(".")
        for each in outer:
            if not isinstance(message, Message) or not message.HasField(each):  # A message with rows has no name.
                return None
            message = getattr(message, each)
        return str(getattr(message, last)) if last else None


_ANYONE, _READ, _ADMIN, _OBJECT = Need(None), Need(Role.READ), Need(Role.ADMIN), Need(Role.SUBSCRIBE)


CALLS: Mapping[str, Need] = {
    "/deltasync.v1.PublishService/Publish": Need(Role.PUBLISH, "open.model"),
    "/deltasync.v1.SubscribeService/Subscribe": Need(Role.SUBSCRIBE, "open.consumer"),
    "/deltasync.v1.SubscribeService/Leave": Need(Role.SUBSCRIBE, "consumer"),
    "/grpc.health.v1.Health/Check": Need(None, "service"),
    "/grpc.health.v1.Health/Watch": Need(None, "service"),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _READ,
}


# Routes that are open to anyone.
_PUBLIC = re.compile(r"/|/livez|/readyz|/page/[^/\n]+|/openapi\.json")
# The route checks the role for the name.
_OBJECTION = re.compile(r"/consumers/[^/]+/object")


def need_of_call(method: str) -> Need:
    """The requirement of a gRPC call, such as `/deltasync.v1.PublishService/Publish`."""
    return CALLS.get(method, _ADMIN)


def need_of_request(method: str, path: str) -> Need:
    """The requirement of an HTTP request, by its encoded path."""
    # Browsers and probes send HEAD and OPTIONS to GET routes.
    if method in ("GET", "HEAD", "OPTIONS"):
        return _ANYONE if _PUBLIC.fullmatch(path) else _READ
    return _OBJECT if method == "POST" and _OBJECTION.fullmatch(path) else _ADMIN


# Without a roles file, everyone has all roles except admin.
_WITHOUT_ROLES = (Grant(Role.PUBLISH), Grant(Role.SUBSCRIBE), Grant(Role.READ))


# gRPC metadata and HTTP header with the caller's own name.
_BY = "deltasync-by"
_LONGEST_BY = 128
# Longest name of a model or consumer to compare with patterns.
_LONGEST_NAME = 128


@dataclass(frozen=True)
class Credentials:
    """The credentials of a caller: the digest of its token, the names in its certificate, its network address, and
    what it says its name is.
    """

    digest: bytes = b""
    certificate_names: tuple[str, ...] = ()
    address: str = ""
    says: str = ""

    @classmethod
    def of(cls, sent: Mapping[str, str | bytes], names: tuple[str, ...], address: str) -> "Credentials":
        """The credentials in gRPC metadata or HTTP headers."""
        scheme, _, token = str(sent.get("authorization", "")).partition(" ")
        digest = token_digest(token) if scheme == "Bearer" else b""
        return cls(digest, names, address, str(sent.get(_BY, "")))


@dataclass(eq=False)
class OpenCall:
    """A running call and its requirement. A change of roles can revoke it."""

    call: Call
    credentials: Credentials
    need: Need
    task: "asyncio.Task[object] | None"
    name: str | None = None
    revoked: NotPermitted | None = None


class Access:
    """Identifies callers and tracks running calls. For the event loop.

    Attributes:
        roles: the current roles, without the admin token.
        exposure: a warning if other machines can reach a service without access control; otherwise empty.
        trouble: the error in the roles file; empty without one.
    """

    def __init__(self, admin_token: str | None, roles: Roles | None, audit: Audit) -> None:
        """Without roles, everyone has all roles except admin. The admin token needs no roles file."""
        digest = token_digest(admin_token) if admin_token else None
        self._admin = (TokenRoles("admin token", digest, (Grant(Role.ADMIN),)),) if digest else ()
        self._anyone = _WITHOUT_ROLES if roles is None else ()
        self._audit = audit
        self._open = set[OpenCall]()
        self.roles = roles or Roles()
        self.exposure = self.trouble = ""

    @property
    def troubles(self) -> list[str]:
        """Warnings about access for operators."""
        return [each for each in (self.exposure, self.trouble) if each]

    def take(self, roles: Roles) -> None:
        """Switch to other roles, and end running calls whose caller lost the required role."""
        self.roles = roles
        for each in self._open:
            identity = self.identify(each.credentials)
            missing = _missing(identity, each.need, each.name)
            if missing and each.task and not each.revoked:
                each.revoked = each.call.error = NotPermitted(f"revoked: {missing}")
                each.task.cancel()
            # The audit keeps the name under which the call began.
            each.call.identity = replace(identity, name=identity.name or each.call.identity.name)

    def identify(self, credentials: Credentials) -> Identity:
        """The caller: the owner of the token or, if the token is unknown, of the certificate."""
        tokens = Roles((*self.roles.tokens, *self._admin))
        if token := tokens.of_token(credentials.digest):
            return Identity(token.name, token.grants + self._anyone, credentials.address)
        name, grants = self.roles.of_certificate(credentials.certificate_names) or ("", ())
        return Identity(name, grants + self._anyone, credentials.address)

    @contextmanager
    def call(self, name: str, need: Need, credentials: Credentials) -> Iterator[OpenCall]:
        """Run a call: its caller is current in the block, and the audit gets the result. See `check`."""
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
            call.error = None  # The traceback would keep a release in memory.


def check(opened: OpenCall) -> None:
    """Check that the caller has the required role, and that its own name for itself can be logged."""
    _check(opened)
    says = opened.credentials.says
    if len(says) > _LONGEST_BY or not says.isprintable():
        raise InvalidInput(f"{_BY}: expected at most {_LONGEST_BY} printable characters")
    opened.call.says = says


def check_name(opened: OpenCall, message: object) -> None:
    """Check the caller's role for the model or consumer in the first message."""
    name = opened.need.name(message)
    if name and len(name) > _LONGEST_NAME:
        raise InvalidInput(
            f"{opened.need.of}: the name has {len(name)} characters; at most {_LONGEST_NAME} are allowed"
        )
    opened.name = name
    _check(opened)


def _check(opened: OpenCall) -> None:
    if missing := _missing(opened.call.identity, opened.need, opened.name):
        raise NotPermitted(missing)


def _missing(identity: Identity, need: Need, name: str | None) -> str:
    """The missing role, in words; empty if nothing is missing."""
    if need.role is None:
        return ""
    decision = identity.may(need.role, name)
    return "" if decision.yes else decision.reason


logger = logging.getLogger(__name__)


class RolesFile:
    """The roles file, reloaded when it changes; `roles` is its newest valid content. For the event loop."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._watch = FileWatch([path])
        self.roles = _read(path)

    async def follow(self, access: Access, events: Events) -> None:
        """Apply changes of the file to `access`, until cancelled."""
        while True:
            await self._watch.changed()
            await self.reload(access, events)

    async def reload(self, access: Access, events: Events) -> None:
        """Reload the file for `access`. A wrong file changes nothing."""
        try:
            roles = await asyncio.to_thread(_read, self._path)
        except DeltasyncError as error:
            access.trouble = f"the previous roles stay in use: {error}"
            events.emit(EventKind.ROLES_REFUSED, "the previous roles stay in use", error)
            return
        access.trouble = ""
        if roles != self.roles:
            self.roles = roles
            access.take(roles)
            number = counted(len(roles.tokens), "token"), counted(len(roles.certificates), "certificate")
            events.emit(EventKind.ROLES_RELOADED, f"{' and '.join(number)} have roles")


def _read(path: Path) -> Roles:
    """Read a roles file; blocks. Warn if every user of the machine may read it."""
    roles = read_roles(path)
    if readable_by_all(path):
        logger.warning("%s can be read by every user of this machine: run chmod o-r on it", path)
    return roles

"""What callers may do: the role that each call needs, whether the caller has it, and the audit of who did what."""

import asyncio
import logging
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
    """What a call or a route needs.

    Attributes:
        role: the role; None = anyone may make the call.
        of: the field of its first message with the name of the model or consumer that the role is for; empty if
            there is none.
    """

    role: Role | None
    of: str = ""

    def name(self, message: Any) -> str | None:
        """The name in a first message; None if it has none."""
        *outer, last = self.of.split(".")
        for each in outer:
            if not isinstance(message, Message) or not message.HasField(each):  # Rows name nothing.
                return None
            message = getattr(message, each)
        return str(getattr(message, last)) if last else None


_ANYONE, _READ, _ADMIN = Need(None), Need(Role.READ), Need(Role.ADMIN)


CALLS: Mapping[str, Need] = {
    "/deltasync.v1.PublishService/Publish": Need(Role.PUBLISH, "open.model"),
    "/deltasync.v1.SubscribeService/Subscribe": Need(Role.SUBSCRIBE, "open.consumer"),
    "/deltasync.v1.SubscribeService/Leave": Need(Role.SUBSCRIBE, "consumer"),
    "/grpc.health.v1.Health/Check": Need(None, "service"),
    "/grpc.health.v1.Health/Watch": Need(None, "service"),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": _READ,
}


ROUTES: Mapping[tuple[str, str], Need] = {
    ("GET", "/livez"): _ANYONE,
    ("GET", "/readyz"): _ANYONE,
    ("GET", "/"): _ANYONE,
    ("GET", "/page/{name}"): _ANYONE,
    ("GET", "/docs"): _ANYONE,
    ("GET", "/openapi.json"): _ANYONE,
    ("GET", "/consumers"): _READ,
    ("GET", "/consumers/{name}"): _READ,
    ("GET", "/consumers/{name}/lag"): _READ,
    ("GET", "/consumers/{name}/history"): _READ,
    ("GET", "/lag"): _READ,
    ("GET", "/status"): _READ,
    ("GET", "/version"): _READ,
    ("GET", "/versions"): _READ,
    ("GET", "/trainers"): _READ,
    ("GET", "/events"): _READ,
    ("GET", "/log-levels"): _READ,
    ("GET", "/models"): _READ,
    ("GET", "/processes"): _READ,
    ("GET", "/checkpoints"): _READ,
    ("GET", "/tables"): _READ,
    ("GET", "/tables/{name:path}"): _READ,
    ("GET", "/deletes"): _READ,
    ("GET", "/metrics"): _READ,
    ("POST", "/consumers"): _ADMIN,
    ("PUT", "/consumers/{name}"): _ADMIN,
    ("PUT", "/consumers/{name}/policy"): _ADMIN,
    ("DELETE", "/consumers/{name}"): _ADMIN,
    ("PUT", "/consumers/{name}/pause"): _ADMIN,
    ("DELETE", "/consumers/{name}/pause"): _ADMIN,
    ("DELETE", "/consumers/{name}/replicas/{replica}"): _ADMIN,
    ("POST", "/consumers/{name}/replicas/{replica}/verify"): _ADMIN,
    ("POST", "/models/{name}/checkpoint"): _ADMIN,
    ("POST", "/models/{name}/move"): _ADMIN,
    ("DELETE", "/models/{name}"): _ADMIN,
    ("DELETE", "/models/{name}/tables/{table:path}"): _ADMIN,
    ("POST", "/deletes"): _ADMIN,
    ("PUT", "/log-levels"): _ADMIN,
    ("POST", "/fsck"): _ADMIN,
    ("POST", "/backup"): _ADMIN,
    ("POST", "/drain"): _ADMIN,
}


def need_of_call(method: str) -> Need:
    """What a gRPC call needs, by its full name: `/deltasync.v1.PublishService/Publish`."""
    return CALLS.get(method, _ADMIN)


def need_of_request(method: str, path: str) -> Need:
    """What an HTTP request needs, by the path that it asks for, encoded."""
    # Browsers and probes send these for routes of GET.
    method = "GET" if method in ("HEAD", "OPTIONS") else method
    parts = path.split("/")
    return next((need for (kind, route), need in ROUTES.items() if kind == method and _fits(parts, route)), _ADMIN)


def _fits(parts: list[str], route: str) -> bool:
    """Whether the parts of a path fit a route. A name in braces fits any part that is not empty; `{name:path}`,
    the last one, also fits several parts.
    """
    names = route.split("/")
    if names[-1].endswith(":path}") and len(parts) > len(names):
        parts = [*parts[: len(names) - 1], "/".join(parts[len(names) - 1 :])]
    return len(parts) == len(names) and all(
        bool(part) if name.startswith("{") else part == name for part, name in zip(parts, names, strict=True)
    )


# Without a roles file, anyone who reaches the service may do everything that does not need role admin.
_WITHOUT_ROLES = (Grant(Role.PUBLISH), Grant(Role.SUBSCRIBE), Grant(Role.READ))


# Metadata of gRPC, a header of HTTP.
_BY = "deltasync-by"
_LONGEST_BY = 128
# Of a model or a consumer. Patterns are never compared with a longer name.
_LONGEST_NAME = 128


@dataclass(frozen=True)
class Credentials:
    """What a call shows of its caller.

    Attributes:
        digest: digest of its token; empty without a token.
        certificate_names: the names in its certificate; empty without a certificate.
        address: where it comes from.
        says: the name that the caller gives, which proves nothing.
    """

    digest: bytes = b""
    certificate_names: tuple[str, ...] = ()
    address: str = ""
    says: str = ""

    @classmethod
    def of(cls, sent: Mapping[str, str | bytes], names: tuple[str, ...], address: str) -> "Credentials":
        """The credentials of a call with this metadata, or of a request with these headers."""
        scheme, _, token = str(sent.get("authorization", "")).partition(" ")
        digest = token_digest(token) if scheme == "Bearer" else b""
        return cls(digest, names, address, str(sent.get(_BY, "")))


@dataclass(eq=False)
class OpenCall:
    """A call under way, and what it needs: its rights may be revoked meanwhile."""

    call: Call
    credentials: Credentials
    need: Need
    task: "asyncio.Task[object] | None"
    name: str | None = None
    revoked: NotPermitted | None = None


class Access:
    """Identifies callers, and knows the calls under way. Used in the event loop.

    Args:
        admin_token: a token with role admin, beside those of the roles; None or empty = no such token.
        roles: who has which roles; None = anyone has all roles but admin.
        audit: logs who did what.

    Attributes:
        roles: who has which roles, without the admin token.
        exposure: a warning if others reach the service although it lets in anybody; empty otherwise.
        trouble: what is wrong with the roles file; empty if nothing is.
    """

    def __init__(self, admin_token: str | None, roles: Roles | None, audit: Audit) -> None:
        digest = token_digest(admin_token) if admin_token else None
        self._admin = (TokenRoles("admin token", digest, (Grant(Role.ADMIN),)),) if digest else ()
        self._anyone = _WITHOUT_ROLES if roles is None else ()
        self._audit = audit
        self._open = set[OpenCall]()
        self.roles = roles or Roles()
        self.exposure = self.trouble = ""

    @property
    def troubles(self) -> list[str]:
        """What operators should know about access, in words."""
        return [each for each in (self.exposure, self.trouble) if each]

    def take(self, roles: Roles) -> None:
        """Use other roles from now on. Calls under way end if their caller lacks the role that they need."""
        self.roles = roles
        for each in self._open:
            identity = self.identify(each.credentials)
            missing = _missing(identity, each.need, each.name)
            if missing and each.task and not each.revoked:
                each.revoked = each.call.error = NotPermitted(f"revoked: {missing}")
                each.task.cancel()
            # The audit keeps the name by which the call was let in.
            each.call.identity = replace(identity, name=identity.name or each.call.identity.name)

    def identify(self, credentials: Credentials) -> Identity:
        """Who makes a call: the holder of its token or, if the service does not know that, of its certificate."""
        tokens = Roles((*self.roles.tokens, *self._admin))
        if token := tokens.of_token(credentials.digest):
            return Identity(token.name, token.grants + self._anyone, credentials.address)
        name, grants = self.roles.of_certificate(credentials.certificate_names) or ("", ())
        return Identity(name, grants + self._anyone, credentials.address)

    @contextmanager
    def call(self, name: str, need: Need, credentials: Credentials) -> Iterator[OpenCall]:
        """The context in which a call is answered, which `check` then lets in. Its caller is the current one, and
        the audit gets its result.
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
            call.error = None  # Its traceback would keep the call's objects alive: a release, with its memory.


def check(opened: OpenCall) -> None:
    """Check that the caller has the role that the call needs, and that the name it gives can be logged.

    Raises:
        NotPermitted: the role is missing.
        InvalidInput: the name is too long, or not printable.
    """
    _check(opened)
    says = opened.credentials.says
    if len(says) > _LONGEST_BY or not says.isprintable():
        raise InvalidInput(f"{_BY}: expected at most {_LONGEST_BY} printable characters")
    opened.call.says = says


def check_name(opened: OpenCall, message: object) -> None:
    """Check that the caller has the role for the model or consumer that the first message names.

    Raises:
        NotPermitted: the role is missing.
        InvalidInput: the name is too long.
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


logger = logging.getLogger(__name__)


class RolesFile:
    """The roles file, read at the start and whenever it has changed. Used in the event loop.

    Attributes:
        roles: its newest valid content.

    Raises:
        InvalidInput: it cannot be read, or is wrong.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._watch = FileWatch([path])
        self.roles = _read(path)

    async def follow(self, access: Access, events: Events) -> None:
        """Pass changes of the file on to `access`, until cancelled."""
        while True:
            await self._watch.changed()
            await self.reload(access, events)

    async def reload(self, access: Access, events: Events) -> None:
        """Read the file again for `access`. If it is wrong, nothing changes."""
        try:
            roles = await asyncio.to_thread(_read, self._path)
        except DeltasyncError as error:
            access.trouble = f"the roles are those of before: {error}"
            events.emit(EventKind.ROLES_REFUSED, "those of before hold", error)
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
        logger.warning("%s can be read by every user of this machine: take that right from them", path)
    return roles

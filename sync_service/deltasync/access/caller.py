"""Who makes the call that is being answered, and what its roles give it."""

from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from fnmatch import fnmatchcase

from deltasync.base.decision import Decision
from deltasync.base.errors import InvalidInput


class Role(Enum):
    """What a call or a route needs of whoever makes it; the value is its name in files and on the command line."""

    PUBLISH = "publish"
    SUBSCRIBE = "subscribe"
    READ = "read"
    ADMIN = "admin"

    @property
    def of(self) -> str:
        """What its grants name by a pattern, in words; empty where a grant is of everything."""
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
            InvalidInput: it describes none.
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
        """Whether it grants a role for a name; None = for at least one. Who administers may read, too."""
        if self.role is Role.ADMIN and role is Role.READ:
            return True
        return self.role is role and (name is None or fnmatchcase(name, self.pattern))


@dataclass(frozen=True)
class Identity:
    """Whoever makes a call, as far as it has been shown.

    Attributes:
        name: of its token or of its certificate; empty if it has shown neither.
        grants: what it may do.
        address: where the call came from.
    """

    name: str = ""
    grants: tuple[Grant, ...] = ()
    address: str = ""

    def __str__(self) -> str:
        return f"{self.name or 'nobody'} ({self.address})" if self.address else self.name or "nobody"

    def may(self, role: Role, name: str | None = None) -> Decision:
        """Whether it has a role for a model or a consumer; None = for at least one. The reason says what is
        missing, and nothing of what there is.
        """
        if any(grant.covers(role, name) for grant in self.grants):
            return Decision(True, f"{self.name or 'anyone'} has role {role.value}")
        wanted = f"role {role.value}" + (f" for {role.of} {name!r}" if role.of and name is not None else "")
        if not self.name:
            return Decision(False, f"no token and no certificate that the service knows: {wanted} is needed")
        return Decision(False, f"{self.name!r} has no {wanted}")


def grants(texts: Iterable[str]) -> tuple[Grant, ...]:
    """The grants that texts describe.

    Raises:
        InvalidInput: one describes none.
    """
    return tuple(Grant.parse(text) for text in texts)


@dataclass
class Call:
    """A call, or a request, under way.

    Attributes:
        name: what is called: `DeleteModel` of gRPC, `DELETE /models/clicks` of HTTP.
        identity: who calls.
        says: the name that whoever calls gives, in `deltasync-by`; it proves nothing.
        role: what it needs; None = nothing.
        changes: what it has changed, in words.
        error: what has ended it; None if it has done what was asked.
    """

    name: str = ""
    identity: Identity = field(default_factory=Identity)
    says: str = ""
    role: Role | None = None
    changes: list[str] = field(default_factory=list)
    error: BaseException | None = None


# Tasks that a call begins have it, too.
CALL: ContextVar[Call | None] = ContextVar("call", default=None)


def current_call() -> Call:
    """The call that is being answered; of what the service does by itself, one of nobody."""
    return CALL.get() or Call()


def caller() -> Identity:
    """Who makes it."""
    return current_call().identity


def author() -> str:
    """Who asks for a change: the name that is given, and who that is: `anna as ops (10.0.0.7:4711)`."""
    call = current_call()
    return f"{call.says} as {call.identity}" if call.says else str(call.identity)


def may_read() -> bool:
    """Whether whoever calls may be told names, runs and counts."""
    return caller().may(Role.READ).yes

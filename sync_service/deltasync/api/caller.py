"""Whoever makes the call, or the request, that is being answered."""

from contextvars import ContextVar
from dataclasses import dataclass, field

from deltasync.core.access import Identity, Role


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

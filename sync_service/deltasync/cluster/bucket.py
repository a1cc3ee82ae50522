"""The bucket in which the processes of a service write down who they are and what they own."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TypeVar

from deltasync.base.arguments import check_name
from deltasync.base.errors import DeltasyncError, InvalidInput, Owner
from deltasync.cluster.member import Claim, Member


@dataclass(frozen=True)
class Entry:
    """What a key holds: empty if it was deleted; and a number that grows with every change in the bucket."""

    key: str
    value: bytes
    revision: int


class Changed(DeltasyncError):
    """A key is not at the revision at which it was to be written; nothing was."""


class Bucket(Protocol):
    """A few thousand small entries, none of them the truth: it may be lost, or be put back to an earlier copy.

    Used in the event loop. Everything raises `ServiceUnavailable` if brokers do not answer in time.
    """

    async def put(self, key: str, value: bytes, revision: int) -> int:
        """Write a key that is at a revision, 0 if it never was written; answers with the new one.

        Raises:
            Changed: it is at another one.
        """

    async def follow(self, seen: Callable[[Entry], None]) -> None:
        """Have `seen` called with all entries, once each, before this returns; from then on with each change.
        None is left out, but at some moment they may end, unsaid. Ends what was followed before, and makes
        a lost bucket anew.
        """

    async def close(self) -> None:
        """Follow it no more."""


PROCESS, MODEL, CONSUMER = "process", "model", "consumer"
_KINDS = {PROCESS, MODEL, CONSUMER}

# A key is made of tokens with dots between them, none of them empty; a name may hold dots anywhere but at its
# beginning, and never this:
_DOT = "="


def key_of(kind: str, name: str) -> str:
    """The key of what has a name.

    Raises:
        InvalidInput: it is no name (`check_name`).
    """
    return f"{kind}.{check_name(kind, name).replace('.', _DOT)}"


def name_of(key: str) -> tuple[str, str]:
    """What kind of thing a key is of, and its name.

    Raises:
        InvalidInput: no such key is made here.
    """
    kind, _, token = key.partition(".")
    if kind not in _KINDS or "." in token:
        raise InvalidInput(f"key {key!r}: expected one of {', '.join(sorted(_KINDS))}, a dot, and a name")
    return kind, check_name(kind, token.replace(_DOT, "."))


T = TypeVar("T")


def of_member(member: Member) -> bytes:
    """The entry of a process."""
    return json.dumps(asdict(member)).encode()


def to_member(value: bytes) -> Member:
    """The process that an entry is of.

    Raises:
        InvalidInput: it is none.
    """
    return _made(Member, _fields(value))


def of_claim(claim: Claim) -> bytes:
    """The entry of a model."""
    return json.dumps(asdict(claim)).encode()


def to_claim(value: bytes) -> Claim:
    """What an entry of a model says.

    Raises:
        InvalidInput: it is none.
    """
    fields = _fields(value)
    owner = fields.get("owner")
    return _made(Claim, fields | {"owner": _made(Owner, owner) if owner is not None else None})


def of_consumer(model: str) -> bytes:
    """The entry of a consumer."""
    return json.dumps({"model": model}).encode()


def to_consumer(value: bytes) -> str:
    """The model that the consumer of an entry follows.

    Raises:
        InvalidInput: it is none.
    """
    model = _fields(value).get("model")
    if not isinstance(model, str):
        raise InvalidInput(f"entry of a consumer {value!r}: its model is {model!r}")
    return model


def _fields(value: bytes) -> dict[str, Any]:
    try:
        fields = json.loads(value)
    except ValueError as error:
        raise InvalidInput(f"entry {value!r}: {error}") from error
    if not isinstance(fields, dict):
        raise InvalidInput(f"entry {value!r}: expected an object")
    return fields


def _made(kind: type[T], fields: Any) -> T:
    """One of that kind, whatever a later version may add to it."""
    types = {name: type_ for name, type_ in kind.__annotations__.items() if isinstance(type_, type)}
    if not isinstance(fields, dict):
        raise InvalidInput(f"entry of {kind.__name__.lower()} {fields!r}: expected an object")
    for name, type_ in types.items():
        if name in fields and type(fields[name]) is not type_:
            raise InvalidInput(
                f"entry of {kind.__name__.lower()}: {name} is {fields[name]!r}, expected {type_.__name__}"
            )
    try:
        return kind(**{name: fields[name] for name in kind.__annotations__ if name in fields})
    except TypeError as error:
        raise InvalidInput(f"entry of {kind.__name__.lower()} {fields!r}: {error}") from error

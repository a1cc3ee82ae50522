"""What the bucket holds of processes, of owners of models and of consumers, as bytes; none for a deleted one."""

import json
from dataclasses import asdict
from typing import Any, TypeVar

from deltasync.core.errors import InvalidInput
from deltasync.core.owner import Owner
from deltasync.ownership.claim import Claim
from deltasync.ownership.member import Member

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

"""Messages that are nearly right: valid ones, with bytes, fields or their order changed."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from hypothesis import strategies as st

T = TypeVar("T")

_WHOLE = (0, 1, 2, -1, 127, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**53, 2**62, 2**63 - 1, 2**64 - 1)
_REAL = (0.0, -1.0, 0.5, 1e-320, 1e308, float("nan"), float("inf"), float("-inf"))
_TEXTS = ("", "x", " ", ".", "../x", "a\0b", "line\nERROR forged", "\x1b[2J", "\u202e", "*", "x" * 129, "é" * 4000)
_CONTENTS = (
    b"",
    b"\0",
    b"\xff" * 8,
    bytes(7),
    bytes(4096),
    b"\0\0\xc0\x7f" * 4,
    b"\xff\xff\xff\xff\xff\xff\xff\x7f",
)
_WHOLE_RANGES = {
    FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
    FieldDescriptor.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
}


@st.composite
def mutated_bytes(draw: Callable[..., Any], content: bytes, other: bytes = b"") -> bytes:
    """`content` with some of its bytes flipped, put in, taken out, said twice, or taken from another message."""
    found = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        at, size = draw(st.integers(0, len(found))), draw(st.integers(1, 12))
        kind = draw(st.sampled_from(("flip", "insert", "delete", "twice", "splice", "cut", "length")))
        if kind == "flip" and at < len(found):
            found[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "insert":
            found[at:at] = draw(st.binary(min_size=size, max_size=size))
        elif kind == "delete":
            del found[at : at + size]
        elif kind == "twice":
            found[at:at] = found[at : at + size]
        elif kind == "splice":
            found[at:] = other[draw(st.integers(0, len(other))) :]
        elif kind == "length":
            found[at : at + 1] = b"\xff\xff\xff\xff\x07"
        else:
            del found[at:]
    return bytes(found)


@st.composite
def mutated_message(draw: Callable[..., Any], message: Message) -> bytes:
    """`message` with some of its fields, however deep, changed to what nobody would send."""
    changed = type(message)()
    changed.CopyFrom(message)
    for _ in range(draw(st.integers(1, 3))):
        owner, field = draw(st.sampled_from(_fields(changed)))
        _change(draw, owner, field)
    return changed.SerializeToString()


def mutated_order(contents: Sequence[T]) -> st.SearchStrategy[list[T]]:
    """The messages of a stream in any order, some of them twice and others not at all."""
    return st.lists(st.sampled_from(contents), max_size=len(contents) + 2)


def _fields(message: Message) -> list[tuple[Message, Any]]:
    """All fields of a message, and of those in it."""
    found: list[tuple[Message, Any]] = [(message, field) for field in message.DESCRIPTOR.fields]
    for field, value in message.ListFields():
        if field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
            for inner in value if field.is_repeated else [value]:
                found += _fields(inner)
    return found


def _change(draw: Callable[..., Any], owner: Message, field: FieldDescriptor) -> None:
    kind = draw(st.sampled_from(("clear", "set", "set", "set")))
    values = getattr(owner, field.name)
    if kind == "clear":
        owner.ClearField(field.name)
    elif field.cpp_type == FieldDescriptor.CPPTYPE_MESSAGE:
        if not field.is_repeated:
            values.SetInParent()
        elif values:
            values.extend([draw(st.sampled_from(list(values)))] * draw(st.sampled_from((1, 50))))
        else:
            values.add()
    elif field.is_repeated:
        values.extend([draw(_hostile(field))] * draw(st.sampled_from((1, 2, 500))))
    else:
        setattr(owner, field.name, draw(_hostile(field)))


def _hostile(field: FieldDescriptor) -> st.SearchStrategy[Any]:
    """Values that a field can have, and hardly ever has."""
    if field.cpp_type in _WHOLE_RANGES:
        least, most = _WHOLE_RANGES[field.cpp_type]
        return st.sampled_from([number for number in _WHOLE if least <= number <= most])
    if field.cpp_type in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return st.sampled_from(_REAL)
    if field.cpp_type == FieldDescriptor.CPPTYPE_BOOL:
        return st.booleans()
    return st.sampled_from(_CONTENTS if field.type == FieldDescriptor.TYPE_BYTES else _TEXTS)

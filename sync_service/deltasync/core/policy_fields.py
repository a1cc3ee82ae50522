"""How a field of a policy is declared: its default, the kind of its values, and words for those who set it."""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from deltasync.core.errors import InvalidInput
from deltasync.core.numbered import Numbered

T = TypeVar("T")

# What the wire can carry, and what fits the clock.
_MOST_BYTES = 2**63 - 1
_MOST_SECONDS = 1e9


class Kind(ABC):
    """The values that a field takes.

    Attributes:
        expected: which they are, in words.
        schema: the same as JSON Schema.
        metavar: what the command line's help calls a value; None = as click calls its type.
    """

    def __init__(self, expected: str, schema: dict[str, Any], metavar: str | None = None) -> None:
        self.expected = expected
        self.schema = schema
        self.metavar = metavar

    @abstractmethod
    def read(self, name: str, value: Any) -> Any:
        """The value of the field `name` that a program, JSON or TOML says.

        Raises:
            InvalidInput: the field does not take it.
        """

    def _refuse(self, name: str, value: Any) -> InvalidInput:
        return InvalidInput(f"{name} {value!r}: expected {self.expected}")


class Patterns(Kind):
    """Patterns of names, at least one."""

    def __init__(self) -> None:
        schema = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}
        super().__init__("a list of patterns", schema, "PATTERN")

    def read(self, name: str, value: Any) -> tuple[str, ...]:
        """See `Kind`."""
        if not isinstance(value, list | tuple) or not all(
            isinstance(each, str) and _is_text(each) for each in value
        ):
            raise self._refuse(name, value)
        if not value or not all(value):
            raise InvalidInput(f"{name} {list(value)}: name at least one pattern, '*' for all")
        return tuple(value)


class OneOf(Kind):
    """A member of an enum, or its name."""

    def __init__(self, members: type[Numbered]) -> None:
        self.members = members
        self.names = [member.value for member in members]
        super().__init__(f"one of {', '.join(self.names)}", {"enum": self.names})

    def read(self, name: str, value: Any) -> Numbered:
        """See `Kind`."""
        try:
            return self.members(value)
        except ValueError as error:
            raise self._refuse(name, value) from error


class Flag(Kind):
    """Yes or no."""

    def __init__(self) -> None:
        super().__init__("true or false", {"type": "boolean"})

    def read(self, name: str, value: Any) -> bool:
        """See `Kind`."""
        if not isinstance(value, bool):
            raise self._refuse(name, value)
        return value


class Seconds(Kind):
    """A time: 0 or more where `zero`, else above 0; or at least `least`."""

    def __init__(self, *, zero: bool = False, least: float = 0.0) -> None:
        schema = {"type": "number", "maximum": _MOST_SECONDS}
        schema |= {"minimum": least} if zero or least else {"exclusiveMinimum": 0}
        bounds = f"{least:.15g} or more" if zero or least else "more than 0"
        super().__init__(f"{bounds}, at most {_MOST_SECONDS:.15g}", schema, "SECONDS")
        self._zero, self._least = zero, least

    def read(self, name: str, value: Any) -> float:
        """See `Kind`."""
        seconds = _number(name, value)
        if not (self._least <= seconds <= _MOST_SECONDS and (seconds or self._zero)):
            raise InvalidInput(f"{name} {seconds:.15g}: expected {self.expected}")
        return seconds


class Amount(Kind):
    """Of rows: a share of them, or a number. A float is a share, for 1.0 could mean one row or all rows."""

    def __init__(self) -> None:
        expected = "a whole number of rows such as 10, without a point, or a share above 0 and below 1 such as 0.1"
        share = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
        super().__init__(expected, {"anyOf": [{"type": "integer", "minimum": 1}, share]}, "ROWS|SHARE")

    def read(self, name: str, value: Any) -> float:
        """See `Kind`."""
        amount = _number(name, value)
        if isinstance(value, int) and value >= 1:
            return value
        if not 0 < amount < 1:
            raise self._refuse(name, value)
        return amount


class Bytes(Kind):
    """A number of bytes."""

    def __init__(self) -> None:
        schema = {"type": "integer", "minimum": 1, "maximum": _MOST_BYTES}
        super().__init__("a whole number of bytes, at least 1", schema, "BYTES")

    def read(self, name: str, value: Any) -> int:
        """See `Kind`."""
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self._refuse(name, value)
        if value > _MOST_BYTES:
            raise InvalidInput(f"{name} {value}: expected at most {_MOST_BYTES}")
        return value


@dataclass(frozen=True)
class PolicyField:
    """A field of a policy.

    Attributes:
        name: what it is called in programs, JSON and TOML.
        default: what it is unless it is set. None = no limit, and is then taken, too.
        kind: the values that it takes.
        words: what it means, in Markdown.
        flags: what it is called on the command line.
    """

    name: str
    default: Any
    kind: Kind
    words: str
    flags: tuple[str, ...]

    def read(self, value: Any) -> Any:
        """The value that a program, JSON or TOML says.

        Raises:
            InvalidInput: the field does not take it.
        """
        return None if value is None and self.default is None else self.kind.read(self.name, value)


def declared(default: T, kind: Kind, words: str, *flags: str) -> T:
    """A field of a dataclass that is a field of a policy; its flag is its name unless there are others."""
    return field(default=default, metadata={"kind": kind, "words": words, "flags": flags})


def declared_in(policy: type) -> tuple[PolicyField, ...]:
    """The fields that a dataclass declares."""
    return tuple(
        PolicyField(
            name=each.name,
            default=each.default,
            kind=each.metadata["kind"],
            words=each.metadata["words"],
            flags=each.metadata["flags"] or (f"--{each.name.replace('_', '-')}",),
        )
        for each in fields(policy)
    )


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(f"{name} {value!r}: expected a number")
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidInput(f"{name}: the number is too large") from error


def _is_text(value: str) -> bool:
    """Whether it can be sent: JSON also allows lone surrogates, which UTF-8 does not."""
    return not any(0xD800 <= ord(each) <= 0xDFFF for each in value)

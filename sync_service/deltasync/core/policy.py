"""A consumer's policy: which rows its replicas are sent, how many, when, and in which type."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from deltasync.base.errors import InvalidInput
from deltasync.base.words import counted
from deltasync.core.delivery import Delivery, Mode
from deltasync.core.tables import ID_TYPE, Numbered, TableSpec
from deltasync.core.value_types import ValueType, sent_as

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


# A row id, and a norm or one fp16 value.
_SMALLEST_ROW_BYTES = ID_TYPE.itemsize + 2


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a consumer wants. The default is every changed row, in its own type, at once.

    A field is declared here, with what it takes and means: JSON, TOML, the options of commands and the table in
    sync_service/README.md follow from that.

    Raises:
        InvalidInput: a field is out of bounds, or fields that cannot be met together.
    """

    tables: tuple[str, ...] = declared(
        ("*",), Patterns(), "Tables it follows, by patterns of their names: `*`, `?`, `[...]`."
    )
    mode: Mode = declared(
        Mode.EMBEDDINGS,
        OneOf(Mode),
        "What is sent of a row: its values, or, as `ids`, only that it has changed, and the norm of what has: for "
        "a cache to invalidate, an audit, a monitor.",
    )
    top_k: float | None = declared(
        None,
        Amount(),
        "Send at once only the rows that have changed most: a whole number is that many rows a release (10 is ten "
        "rows), a number below 1 that share of the changed rows, rounded up (0.1 is a tenth). All unless given.",
    )
    top_k_per_table: bool = declared(
        False, Flag(), "Count `top_k` in every table by itself, instead of in all together."
    )
    max_age_seconds: float | None = declared(
        None,
        Seconds(),
        "Send a row that is unsent for longer, however little it has changed. No limit unless given.",
        "--max-age",
    )
    min_interval_seconds: float = declared(
        0.0, Seconds(zero=True), "Time between two releases, at least.", "--min-interval"
    )
    max_bytes: int | None = declared(
        None, Bytes(), "Ids and values of a release, at most, but at least one row. No limit unless given."
    )
    value_type: ValueType = declared(
        ValueType.FP32,
        OneOf(ValueType),
        "What embedding rows are sent as; those that take no more bytes as they are, are sent so, unless it is "
        "for a TBE.",
        "--value-type",
        "--dtype",
    )
    ready_within_seconds: float | None = declared(
        None,
        Seconds(least=1.0),
        "A replica is ready while what it holds was the newest no longer ago than this. Unless given, it stays "
        "ready once it has held the newest.",
        "--ready-within",
    )

    def __post_init__(self) -> None:
        for each in FIELDS:
            object.__setattr__(self, each.name, each.read(getattr(self, each.name)))
        if self.max_age_seconds is not None and self.max_age_seconds < self.min_interval_seconds:
            raise InvalidInput(
                f"max_age_seconds {self.max_age_seconds:.15g} is shorter than min_interval_seconds "
                f"{self.min_interval_seconds:.15g}: no row can go out sooner than the next release"
            )
        self._check_bytes(self._rows * _SMALLEST_ROW_BYTES, f"{self._rows} rows of the least bytes there can be")

    @property
    def sends_everything(self) -> bool:
        """Whether every row is sent at once and unchanged: replicas then read the model's own tables."""
        return replace(self, ready_within_seconds=None) == Policy()

    def follows(self, table: TableSpec) -> bool:
        """Whether the consumer follows a table; with an embedding table, its map too."""
        return any(_fits(pattern, table) for pattern in self.tables)

    def delivery_of(self, table: TableSpec) -> Delivery:
        """What replicas are sent of a table."""
        return replace(Delivery.unchanged(table), value_type=self._value_type_of(table), mode=self.mode)

    def row_bytes(self, table: TableSpec) -> int:
        """Bytes that one of a table's rows takes in a release: id and values, or id and norm."""
        return self.delivery_of(table).wire_spec.row_bytes

    def check(self, tables: Sequence[TableSpec]) -> None:
        """Check the policy against the tables there are.

        Raises:
            InvalidInput: no table is followed, a table cannot be sent in the value type, or the byte budget is too
                small for a row, or for `top_k` rows.
        """
        followed = [table for table in tables if self.follows(table)]
        if not followed:
            if tables:
                names, patterns = ", ".join(table.name for table in tables), ", ".join(self.tables)
                raise InvalidInput(f"tables {patterns}: no table of the model fits; its tables: {names}")
            return
        ranked = [table for table in followed if table.kind.ranked]
        for table in ranked:
            self.delivery_of(table).check()
        if self.top_k_per_table:
            needed = sum(min(self._rows, table.rows) * self.row_bytes(table) for table in ranked)
            self._check_bytes(needed, f"{self._rows} rows of each of {len(ranked)} tables")
        needed, left = 0, self._rows
        for table in sorted(ranked, key=self.row_bytes, reverse=True):
            needed += min(left, table.rows) * self.row_bytes(table)
            left -= min(left, table.rows)
        self._check_bytes(needed, f"the {self._rows - left} largest rows")

    def unranked(self, tables: Sequence[TableSpec]) -> list[str]:
        """Tables that the policy names and can neither rank nor quantise, by name.

        A pattern that fits an embedding table does not name the parameters that it fits as well. Without `top_k`,
        `max_bytes` and another `value_type` than fp32 there are none.
        """
        if self.top_k is None and self.max_bytes is None and self.value_type is ValueType.FP32:
            return []
        by_pattern = [[table for table in tables if _fits(pattern, table)] for pattern in self.tables]
        return sorted(
            {
                table.name
                for fitting in by_pattern
                if not any(each.kind.ranked for each in fitting)
                for table in fitting
            }
        )

    @property
    def words(self) -> str:
        """What of it differs from the default; empty if nothing does."""
        default = Policy().as_dict()
        return ", ".join(_word(key, value) for key, value in self.as_dict().items() if value != default[key])

    def as_dict(self) -> dict[str, Any]:
        """The policy as JSON knows it; `from_dict` takes it back."""
        return {each.name: _plain(getattr(self, each.name)) for each in FIELDS}

    @classmethod
    def from_dict(cls, described: Mapping[str, Any]) -> "Policy":
        """The policy that JSON or TOML describes; what is left out is as in the default.

        Raises:
            InvalidInput: an unknown key, a value of another type, or one that is out of bounds.
        """
        known = {each.name for each in FIELDS}
        if unknown := sorted(described.keys() - known):
            raise InvalidInput(f"policy: unknown key {unknown[0]!r}; keys: {', '.join(sorted(known))}")
        return cls(**described)

    def _value_type_of(self, table: TableSpec) -> ValueType | None:
        return sent_as(table, self.value_type) if table.kind.ranked else None

    @property
    def _rows(self) -> int:
        """Rows that a release must have room for."""
        return self.top_k if isinstance(self.top_k, int) else 1

    def _check_bytes(self, needed: int, what: str) -> None:
        if self.max_bytes is not None and needed > self.max_bytes:
            instead = "raise it, or lower top_k" if self.top_k else "raise it"
            raise InvalidInput(f"max_bytes {self.max_bytes} is less than the {needed} bytes of {what}: {instead}")


FIELDS = declared_in(Policy)


def _fits(pattern: str, table: TableSpec) -> bool:
    return any(fnmatchcase(name, pattern) for name in {*table.names, table.of} - {""})


def _plain(value: Any) -> Any:
    """A field's value, as JSON knows it."""
    if isinstance(value, Numbered):
        return value.value
    return list(value) if isinstance(value, tuple) else value


def _word(key: str, value: Any) -> str:
    if isinstance(value, list):
        return f"{key}={','.join(value)}"
    if value is True:
        return key
    if key == "top_k":
        return f"{key}={100 * value:.15g} % of the changed rows" if value < 1 else f"{key}={counted(value, 'row')}"
    return f"{key}={value:.15g}" if isinstance(value, float) else f"{key}={value}"

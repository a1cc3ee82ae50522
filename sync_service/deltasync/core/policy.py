"""A consumer's policy: which rows its replicas are sent, how many, when, and in which type."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, TypeVar

from deltasync.base.arguments import is_text, number_of, shown
from deltasync.base.errors import InvalidInput
from deltasync.base.words import counted
from deltasync.core.table_form import Mode, TableForm
from deltasync.core.tables import ID_TYPE, Numbered, TableSpec
from deltasync.core.value_types import ValueType, sent_as

T = TypeVar("T")

# The largest integer on the wire, and the longest time that still fits the clock.
_MOST_BYTES = 2**63 - 1
_MOST_SECONDS = 1e9


class Kind(ABC):
    """The values that a field accepts.

    Attributes:
        expected: the rule for the values, for error messages.
        schema: the same as JSON Schema.
        metavar: the placeholder for a value in `--help`; None = click's own.
    """

    def __init__(self, expected: str, schema: dict[str, Any], metavar: str | None = None) -> None:
        self.expected = expected
        self.schema = schema
        self.metavar = metavar

    @abstractmethod
    def read(self, name: str, value: Any) -> Any:
        """Check a value of the field `name` from a program, JSON or TOML, and convert it."""

    def _refuse(self, name: str, value: Any) -> InvalidInput:
        return InvalidInput(f"{name} {shown(value)}: expected {self.expected}")


class Patterns(Kind):
    """One or more patterns of names."""

    def __init__(self) -> None:
        schema = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}
        super().__init__("a list of patterns", schema, "PATTERN")

    def read(self, name: str, value: Any) -> tuple[str, ...]:
        """See `Kind`."""
        if not isinstance(value, list | tuple) or not all(
            isinstance(each, str) and is_text(each) for each in value
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
    """A time above 0. With `zero` it may be 0; with `least` it must be at least that."""

    def __init__(self, *, zero: bool = False, least: float = 0.0) -> None:
        schema = {"type": "number", "maximum": _MOST_SECONDS}
        schema |= {"minimum": least} if zero or least else {"exclusiveMinimum": 0}
        bounds = f"{least:.15g} or more" if zero or least else "more than 0"
        super().__init__(f"{bounds}, at most {_MOST_SECONDS:.15g}", schema, "SECONDS")
        self._zero, self._least = zero, least

    def read(self, name: str, value: Any) -> float:
        """See `Kind`."""
        seconds = number_of(name, value)
        if not (self._least <= seconds <= _MOST_SECONDS and (seconds or self._zero)):
            raise InvalidInput(f"{name} {seconds:.15g}: expected {self.expected}")
        return seconds


class Amount(Kind):
    """A number of rows, or a share of them. A float must be a share: 1.0 could mean one row or all rows."""

    def __init__(self) -> None:
        expected = "a whole number of rows such as 10, without a point, or a share above 0 and below 1 such as 0.1"
        share = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
        super().__init__(expected, {"anyOf": [{"type": "integer", "minimum": 1}, share]}, "ROWS|SHARE")

    def read(self, name: str, value: Any) -> float:
        """See `Kind`."""
        amount = number_of(name, value)
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
            raise InvalidInput(f"{name} {shown(value)}: expected at most {_MOST_BYTES}")
        return value


@dataclass(frozen=True)
class PolicyField:
    """A field of a policy.

    Attributes:
        name: its name in programs, JSON and TOML.
        default: its value unless it is set. None = no limit; the field then also accepts None.
        kind: the values that it accepts.
        description: its meaning, in Markdown.
        flags: its names on the command line.
    """

    name: str
    default: Any
    kind: Kind
    description: str
    flags: tuple[str, ...]

    def read(self, value: Any) -> Any:
        """Check a value from a program, JSON or TOML, and convert it."""
        return None if value is None and self.default is None else self.kind.read(self.name, value)


def declared(default: T, kind: Kind, description: str, *flags: str) -> T:
    """Declare a dataclass field as a policy field. Without `flags`, its flag is its name."""
    return field(default=default, metadata={"kind": kind, "description": description, "flags": flags})


def declared_in(policy: type) -> tuple[PolicyField, ...]:
    """The policy fields that a dataclass declares."""
    return tuple(
        PolicyField(
            name=each.name,
            default=each.default,
            kind=each.metadata["kind"],
            description=each.metadata["description"],
            flags=each.metadata["flags"] or (f"--{each.name.replace('_', '-')}",),
        )
        for each in fields(policy)
    )


# The smallest row is its id and either a norm or one fp16 value.
_SMALLEST_ROW_BYTES = ID_TYPE.itemsize + 2


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Which rows a consumer's replicas get, and when. The default is every changed row, unchanged, at once.

    Each field is declared once, here, with its values and its meaning. JSON, TOML, the options of commands and
    sync_service/docs/reference/policy.md are derived from the declaration.

    Raises:
        InvalidInput: a field is out of bounds, or two fields contradict each other.
    """

    tables: tuple[str, ...] = declared(
        ("*",), Patterns(), "Tables to send: patterns of their names, with `*`, `?` and `[...]`."
    )
    mode: Mode = declared(
        Mode.EMBEDDINGS,
        OneOf(Mode),
        "`embeddings` sends the values of a changed row. `ids` sends only its id and the norm of the change, for "
        "example to invalidate a cache or to audit changes.",
    )
    top_k: float | None = declared(
        None,
        Amount(),
        "Send only the rows that have changed most; the others wait for a later release. A whole number means "
        "rows per release, a number below 1 a share of the changed rows, rounded up. Default: all rows.",
    )
    top_k_per_table: bool = declared(
        False, Flag(), "Apply `top_k` to each table separately instead of to all tables together."
    )
    max_age_seconds: float | None = declared(
        None,
        Seconds(),
        "Send every changed row after this time at the latest, however little it has changed. Default: no limit.",
        "--max-age",
    )
    min_interval_seconds: float = declared(
        0.0, Seconds(zero=True), "Shortest time between two releases.", "--min-interval"
    )
    max_bytes: int | None = declared(
        None,
        Bytes(),
        "Maximum size of a release's ids and values; at least one row is always sent. Default: no limit.",
    )
    value_type: ValueType = declared(
        ValueType.FP32,
        OneOf(ValueType),
        "Type in which embedding rows are sent. Rows that would not shrink keep their own type. The `-tbe` types "
        "(FBGEMM's table-batched embeddings) always apply.",
        "--value-type",
        "--dtype",
    )
    ready_within_seconds: float | None = declared(
        None,
        Seconds(least=1.0),
        "How long a replica stays ready after its rows were last known to be the newest. Default: a replica that "
        "has caught up once stays ready.",
        "--ready-within",
    )

    def __post_init__(self) -> None:
        for each in FIELDS:
            object.__setattr__(self, each.name, each.read(getattr(self, each.name)))
        if self.max_age_seconds is not None and self.max_age_seconds < self.min_interval_seconds:
            raise InvalidInput(
                f"max_age_seconds {self.max_age_seconds:.15g} is shorter than min_interval_seconds "
                f"{self.min_interval_seconds:.15g}, but no row can go out before the next release: raise "
                "max_age_seconds, or lower min_interval_seconds"
            )
        self._check_bytes(self._rows * _SMALLEST_ROW_BYTES, f"{self._rows} rows of the smallest possible size")

    @property
    def sends_everything(self) -> bool:
        """Whether every row is sent at once and unchanged. Replicas then read the model's own tables."""
        return replace(self, ready_within_seconds=None) == Policy()

    def follows(self, table: TableSpec) -> bool:
        """Whether the policy's patterns match a table. A pattern for an embedding table also matches its map."""
        return any(_fits(pattern, table) for pattern in self.tables)

    def form_of(self, table: TableSpec) -> TableForm:
        """The form in which replicas get a table's rows."""
        value_type = sent_as(table, self.value_type) if table.kind.ranked else None
        return replace(TableForm.unchanged(table), value_type=value_type, mode=self.mode)

    def row_bytes(self, table: TableSpec) -> int:
        """Size of one of a table's rows in a release, in bytes: id and values, or id and norm."""
        return self.form_of(table).wire_spec.row_bytes

    def check(self, tables: Sequence[TableSpec]) -> None:
        """Check the policy against a model's tables."""
        followed = [table for table in tables if self.follows(table)]
        if not followed:
            if tables:
                names, patterns = ", ".join(table.name for table in tables), ", ".join(self.tables)
                raise InvalidInput(f"tables {patterns}: no table of the model matches; its tables: {names}")
            return
        ranked = [table for table in followed if table.kind.ranked]
        for table in ranked:
            self.form_of(table).check()
        if self.top_k_per_table:
            needed = sum(min(self._rows, table.rows) * self.row_bytes(table) for table in ranked)
            self._check_bytes(needed, f"{self._rows} rows of each of {len(ranked)} tables")
        needed, left = 0, self._rows
        for table in sorted(ranked, key=self.row_bytes, reverse=True):
            needed += min(left, table.rows) * self.row_bytes(table)
            left -= min(left, table.rows)
        self._check_bytes(needed, f"the {self._rows - left} largest rows")

    def unranked(self, tables: Sequence[TableSpec]) -> list[str]:
        """Names of the tables that the policy asks to rank or quantise although it cannot.

        A pattern that matches an embedding table does not count for the parameters that it matches as well. A
        policy without `top_k` and `max_bytes` and with `value_type` fp32 asks for neither.
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
    def description(self) -> str:
        """The fields that differ from the default, as text; empty if none does."""
        default = Policy().as_dict()
        return ", ".join(_word(key, value) for key, value in self.as_dict().items() if value != default[key])

    def as_dict(self) -> dict[str, Any]:
        """The policy as a JSON object; `from_dict` reads it."""
        return {each.name: _plain(getattr(self, each.name)) for each in FIELDS}

    @classmethod
    def from_dict(cls, described: Mapping[str, Any]) -> "Policy":
        """Read a policy from JSON or TOML. Missing keys get their default."""
        names = {each.name for each in FIELDS}
        if unknown := sorted(described.keys() - names):
            raise InvalidInput(f"policy: unknown key {unknown[0]!r}; keys: {', '.join(sorted(names))}")
        return cls(**described)

    @property
    def _rows(self) -> int:
        """Number of rows for which `max_bytes` must have room."""
        return self.top_k if isinstance(self.top_k, int) else 1

    def _check_bytes(self, needed: int, what: str) -> None:
        if self.max_bytes is not None and needed > self.max_bytes:
            instead = "raise it, or lower top_k" if self.top_k else "raise it"
            raise InvalidInput(f"max_bytes {self.max_bytes} is less than the {needed} bytes of {what}: {instead}")


FIELDS = declared_in(Policy)


def _fits(pattern: str, table: TableSpec) -> bool:
    return any(fnmatchcase(name, pattern) for name in {*table.names, table.of} - {""})


def _plain(value: Any) -> Any:
    """A field's value in JSON."""
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

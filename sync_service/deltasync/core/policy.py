"""A consumer's policy: which rows its replicas are sent, how many, when, and in which type."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any

from deltasync.core.delivery import Delivery
from deltasync.core.errors import InvalidInput
from deltasync.core.mode import Mode
from deltasync.core.tables import ID_TYPE, TableSpec
from deltasync.core.value_types import ValueType, sent_as

# A row id, and a norm or one fp16 value.
_SMALLEST_ROW_BYTES = ID_TYPE.itemsize + 2
# What the wire can carry, and what fits the clock.
_MOST_BYTES = 2**63 - 1
_MOST_SECONDS = 1e9


@dataclass(frozen=True, kw_only=True)
class Policy:
    """What a consumer wants. The default is every changed row, in its own type, at once.

    Attributes:
        tables: patterns (`*`, `?`, `[...]`) of the names of the tables it follows.
        mode: values, or ids and norms only.
        top_k: of the rows that have changed, a release takes those that have changed most: this many, or, below 1,
            this share of them (rounded up). None = all.
        top_k_per_table: whether `top_k` counts in every table by itself.
        max_age_seconds: a row that has been unsent for longer is sent whatever its norm. None = no limit.
        min_interval_seconds: the least time between two releases.
        max_bytes: the most bytes of ids and values in a release. None = no limit.
        value_type: what values are sent as. A table whose rows would not get smaller keeps its own type.

    Raises:
        InvalidInput: a field is out of bounds, or fields that cannot be met together.
    """

    tables: tuple[str, ...] = ("*",)
    mode: Mode = Mode.EMBEDDINGS
    top_k: float | None = None
    top_k_per_table: bool = False
    max_age_seconds: float | None = None
    min_interval_seconds: float = 0.0
    max_bytes: int | None = None
    value_type: ValueType = ValueType.FP32

    def __post_init__(self) -> None:
        for name, read in _READ.items():
            object.__setattr__(self, name, read(name, getattr(self, name)))
        if not self.tables or not all(self.tables):
            raise InvalidInput(f"tables {list(self.tables)}: name at least one pattern, '*' for all")
        if self.top_k is not None:
            _check_top_k(self.top_k)
        _check_seconds("max_age_seconds", self.max_age_seconds, above=True)
        _check_seconds("min_interval_seconds", self.min_interval_seconds, above=False)
        if self.max_age_seconds is not None and self.max_age_seconds < self.min_interval_seconds:
            raise InvalidInput(
                f"max_age_seconds {self.max_age_seconds:.15g} is shorter than min_interval_seconds "
                f"{self.min_interval_seconds:.15g}: no row can go out sooner than the next release"
            )
        if self.max_bytes is not None and self.max_bytes > _MOST_BYTES:
            raise InvalidInput(f"max_bytes {self.max_bytes}: expected at most {_MOST_BYTES}")
        self._check_bytes(self._rows * _SMALLEST_ROW_BYTES, f"{self._rows} rows of the least bytes there can be")

    @property
    def sends_everything(self) -> bool:
        """Whether every row is sent at once and unchanged: replicas then read the model's own tables."""
        return self == Policy()

    def follows(self, table: TableSpec) -> bool:
        """Whether the consumer follows a table."""
        return any(fnmatchcase(table.name, pattern) for pattern in self.tables)

    def delivery_of(self, table: TableSpec) -> Delivery:
        """What replicas are sent of a table."""
        return Delivery(table, sent_as(table, self.value_type), self.mode)

    def row_bytes(self, table: TableSpec) -> int:
        """Bytes that one of a table's rows takes in a release: id and values, or id and norm."""
        return self.delivery_of(table).wire_spec.row_bytes

    def check(self, tables: Sequence[TableSpec]) -> None:
        """Check the policy against the tables there are.

        Raises:
            InvalidInput: no table is followed, or the byte budget is too small for a row, or for `top_k` rows.
        """
        followed = [table for table in tables if self.follows(table)]
        if not followed:
            if tables:
                names, patterns = ", ".join(table.name for table in tables), ", ".join(self.tables)
                raise InvalidInput(f"tables {patterns}: no table of the model fits; its tables: {names}")
            return
        if self.top_k_per_table:
            needed = sum(min(self._rows, table.rows) * self.row_bytes(table) for table in followed)
            self._check_bytes(needed, f"{self._rows} rows of each of {len(followed)} tables")
        needed, left = 0, self._rows
        for table in sorted(followed, key=self.row_bytes, reverse=True):
            needed += min(left, table.rows) * self.row_bytes(table)
            left -= min(left, table.rows)
        self._check_bytes(needed, f"the {self._rows - left} largest rows")

    @property
    def words(self) -> str:
        """What of it differs from the default; empty if nothing does."""
        default = Policy().as_dict()
        return " ".join(_word(key, value) for key, value in self.as_dict().items() if value != default[key])

    def as_dict(self) -> dict[str, Any]:
        """The policy as JSON knows it; `from_dict` takes it back."""
        described = asdict(self)
        return {
            **described,
            "tables": list(self.tables),
            "mode": self.mode.value,
            "value_type": self.value_type.value,
        }

    @classmethod
    def from_dict(cls, described: Mapping[str, Any]) -> "Policy":
        """The policy that JSON or TOML describes; what is left out is as in the default.

        Raises:
            InvalidInput: an unknown key, a value of another type, or one that is out of bounds.
        """
        known = {field.name for field in fields(cls)}
        if unknown := sorted(described.keys() - known):
            raise InvalidInput(f"policy: unknown key {unknown[0]!r}; keys: {', '.join(sorted(known))}")
        return cls(**described)

    @property
    def _rows(self) -> int:
        """Rows that a release must have room for."""
        return int(self.top_k) if self.top_k is not None and self.top_k >= 1 else 1

    def _check_bytes(self, needed: int, what: str) -> None:
        if self.max_bytes is not None and needed > self.max_bytes:
            instead = "raise it, or lower top_k" if self.top_k else "raise it"
            raise InvalidInput(f"max_bytes {self.max_bytes} is less than the {needed} bytes of {what}: {instead}")


def _word(key: str, value: Any) -> str:
    if isinstance(value, list):
        return f"{key}={','.join(value)}"
    if value is True:
        return key
    return f"{key}={value:.15g}" if isinstance(value, float) else f"{key}={value}"


def _check_top_k(top_k: float) -> None:
    if not math.isfinite(top_k) or top_k <= 0 or (top_k >= 1 and top_k != int(top_k)):
        raise InvalidInput(f"top_k {top_k:.15g}: expected a share above 0 and below 1, or a whole number of rows")


def _check_seconds(name: str, seconds: float | None, *, above: bool) -> None:
    if seconds is not None and not (seconds <= _MOST_SECONDS and (seconds > 0 if above else seconds >= 0)):
        expected = "more than 0" if above else "0 or more"
        raise InvalidInput(f"{name} {seconds:.15g}: expected {expected}, at most {_MOST_SECONDS:.15g}")


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidInput(f"{name} {value!r}: expected a number")
    try:
        return float(value)
    except OverflowError as error:
        raise InvalidInput(f"{name}: the number is too large") from error


def _optional_number(name: str, value: Any) -> float | None:
    return None if value is None else _number(name, value)


def _optional_bytes(name: str, value: Any) -> int | None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise InvalidInput(f"{name} {value!r}: expected a whole number of bytes, at least 1")
    return value


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InvalidInput(f"{name} {value!r}: expected true or false")
    return value


def _patterns(name: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple) or not all(isinstance(each, str) and _is_text(each) for each in value):
        raise InvalidInput(f"{name} {value!r}: expected a list of patterns")
    return tuple(value)


def _is_text(value: str) -> bool:
    """Whether it can be sent: JSON also allows lone surrogates, which UTF-8 does not."""
    return not any(0xD800 <= ord(each) <= 0xDFFF for each in value)


def _member(kind: type[Enum]) -> Any:
    def read(name: str, value: Any) -> Enum:
        members = {member.value: member for member in kind}
        if isinstance(value, kind):
            return value
        if not isinstance(value, str) or value not in members:
            raise InvalidInput(f"{name} {value!r}: expected one of {', '.join(members)}")
        return members[value]

    return read


_READ: dict[str, Any] = {
    "tables": _patterns,
    "mode": _member(Mode),
    "top_k": _optional_number,
    "top_k_per_table": _flag,
    "max_age_seconds": _optional_number,
    "min_interval_seconds": _number,
    "max_bytes": _optional_bytes,
    "value_type": _member(ValueType),
}

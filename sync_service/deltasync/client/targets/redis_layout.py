"""The layout of a model in Redis: keys, fields, and the hash `meta`."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from deltasync.base.errors import Contradiction
from deltasync.client.targets.target import Release, reading_fields
from deltasync.core.position import Position
from deltasync.core.rows import Ids, Values
from deltasync.core.table_form import ReplicaSpec
from deltasync.core.tables import TableSpec

FORMAT = 1


_LONGEST_TEXT = 200


@dataclass(frozen=True)
class Names:
    """The names of the keys under a prefix."""

    prefix: str

    @property
    def meta(self) -> str:
        """The hash with the model's version and tables."""
        return f"{self.prefix}:meta"

    def rows(self, table: str) -> str:
        """The hash of a table's rows: by raw id if the table has a map, else by row number."""
        return f"{self.prefix}:rows:{table}"

    def free(self, table: str) -> str:
        """The hash of rows without a raw id, by row number, for a table with a map."""
        return f"{self.prefix}:free:{table}"


@dataclass(frozen=True)
class Meta:
    """The content of the hash `meta`, with the fields of `Reading`.

    Attributes:
        position: empty while all rows are being replaced.
        version: all rows are of this version or newer.
        writing: the version that is being written, or 0. Meanwhile, rows are of either version.
    """

    model: str
    tables: "tuple[StoredTable, ...]"
    position: Position = field(default_factory=Position)
    version: int = 0
    step: int | None = None
    step_end_unix_ns: int | None = None
    event_time_unix_ns: int | None = None
    kept: str = ""
    writing: int = 0

    def begun(self, release: Release, tables: "tuple[StoredTable, ...]") -> "Meta":
        """The content while a release is being written."""
        by_name = {table.name: table for table in (*self.tables, *tables)}
        base = self
        if release.resync:  # If this is interrupted, no writer can continue from the old position.
            older = release.version < self.version
            base = replace(self.after(release, tables) if older else self, position=Position())
        return replace(base, tables=tuple(by_name.values()), writing=release.version)

    def after(self, release: Release, tables: "tuple[StoredTable, ...]") -> "Meta":
        """The content after a release."""
        return replace(self, tables=tables, **reading_fields(release), writing=0)

    def fields(self) -> dict[str, str]:
        """The fields of the hash; unknown values are empty."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return {
            "format": str(FORMAT),
            "model": self.model,
            "kept": self.kept,
            "history": self.position.history,
            "number": str(self.position.number),
            "seal": str(self.position.seal),
            "tables": json.dumps([asdict(table) for table in self.tables]),
            **{name: "" if value is None else str(value) for name, value in numbers.items()},
        }

    @classmethod
    def of_fields(cls, stored: Mapping[bytes, bytes], where: str) -> "Meta | None":
        """Parse the fields of a hash; None if it is empty. Another format is a Contradiction."""
        if not stored:
            return None
        fields = {name.decode(): value.decode() for name, value in stored.items()}
        if fields.get("format") != str(FORMAT):
            raise Contradiction(
                f"{where} has rows of format {fields.get('format')!r}, this version of deltasync uses format "
                f"{FORMAT}: update deltasync, or use another prefix"
            )
        try:
            numbers: dict[str, Any] = {name: int(fields[name]) if fields[name] else None for name in _NUMBERS}
            tables = tuple(StoredTable(**table) for table in json.loads(fields["tables"]))
            position = Position(fields["history"], int(fields["number"]), int(fields["seal"]))
            return cls(fields["model"], tables, position, kept=fields["kept"], **numbers)
        except (KeyError, TypeError, ValueError) as error:
            text = f"{where}: its meta cannot be read ({error!r}): delete the keys of this prefix, or use another"
            raise Contradiction(text) from error


_NUMBERS = ("version", "step", "step_end_unix_ns", "event_time_unix_ns", "writing")


@dataclass(frozen=True)
class StoredTable:
    """A table of the store, which lacks deleted rows and rows that were never written.

    Attributes:
        tbe_bits: 8 or 4 for rows of an inference TBE: scale and bias (fp16 each), then codes of this many bits;
            otherwise 0.
        mapped: whether the keys of rows are raw ids.
    """

    name: str
    rows: int
    dim: int
    dtype: str
    tbe_bits: int
    kind: str
    of: str
    mapped: bool

    @classmethod
    def of_spec(cls, table: TableSpec, *, mapped: bool) -> "StoredTable":
        """Describe a table of a release."""
        tbe_bits = (table.value_type.tbe_bits or 0) if isinstance(table, ReplicaSpec) else 0
        return cls(
            table.name, table.rows, table.dim, table.dtype.str, tbe_bits, table.kind.value, table.of, mapped
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.dim * np.dtype(self.dtype).itemsize

    def values(self, rows: list[bytes | None]) -> Values:
        """Rows of the store as an array [n, dim]; zeros for None."""
        nothing = bytes(self.row_bytes)
        joined = bytearray().join(nothing if row is None else row for row in rows)  # For a writable array.
        return np.frombuffer(joined, self.dtype).reshape(len(rows), self.dim)

    def __str__(self) -> str:
        """The form of the rows, for readers."""
        key = "raw id" if self.mapped else "row number"
        coding = f" (int{self.tbe_bits} of a TBE)" if self.tbe_bits else ""
        return f"{self.kind}, {self.dim} values of {np.dtype(self.dtype)}{coding} by {key}"


def key_fields(keys: Ids) -> list[bytes]:
    """The field names for keys: 8 bytes each, little-endian."""
    fields: list[bytes] = np.ascontiguousarray(keys, "<i8").view("V8").tolist()
    return fields


def keys_of(fields: Iterable[bytes]) -> Ids:
    """The keys of field names."""
    return np.frombuffer(b"".join(fields), "<i8")


def row_values(values: Values) -> list[bytes]:
    """The field values for rows ([n, dim]): their bytes, little-endian, without padding."""
    rows: list[bytes] = np.ascontiguousarray(values).view(f"V{values.shape[1] * values.itemsize}").ravel().tolist()
    return rows

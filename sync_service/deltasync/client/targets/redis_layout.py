"""How a model lies in Redis: the names of its keys, its fields, and what its hash `meta` says."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from deltasync.base.errors import Contradiction
from deltasync.client.targets.target import Release
from deltasync.core.delivery import HeldSpec
from deltasync.core.position import Position
from deltasync.core.rows import Ids, Values
from deltasync.core.tables import TableSpec

FORMAT = 1


_LONGEST_TEXT = 200


@dataclass(frozen=True)
class Names:
    """The names of the keys under a prefix."""

    prefix: str

    @property
    def meta(self) -> str:
        """The hash that says what the others are."""
        return f"{self.prefix}:meta"

    def rows(self, table: str) -> str:
        """The hash of a table's rows: by raw id where it has a map, else by row number."""
        return f"{self.prefix}:rows:{table}"

    def free(self, table: str) -> str:
        """The hash of the rows of a table with a map that no raw id has, by row number."""
        return f"{self.prefix}:free:{table}"


@dataclass(frozen=True)
class Meta:
    """What the hash `meta` says: strings by field.

    Attributes:
        model: the model's name.
        position: the one to go on from; an empty one while everything is written anew.
        version: what all rows are of, or newer; with its step and times as `Release` has them, None before any.
        tables: those that the store has rows of.
        writing: the version that is being written, 0 while none is: until it is there, rows are of both.
    """

    model: str
    tables: "tuple[StoredTable, ...]"
    position: Position = field(default_factory=Position)
    version: int = 0
    step: int | None = None
    step_end_unix_ns: int | None = None
    event_time_unix_ns: int | None = None
    writing: int = 0

    def begun(self, release: Release, tables: "tuple[StoredTable, ...]") -> "Meta":
        """The same while a release is written."""
        known = {table.name: table for table in (*self.tables, *tables)}
        told = self
        if release.resync:  # Another consumer's, say: if it is cut off, nothing else can go on from there.
            older = release.version < self.version
            told = replace(self.after(release, tables) if older else self, position=Position())
        return replace(told, tables=tuple(known.values()), writing=release.version)

    def after(self, release: Release, tables: "tuple[StoredTable, ...]") -> "Meta":
        """The same once a release is there."""
        return replace(
            self,
            tables=tables,
            position=release.position,
            version=release.version,
            step=release.step,
            step_end_unix_ns=release.step_end_unix_ns,
            event_time_unix_ns=release.event_time_unix_ns,
            writing=0,
        )

    def fields(self) -> dict[str, str]:
        """As they are written: what is not known is empty."""
        numbers = {name: getattr(self, name) for name in _NUMBERS}
        return {
            "format": str(FORMAT),
            "model": self.model,
            "history": self.position.history,
            "number": str(self.position.number),
            "seal": str(self.position.seal),
            "tables": json.dumps([asdict(table) for table in self.tables]),
            **{name: "" if value is None else str(value) for name, value in numbers.items()},
        }

    @classmethod
    def of_fields(cls, found: Mapping[bytes, bytes], where: str) -> "Meta | None":
        """What a hash says; None where it is empty.

        Raises:
            Contradiction: it is of another format, or is no such hash.
        """
        if not found:
            return None
        fields = {name.decode(): value.decode() for name, value in found.items()}
        if fields.get("format") != str(FORMAT):
            raise Contradiction(
                f"{where} has rows of format {fields.get('format')!r}, this version of deltasync writes and reads "
                f"{FORMAT}: update deltasync, or use another prefix"
            )
        try:
            return cls._parsed(fields)
        except (KeyError, TypeError, ValueError) as error:
            text = f"{where}: its meta cannot be read ({error!r}): delete the keys of this prefix, or use another"
            raise Contradiction(text) from error

    @classmethod
    def _parsed(cls, fields: Mapping[str, str]) -> "Meta":
        numbers: dict[str, Any] = {name: int(fields[name]) if fields[name] else None for name in _NUMBERS}
        tables = tuple(StoredTable(**table) for table in json.loads(fields["tables"]))
        position = Position(fields["history"], int(fields["number"]), int(fields["seal"]))
        return cls(fields["model"], tables, position, **numbers)


_NUMBERS = ("version", "step", "step_end_unix_ns", "event_time_unix_ns", "writing")


@dataclass(frozen=True)
class StoredTable:
    """A table of the store.

    Attributes:
        rows: how many rows the model has of it; of them, those that never were or are deleted are not there.
        dim: values of a row.
        dtype: their type, as NumPy writes it.
        tbe_bits: 8 or 4 where they are the bytes of an inference TBE: codes of so many bits, then scale and bias
            (fp16 each); else 0.
        kind: as `TableKind` has it.
        of: the table that a map or ranges belong to.
        mapped: whether rows are named by raw ids.
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
        """The same of a table of a release."""
        tbe_bits = (table.value_type.tbe_bits or 0) if isinstance(table, HeldSpec) else 0
        return cls(
            table.name, table.rows, table.dim, table.dtype.str, tbe_bits, table.kind.value, table.of, mapped
        )

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return self.dim * np.dtype(self.dtype).itemsize

    def values(self, rows: list[bytes | None]) -> Values:
        """Rows as they lie in the store, as [n, dim]; zeros for None."""
        nothing = bytes(self.row_bytes)
        joined = bytearray().join(
            nothing if row is None else row for row in rows
        )  # What is made of it is writable.
        return np.frombuffer(joined, self.dtype).reshape(len(rows), self.dim)

    def lies_as(self, other: "StoredTable") -> bool:
        """Whether rows of both are named and read alike."""
        return replace(self, rows=other.rows) == other

    def __str__(self) -> str:
        """What readers of its rows rely on."""
        named = "raw id" if self.mapped else "row number"
        coding = f" (int{self.tbe_bits} of a TBE)" if self.tbe_bits else ""
        return f"{self.kind}, {self.dim} values of {np.dtype(self.dtype)}{coding} by {named}"


def key_fields(keys: Ids) -> list[bytes]:
    """Keys as the names of fields: 8 bytes each, little-endian."""
    fields: list[bytes] = np.ascontiguousarray(keys, "<i8").view("V8").tolist()
    return fields


def keys_of(fields: Iterable[bytes]) -> Ids:
    """The keys that the names of some fields are."""
    return np.frombuffer(b"".join(fields), "<i8")


def row_values(values: Values) -> list[bytes]:
    """Rows ([n, dim]) as the values of fields: their bytes, little-endian, without padding."""
    rows: list[bytes] = np.ascontiguousarray(values).view(f"V{values.shape[1] * values.itemsize}").ravel().tolist()
    return rows

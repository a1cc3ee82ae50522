"""Definitions of tables and their shards."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from deltasync.base.arguments import check_type, is_text
from deltasync.base.errors import InvalidInput

ID_TYPE = np.dtype("<i8")
DIGEST_TYPE = np.dtype("<u8")
VALUE_TYPES: tuple[np.dtype[np.generic], ...] = (np.dtype("<f4"), np.dtype("<f2"))
# Types of the other tables, which are not looked up by id: parameters, buffers and maps.
STATE_TYPES = (*VALUE_TYPES, *(np.dtype(each) for each in ("<f8", "<i8", "<i4", "<i2", "u1", "?")))
MAX_ROWS = 2**40
MAX_DIM = 2**16
MAX_NAME = 512


class Numbered(Enum):
    """An enum whose members are declared with a name, a number and perhaps more.

    Attributes:
        value: the name for people; `kind(name)` finds the member.
        number: the number in messages, where 0 means unspecified.
    """

    _value_: str
    number: Any  # The stubs have their own type for the numbers of each enum.

    # Type checkers take `kind(name)` for a call of this method, so `number` needs a default.
    def __new__(cls, name: str, number: int = 0, *_: object) -> Self:
        """Make a member."""
        member = object.__new__(cls)
        member._value_ = name
        member.number = number
        return member

    @classmethod
    def of_number(cls, number: int) -> Self | None:
        """The member with a number, or None."""
        return next((member for member in cls if member.number == number), None)


class TableKind(Numbered):
    """The part of a model that a table holds.

    A policy ranks, quantises or delays only the rows of embedding tables. If some parameters were of another
    version than the rest, the model would be one that was never trained.
    """

    EMBEDDING = "embedding", 1
    """Rows that are looked up by id."""
    PARAMETER = "parameter", 2
    """A parameter outside embedding modules: a matrix by its rows, a vector as one row."""
    BUFFER = "buffer", 3
    """A buffer of a module, stored like a parameter."""
    ID_MAP = "id map", 4
    """Raw ids by row of the table `of`: int64 [rows, 1], see `core.tables`; 0 for free rows."""
    ID_RANGES = "id ranges", 5
    """Rows of the table `of` for unknown raw ids: int64 [rows, 3], zeros except for these rows, which hold the
    first raw id of their range, its end, and the first row of their shard."""

    @property
    def ranked(self) -> bool:
        """Whether a policy may rank, quantise or delay its rows."""
        return self is TableKind.EMBEDDING

    @property
    def complete(self) -> bool:
        """Whether a full cut has all its rows. In other tables, rows missing from a full cut are deleted."""
        return self in (TableKind.PARAMETER, TableKind.BUFFER)

    @property
    def trained(self) -> bool:
        """Whether its values are weights: finite, and with norms that measure the lag of a replica."""
        return self in (TableKind.EMBEDDING, TableKind.PARAMETER)


@dataclass(frozen=True)
class TableSpec:
    """The definition of a table: `rows` x `dim` values of `dtype`. Embedding tables have fp32 or fp16, other kinds
    also fp64, int64, int32, int16, uint8 and bool.

    Attributes:
        of: name of the embedding table to which a map or ranges belong; otherwise empty.
        sizes: shape of a parameter or buffer (see `sizes_of`); None if the trainer does not report it.
        aliases: its other names in the trainer's model if weights are tied; maps have none.
    """

    name: str
    rows: int
    dim: int
    dtype: np.dtype[np.generic] = VALUE_TYPES[0]
    kind: TableKind = TableKind.EMBEDDING
    of: str = ""
    sizes: tuple[int, ...] | None = None
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, np.dtype):
            object.__setattr__(self, "dtype", self._dtype())
        if not 1 <= len(self.name) <= MAX_NAME:
            raise InvalidInput(f"table name {self.name!r}: use 1 to {MAX_NAME} characters")
        for each in (*self.names, self.of):
            if "\0" in each or not is_text(each):
                raise InvalidInput(
                    f"table name {each!r}: it has a NUL character, or a lone surrogate, half of a character"
                )
        if not 1 <= self.rows <= MAX_ROWS:
            raise InvalidInput(f"table {self.name!r}: {self.rows} rows, expected 1 to {MAX_ROWS}")
        self._check_values()

    def _dtype(self) -> np.dtype[np.generic]:
        """The type that a caller named otherwise, such as np.float16 or "float16"."""
        try:
            if self.dtype is not None:
                return np.dtype(self.dtype)
        except TypeError:
            pass
        raise InvalidInput(
            f"table {self.name!r}: dtype {self.dtype!r}, expected a type of NumPy, such as np.float16"
        )

    def _check_values(self) -> None:
        if not 1 <= self.dim <= MAX_DIM:
            raise InvalidInput(f"table {self.name!r}: dim {self.dim}, expected 1 to {MAX_DIM}")
        types = VALUE_TYPES if self.kind.ranked else STATE_TYPES
        if self.dtype not in types:
            expected = ", ".join(map(str, types))
            raise InvalidInput(f"table {self.name!r}: values of type {self.dtype}, expected one of {expected}")
        self._check_map()
        self._check_tensor()

    def _check_tensor(self) -> None:
        if (self.sizes is not None and not self.kind.complete) or (self.aliases and self.of):
            raise InvalidInput(
                f"table {self.name!r} of kind {self.kind.value!r}: only parameters and buffers have a shape, and "
                "maps have no aliases"
            )
        if self.sizes is not None and (
            min(self.sizes[1:], default=1) < 1 or matrix_shape(self.shape or ()) != (self.rows, self.dim)
        ):
            raise InvalidInput(
                f"table {self.name!r}: {self.rows} x {self.dim} values cannot have the sizes {list(self.sizes)}"
            )
        if len(set(self.names)) < len(self.names) or not all(1 <= len(each) <= MAX_NAME for each in self.names):
            raise InvalidInput(f"table {self.name!r}: aliases must be other names, of 1 to {MAX_NAME} characters")

    def _check_map(self) -> None:
        columns = {TableKind.ID_MAP: 1, TableKind.ID_RANGES: 3}.get(self.kind)
        if (columns is None) != (not self.of):
            raise InvalidInput(
                f"table {self.name!r} of kind {self.kind.value!r} belongs to table {self.of!r}: id maps and id "
                "ranges belong to a table, other kinds do not"
            )
        if columns and (self.dim, self.dtype) != (columns, np.dtype("<i8")):
            raise InvalidInput(
                f"table {self.name!r}, of kind {self.kind.value!r}, has {self.dim} values of {self.dtype} in a "
                f"row, expected {columns} of int64"
            )

    @property
    def shape(self) -> tuple[int, ...] | None:
        """The shape of a parameter or buffer in the trainer's model, if known."""
        if not self.sizes:
            return self.sizes
        return (self.rows * self.dim // math.prod(self.sizes[1:]), *self.sizes[1:])

    @property
    def names(self) -> tuple[str, ...]:
        """All names in the trainer's model, beginning with its published name."""
        return (self.name, *self.aliases)

    @property
    def row_bytes(self) -> int:
        """Size of one row on the wire in bytes: id and values."""
        return ID_TYPE.itemsize + self.dim * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Size of all values in bytes, without ids and stamps."""
        return self.rows * self.dim * self.dtype.itemsize


class EncodedSpec(TableSpec):
    """A table whose rows are encoded in a value type: `dim` numbers of `dtype`."""

    def _check_values(self) -> None:
        """Do nothing, because the table itself was checked."""


@dataclass(frozen=True)
class Shard:
    """The block of `table` that one rank holds, given by offsets and sizes."""

    table: TableSpec
    row_offset: int
    rows: int
    col_offset: int
    cols: int

    def __post_init__(self) -> None:
        where = f"shard of table {self.table.name!r}"
        if self.row_offset < 0 or self.rows < 0 or self.row_offset + self.rows > self.table.rows:
            last = self.row_offset + self.rows
            raise InvalidInput(f"{where}: rows {self.row_offset} to {last}, the table has {self.table.rows}")
        if self.col_offset < 0 or self.cols < 1 or self.col_offset + self.cols > self.table.dim:
            last = self.col_offset + self.cols
            raise InvalidInput(f"{where}: columns {self.col_offset} to {last}, the table has {self.table.dim}")

    @classmethod
    def whole(cls, table: TableSpec) -> "Shard":
        """The shard of a rank that holds a whole table."""
        check_type("Shard.whole(table)", "table", table, TableSpec)
        return cls(table, 0, table.rows, 0, table.dim)

    @property
    def row_bytes(self) -> int:
        """Size of one row of the shard on the wire in bytes: id and values."""
        return ID_TYPE.itemsize + self.cols * self.table.dtype.itemsize


def sizes_of(shape: Sequence[int]) -> tuple[int, ...]:
    """A shape with first size 0, because the number of rows determines that size and may grow."""
    return (0, *shape[1:]) if shape else ()


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and dim of the table for a parameter or buffer: a matrix by its rows, a vector as one row, a single
    number as 1 x 1. If a row would exceed `MAX_DIM`, each number is a row."""
    rows, dim = (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))
    return (rows, dim) if dim <= MAX_DIM else (math.prod(shape), 1)


# TorchRec's mark of a free row in a sorted map. It is never a row's raw id.
FREE_ID = np.iinfo(np.int64).max


def entries_of(raw_ids: NDArray[np.int64]) -> NDArray[np.int64]:
    """Encode raw ids ([n] int64, also negative ones) for a map; `FREE_ID` becomes 0."""
    return raw_ids ^ FREE_ID


def raw_ids_of(entries: NDArray[np.int64]) -> NDArray[np.int64]:
    """Decode the entries ([n]) of a map to raw ids; 0 becomes `FREE_ID`."""
    return entries ^ FREE_ID

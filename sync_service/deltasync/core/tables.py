"""What a table and a shard of it are."""

from dataclasses import dataclass

import numpy as np

from deltasync.core.errors import InvalidInput

ID_TYPE = np.dtype("<i8")
VALUE_TYPES = (np.dtype("<f4"), np.dtype("<f2"))
MAX_ROWS = 2**40
MAX_DIM = 2**16


@dataclass(frozen=True)
class TableSpec:
    """One embedding table, whole: `rows` x `dim` values of `dtype` (fp32 or fp16)."""

    name: str
    rows: int
    dim: int
    dtype: np.dtype[np.generic] = VALUE_TYPES[0]

    def __post_init__(self) -> None:
        if not 1 <= len(self.name) <= 512:
            raise InvalidInput(f"table name {self.name!r}: use 1 to 512 characters")
        if not 1 <= self.rows <= MAX_ROWS:
            raise InvalidInput(f"table {self.name!r}: {self.rows} rows, expected 1 to {MAX_ROWS}")
        self._check_values()

    def _check_values(self) -> None:
        if not 1 <= self.dim <= MAX_DIM:
            raise InvalidInput(f"table {self.name!r}: dim {self.dim}, expected 1 to {MAX_DIM}")
        if self.dtype not in VALUE_TYPES:
            raise InvalidInput(f"table {self.name!r}: values of type {self.dtype}, expected float32 or float16")

    @property
    def row_bytes(self) -> int:
        """Bytes of one row on the wire: its id and its values."""
        return ID_TYPE.itemsize + self.dim * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all values, without ids or stamps."""
        return self.rows * self.dim * self.dtype.itemsize


class EncodedSpec(TableSpec):
    """The same of a table's rows as a value type encodes them: `dim` numbers of `dtype`, whatever these are."""

    def _check_values(self) -> None:
        """The table itself was checked."""


@dataclass(frozen=True)
class Shard:
    """The block of `table` that one rank holds: rows and columns from an offset on."""

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
        """The shard of a rank that holds all of a table."""
        return cls(table, 0, table.rows, 0, table.dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of one of its rows on the wire: its id and its values."""
        return ID_TYPE.itemsize + self.cols * self.table.dtype.itemsize

"""The types in which values travel: rows [n, D] to what is sent of them, and back."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from deltasync.base.errors import InvalidInput
from deltasync.core.digests import RowDigests, row_digests, weights
from deltasync.core.rows import BLOCK_ROWS, Ids, Mask, Values
from deltasync.core.tables import VALUE_TYPES, EncodedSpec, Numbered, TableSpec
from deltasync.kernels import half, int8, tbe
from deltasync.kernels.distances import LARGEST_DISTANCE, compare_bytes, compare_fp16, compare_fp32
from deltasync.kernels.tbe import SCALE_AND_BIAS_BYTES as SCALE_AND_BIAS_BYTES

Distances = NDArray[np.float64]

_FP32, _FP16 = VALUE_TYPES


def compare_values(rows: Values, held: Values, ids: Ids) -> tuple[Distances, Mask]:
    """How far rows `ids` ([n]) of two tables of one type ([*, D]) are from each other.

    Returns:
        The L2 norms [n] of the differences, never infinite; and which rows differ in any bit.
    """
    norms, differs = np.empty(len(ids)), np.empty(len(ids), np.bool_)
    if rows.dtype == _FP32:
        compare_fp32(rows.view(np.float32), held.view(np.float32), ids, norms, differs)
    elif rows.dtype == _FP16:
        compare_fp16(rows.view(np.uint16), held.view(np.uint16), ids, norms, differs)
    else:
        for block in blocks(len(ids)):
            norms[block] = distances(rows[ids[block]], held[ids[block]])
        differs = compare_bits(rows, held, ids)
    return norms, differs


def compare_bits(rows: Values, held: Values, ids: Ids) -> Mask:
    """Which of the rows `ids` ([n]) of two tables of one type ([*, width]) differ in any bit."""
    differs = np.empty(len(ids), np.bool_)
    compare_bytes(rows.view(np.uint8), held.view(np.uint8), ids, differs)
    return differs


def distances(rows: Values, others: Values) -> Distances:
    """The L2 norms [n] of what differs between rows [n, D] of any type; never infinite."""
    # In fp64, in which no difference of two fp32 numbers overflows, nor its square.
    with np.errstate(over="ignore"):
        deltas = np.subtract(rows, others, dtype=np.float64)
        norms: Distances = np.sqrt(np.vecdot(deltas, deltas))
    return np.minimum(norms, LARGEST_DISTANCE)


def blocks(rows: int) -> Iterator[slice]:
    """All of so many rows, in blocks of which scratch memory stays in the processor's cache."""
    return (slice(start, start + BLOCK_ROWS) for start in range(0, rows, BLOCK_ROWS))


_ONE_BITS = np.uint16(0x3C00)

Bytes = NDArray[Any]


def width(dim: int, bits: int) -> int:
    """Bytes of a row of `dim` values, which fill bytes."""
    return dim * bits // 8 + SCALE_AND_BIAS_BYTES


def of_tbe(rows: Bytes) -> Bytes:
    """Rows [n, width] that a TBE has, as they are sent: in place."""
    like_zero = np.flatnonzero(_scale_bits(rows) == _ONE_BITS)
    others = rows[like_zero, :-SCALE_AND_BIAS_BYTES].any(axis=1) | rows[like_zero, -2:].any(axis=1)
    _scale_bits(rows)[like_zero[~others]] = 0
    return rows


def to_tbe(rows: Bytes) -> Bytes:
    """Rows [n, width] that were sent, as a TBE has them: in place."""
    scale = _scale_bits(rows)
    scale[scale == 0] = _ONE_BITS
    return rows


def _scale_bits(rows: Bytes) -> NDArray[np.uint16]:
    """The scales of encoded rows, as a view [n] of their bits."""
    return rows[:, -SCALE_AND_BIAS_BYTES:-2].view("<u2")[:, 0]


_FLAT: tuple[Literal["C"], Literal["A"]] = ("C", "A")  # Contiguous and aligned.

Encoded = Values
Floats = NDArray[np.float32]


class Coding(ABC):
    """How a value type stores rows of another type.

    Attributes:
        dtype: of the numbers that are stored.
        tbe_bits: of a code in an inference TBE; None = replicas do not hold rows as they are sent.
        dim_multiple: what the dim of a table must be a multiple of.
    """

    dtype: np.dtype[np.generic]
    tbe_bits: int | None = None
    dim_multiple: int = 1

    def width(self, dim: int) -> int:
        """How many of them a row of so many values has."""
        return dim

    @abstractmethod
    def encode(self, values: Values) -> Encoded:
        """See `ValueType.encode`."""

    @abstractmethod
    def decode(self, encoded: Encoded, dtype: np.dtype[np.generic]) -> Values:
        """See `ValueType.decode`."""

    def decoded_digests(self, encoded: Encoded, dtype: np.dtype[np.generic]) -> RowDigests:
        """See `ValueType.decoded_digests`."""
        digests = np.empty(len(encoded), np.uint64)
        for block in blocks(len(encoded)):
            digests[block] = row_digests(self.decode(encoded[block], dtype))
        return digests

    def compare(self, rows: Values, held: Encoded, ids: Ids) -> tuple[Distances, Mask]:
        """See `ValueType.compare`."""
        norms, differs = np.empty(len(ids)), np.empty(len(ids), np.bool_)
        for block in blocks(len(ids)):
            some, theirs = rows[ids[block]], held[ids[block]]
            norms[block] = distances(some, self.decode(theirs, rows.dtype))
            differs[block] = compare_bits(self.encode(some), theirs, np.arange(len(some)))
        return norms, differs


class _Fp32(Coding):
    dtype = _FP32

    def encode(self, values: Values) -> Encoded:
        return _as_fp32(values)

    def decode(self, encoded: Encoded, dtype: np.dtype[np.generic]) -> Values:
        values = np.empty(encoded.shape, dtype)
        half.encode_fp16(_as_fp32(encoded), values.view(np.uint16))
        return values


class _Kernels(NamedTuple):
    encode: Callable[..., None]
    decode: Callable[..., None]
    compare: Callable[..., None]
    digest: Callable[..., None] | None = None


class _Compiled(Coding):
    """One with kernels, which know rows of fp32. Those of fp16 are widened, a block at a time.

    Args:
        dtype: of the numbers that are stored.
        bits: of each value.
        more: bytes of a row besides these.
        kernels: its kernels.
    """

    def __init__(self, dtype: str, bits: int, more: int, kernels: _Kernels) -> None:
        self.dtype = np.dtype(dtype)
        self._word = np.dtype(f"u{self.dtype.itemsize}")
        self._bits, self._more = bits, more
        self._kernels = kernels

    def width(self, dim: int) -> int:
        return (dim * self._bits // 8 + self._more) // self.dtype.itemsize

    def encode(self, values: Values) -> Encoded:
        encoded = np.empty((len(values), self.width(values.shape[1])), self.dtype)
        for block in _at_a_time(len(values), values.dtype):
            self._kernels.encode(_as_fp32(values[block]), encoded[block].view(self._word))
        return encoded

    def decode(self, encoded: Encoded, dtype: np.dtype[np.generic]) -> Values:
        values = np.empty((len(encoded), self._dim(encoded)), dtype)
        for block in _at_a_time(len(encoded), dtype):
            decoded = values[block] if dtype == _FP32 else np.empty_like(values[block], _FP32)
            self._kernels.decode(self._words(encoded[block]), decoded)
            if dtype != _FP32:
                half.encode_fp16(decoded, values[block].view(np.uint16))
        return values

    def decoded_digests(self, encoded: Encoded, dtype: np.dtype[np.generic]) -> RowDigests:
        if dtype != _FP32 or self._kernels.digest is None:
            return super().decoded_digests(encoded, dtype)
        digests = np.empty(len(encoded), np.uint64)
        self._kernels.digest(self._words(encoded), weights(0, self._dim(encoded)), digests)
        return digests

    def _dim(self, encoded: Encoded) -> int:
        row_bytes: int = encoded.shape[1] * self.dtype.itemsize
        return (row_bytes - self._more) * 8 // self._bits

    def _words(self, encoded: Encoded) -> Encoded:
        return np.require(encoded, None, _FLAT).view(self._word)

    def compare(self, rows: Values, held: Encoded, ids: Ids) -> tuple[Distances, Mask]:
        if rows.dtype != _FP32:
            return super().compare(rows, held, ids)
        norms, differs = np.empty(len(ids)), np.empty(len(ids), np.bool_)
        self._kernels.compare(rows, held.view(self._word), ids, norms, differs)
        return norms, differs


class _Tbe(_Compiled):
    def __init__(self, bits: int) -> None:
        kernels = (partial(kernel, bits) for kernel in (tbe.encode, tbe.decode, tbe.compare))
        super().__init__("u1", bits, tbe.SCALE_AND_BIAS_BYTES, _Kernels(*kernels))
        self.tbe_bits: int = bits
        self.dim_multiple = 16 // bits  # fbgemm wants rows of whole fp16 numbers.


_FP16_KERNELS = _Kernels(half.encode_fp16, half.decode_fp16, half.compare_fp16, half.digest_fp16)
_BF16_KERNELS = _Kernels(half.encode_bf16, half.decode_bf16, half.compare_bf16, half.digest_bf16)
_INT8_KERNELS = _Kernels(int8.encode, int8.decode, int8.compare, int8.digest)


class ValueType(Numbered):
    """What one value is sent as."""

    FP32 = "fp32", 1, _Fp32()
    FP16 = "fp16", 2, _Compiled("<f2", 16, 0, _FP16_KERNELS)
    BF16 = "bf16", 3, _Compiled("<u2", 16, 0, _BF16_KERNELS)
    INT8 = "int8", 4, _Compiled("u1", 8, int8.SCALE_AND_BIAS_BYTES, _INT8_KERNELS)
    INT8_TBE = "int8-tbe", 11, _Tbe(8)
    INT4_TBE = "int4-tbe", 12, _Tbe(4)

    def __init__(self, *declared: Any) -> None:
        self._coding: Coding = declared[-1]

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The type of the numbers that rows are encoded as."""
        return self._coding.dtype

    @property
    def tbe_bits(self) -> int | None:
        """Bits of a code where rows are made for an inference TBE, and held as they are sent; else None."""
        return self._coding.tbe_bits

    @property
    def dim_multiple(self) -> int:
        """What the dim of a table must be a multiple of to be sent in this type."""
        return self._coding.dim_multiple

    def check(self, table: TableSpec) -> None:
        """Check that a table's rows can be sent in this type.

        Raises:
            InvalidInput: they cannot, for their dim.
        """
        if table.dim % self.dim_multiple:
            raise InvalidInput(
                f"table {table.name!r} has dim {table.dim}, and value type {self.value} takes multiples of "
                f"{self.dim_multiple}: choose another value type, or let the consumer follow other tables"
            )

    def encode(self, values: Values) -> Encoded:
        """Rows ([n, D] fp32 or fp16, finite) as they are sent: [n, width], see `encoded_spec`."""
        return values if values.dtype == self.dtype else self._coding.encode(values)

    def decode(self, encoded: Encoded, dtype: np.dtype[np.generic]) -> Values:
        """The rows ([n, D] of `dtype`, the table's own) that encoded ones ([n, width]) stand for: the same bits
        wherever it is done.
        """
        return encoded if dtype == self.dtype else self._coding.decode(encoded, dtype)

    def decoded_digests(self, encoded: Encoded, dtype: np.dtype[np.generic]) -> RowDigests:
        """The digests [n] of the rows (of `dtype`) that encoded ones ([n, width]) stand for."""
        return row_digests(encoded) if dtype == self.dtype else self._coding.decoded_digests(encoded, dtype)

    def compare(self, rows: Values, held: Encoded, ids: Ids) -> tuple[Distances, Mask]:
        """See `Delivery.compare`: of rows [N, D], fp32 or fp16."""
        if rows.dtype == self.dtype:
            return compare_values(rows, held, ids)
        return self._coding.compare(rows, held, ids)

    def encoded_spec(self, table: TableSpec) -> EncodedSpec:
        """How a table's rows are stored in this type: [rows, width] numbers."""
        return EncodedSpec(table.name, table.rows, self._coding.width(table.dim), self.dtype)

    def row_bytes(self, table: TableSpec) -> int:
        """Bytes of one row's values in this type, without its id."""
        return self._coding.width(table.dim) * self.dtype.itemsize


def own_type(table: TableSpec) -> ValueType:
    """The type a table's values have anyway."""
    return next(each for each in ValueType if each.dtype == table.dtype)


def sent_as(table: TableSpec, wanted: ValueType) -> ValueType:
    """The type to send a table's rows in: the wanted one, or the table's own where that is no larger; but always
    the wanted one where it is made for a TBE, which takes nothing else."""
    own = own_type(table)
    return wanted if wanted.tbe_bits or wanted.row_bytes(table) < own.row_bytes(table) else own


def _as_fp32(values: Values) -> Floats:
    """Rows as kernels take them."""
    flat = np.require(values, None, _FLAT)
    if flat.dtype == _FP32:
        return flat.view(np.float32)
    wide = np.empty(flat.shape, np.float32)
    half.decode_fp16(flat.view(np.uint16), wide)
    return wide


def _at_a_time(rows: int, dtype: np.dtype[np.generic]) -> Iterable[slice]:
    """All of so many rows: at once where no scratch is needed, since a kernel may wait for threads each time."""
    return (slice(0, rows),) if dtype == _FP32 else blocks(rows)

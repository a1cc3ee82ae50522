"""The types in which values are sent: encoding rows [n, D], and decoding them."""

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
from deltasync.kernels import encodings
from deltasync.kernels.floats import LARGEST_DISTANCE, compare_bytes, compare_fp16, compare_fp32

SCALE_AND_BIAS_BYTES = encodings.SCALE_AND_BIAS_BYTES_TBE
Distances = NDArray[np.float64]

_FP32, _FP16 = VALUE_TYPES


def compare_values(rows: Values, held: Values, ids: Ids) -> tuple[Distances, Mask]:
    """L2 norms [n], never infinite, of the differences of rows `ids` of two tables; which differ in any bit."""
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
    """Whether each of the rows `ids` ([n]) differs in any bit between two tables of one type ([*, width])."""
    differs = np.empty(len(ids), np.bool_)
    compare_bytes(rows.view(np.uint8), held.view(np.uint8), ids, differs)
    return differs


def distances(rows: Values, others: Values) -> Distances:
    """The L2 norms [n] of the differences of rows [n, D] of any type; never infinite."""
    # In fp64, the difference of two fp32 numbers and its square cannot overflow.
    with np.errstate(over="ignore"):
        deltas = np.subtract(rows, others, dtype=np.float64)
        norms: Distances = np.sqrt(np.vecdot(deltas, deltas))
    return np.minimum(norms, LARGEST_DISTANCE)


def blocks(rows: int) -> Iterator[slice]:
    """Split rows into blocks whose scratch memory fits the processor's cache."""
    return (slice(start, start + BLOCK_ROWS) for start in range(0, rows, BLOCK_ROWS))


_ONE_BITS = np.uint16(0x3C00)

Bytes = NDArray[Any]


def width(dim: int, bits: int) -> int:
    """Size in bytes of a row of `dim` values that fill whole bytes."""
    return dim * bits // 8 + SCALE_AND_BIAS_BYTES


def of_tbe(rows: Bytes) -> Bytes:
    """Convert rows [n, width] from a TBE to the form in which they are sent, in place.

    A TBE has scale 1 in a row of zeros. As sent, all bytes of that row are zero, like those of a deleted row.
    """
    like_zero = np.flatnonzero(_scale_bits(rows) == _ONE_BITS)
    others = rows[like_zero, 2:].any(axis=1)
    _scale_bits(rows)[like_zero[~others]] = 0
    return rows


def to_tbe(rows: Bytes) -> Bytes:
    """Convert rows [n, width] from the form in which they are sent to that of a TBE, in place."""
    scale = _scale_bits(rows)
    scale[scale == 0] = _ONE_BITS
    return rows


def _scale_bits(rows: Bytes) -> NDArray[np.uint16]:
    """The scales of encoded rows, as a view [n] of their bits."""
    return rows[:, :2].view("<u2")[:, 0]


_FLAT: tuple[Literal["C"], Literal["A"]] = ("C", "A")  # Contiguous and aligned.

Encoded = Values
Floats = NDArray[np.float32]


class Coding(ABC):
    """The encoding of a value type.

    Attributes:
        dtype: the type of the stored numbers.
        tbe_bits: bits of a code in an inference TBE; None = replicas do not hold rows as sent.
        dim_multiple: the dim of a table must be a multiple of this.
    """

    dtype: np.dtype[np.generic]
    tbe_bits: int | None = None
    dim_multiple: int = 1

    def width(self, dim: int) -> int:
        """Number of stored numbers in a row of `dim` values."""
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
        encodings.encode_fp16(_as_fp32(encoded), values.view(np.uint16))
        return values


class _Kernels(NamedTuple):
    encode: Callable[..., None]
    decode: Callable[..., None]
    compare: Callable[..., None]
    digest: Callable[..., None] | None = None


class _Compiled(Coding):
    """An encoding with kernels for fp32 rows. Rows of fp16 are widened, a block at a time."""

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
                encodings.encode_fp16(decoded, values[block].view(np.uint16))
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
        kernels = (
            partial(kernel, bits) for kernel in (encodings.encode_tbe, encodings.decode_tbe, encodings.compare_tbe)
        )
        super().__init__("u1", bits, SCALE_AND_BIAS_BYTES, _Kernels(*kernels))
        self.tbe_bits: int = bits
        self.dim_multiple = 16 // bits  # fbgemm needs rows of whole fp16 numbers.


_FP16_KERNELS = _Kernels(
    encodings.encode_fp16, encodings.decode_fp16, encodings.compare_fp16, encodings.digest_fp16
)
_BF16_KERNELS = _Kernels(
    encodings.encode_bf16, encodings.decode_bf16, encodings.compare_bf16, encodings.digest_bf16
)
_INT8_KERNELS = _Kernels(
    encodings.encode_int8, encodings.decode_int8, encodings.compare_int8, encodings.digest_int8
)


class ValueType(Numbered):
    """The type in which values are sent."""

    FP32 = "fp32", 1, _Fp32()
    FP16 = "fp16", 2, _Compiled("<f2", 16, 0, _FP16_KERNELS)
    BF16 = "bf16", 3, _Compiled("<u2", 16, 0, _BF16_KERNELS)
    INT8 = "int8", 4, _Compiled("u1", 8, encodings.SCALE_AND_BIAS_BYTES_INT8, _INT8_KERNELS)
    INT8_TBE = "int8-tbe", 11, _Tbe(8)
    INT4_TBE = "int4-tbe", 12, _Tbe(4)

    def __init__(self, *declared: Any) -> None:
        self._coding: Coding = declared[-1]

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """The type of the numbers in encoded rows."""
        return self._coding.dtype

    @property
    def tbe_bits(self) -> int | None:
        """Bits of a code if rows are for an inference TBE and held as sent; otherwise None."""
        return self._coding.tbe_bits

    @property
    def dim_multiple(self) -> int:
        """To be sent in this type, a table must have a dim that is a multiple of this."""
        return self._coding.dim_multiple

    def check(self, table: TableSpec) -> None:
        """Check that a table's rows can be sent in this type."""
        if table.dim % self.dim_multiple:
            raise InvalidInput(
                f"table {table.name!r} has dim {table.dim}, value type {self.value} needs a multiple of "
                f"{self.dim_multiple}: choose another value type, or let the consumer follow other tables"
            )

    def encode(self, values: Values) -> Encoded:
        """Encode rows ([n, D] fp32 or fp16, finite) for sending: [n, width], see `encoded_spec`."""
        return values if values.dtype == self.dtype else self._coding.encode(values)

    def decode(self, encoded: Encoded, dtype: np.dtype[np.generic]) -> Values:
        """Decode rows ([n, width]) to values ([n, D]) of the table's own `dtype`, with the same bits on every
        machine.
        """
        return encoded if dtype == self.dtype else self._coding.decode(encoded, dtype)

    def decoded_digests(self, encoded: Encoded, dtype: np.dtype[np.generic]) -> RowDigests:
        """The digests [n] of decoded rows (of `dtype`), from encoded ones ([n, width])."""
        return row_digests(encoded) if dtype == self.dtype else self._coding.decoded_digests(encoded, dtype)

    def compare(self, rows: Values, held: Encoded, ids: Ids) -> tuple[Distances, Mask]:
        """Compare rows [N, D], fp32 or fp16; see `TableForm.compare`."""
        if rows.dtype == self.dtype:
            return compare_values(rows, held, ids)
        return self._coding.compare(rows, held, ids)

    def encoded_spec(self, table: TableSpec) -> EncodedSpec:
        """The shape and type of a table's rows in this type: [rows, width] numbers."""
        return EncodedSpec(table.name, table.rows, self._coding.width(table.dim), self.dtype)

    def row_bytes(self, table: TableSpec) -> int:
        """Size of one row's values in this type in bytes, without its id."""
        return self._coding.width(table.dim) * self.dtype.itemsize


def own_type(table: TableSpec) -> ValueType:
    """The type of a table's values without a policy."""
    return next(each for each in ValueType if each.dtype == table.dtype)


def sent_as(table: TableSpec, wanted: ValueType) -> ValueType:
    """The type in which to send a table's rows: `wanted`, or the table's own if that is no larger. A type for a
    TBE is always used, because a TBE accepts nothing else."""
    own = own_type(table)
    return wanted if wanted.tbe_bits or wanted.row_bytes(table) < own.row_bytes(table) else own


def _as_fp32(values: Values) -> Floats:
    """Rows in the form for kernels."""
    flat = np.require(values, None, _FLAT)
    if flat.dtype == _FP32:
        return flat.view(np.float32)
    wide = np.empty(flat.shape, np.float32)
    encodings.decode_fp16(flat.view(np.uint16), wide)
    return wide


def _at_a_time(rows: int, dtype: np.dtype[np.generic]) -> Iterable[slice]:
    """Split rows into blocks; a single one if no scratch is needed, since each kernel call has a cost."""
    return (slice(0, rows),) if dtype == _FP32 else blocks(rows)

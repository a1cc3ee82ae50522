"""The types in which values travel: rows [n, D] to what is sent of them, and back. NumPy only.

    fp32, fp16, bf16    one number per value; what is out of range becomes the largest number there is
    int8                one byte per value, and a scale and a bias per row, see `int8.py`
    int8-tbe, int4-tbe  as TorchRec quantises rows for an inference TBE, see `tbe.py`; replicas hold them as sent

One more type is a coding, and a member of `ValueType`, here, and its number in `tables.proto`.
"""

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.core.errors import InvalidInput
from deltasync.core.int8 import SCALE_AND_BIAS_BYTES, decode_int8, encode_int8, scale_and_bias
from deltasync.core.numbered import Numbered
from deltasync.core.rows import Values
from deltasync.core.tables import VALUE_TYPES, EncodedSpec, TableSpec
from deltasync.core.tbe import decode_tbe, encode_tbe, largest_errors, width

_FP32, _FP16 = VALUE_TYPES
# Relative rounding of the types that tables have.
_EPS = {_FP32: 2.0**-23, _FP16: 2.0**-10}
_LARGEST_FP16 = np.float32(np.finfo(np.float16).max)
_LARGEST_BF16_BITS = np.uint32(0x7F7F0000)

Encoded = Values
Distances = NDArray[np.float64]


class Coding(ABC):
    """How a value type stores rows.

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

    @abstractmethod
    def largest_distances(self, encoded: Encoded, decoded: Values) -> Distances:
        """See `ValueType.largest_distances`."""


class _Fp32(Coding):
    dtype = _FP32

    def encode(self, values: Values) -> Encoded:
        return values.astype(_FP32, copy=False)

    def decode(self, encoded: Encoded, dtype: np.dtype[np.generic]) -> Values:
        return encoded.astype(dtype, copy=False)

    def largest_distances(self, encoded: Encoded, decoded: Values) -> Distances:
        return np.zeros(len(decoded))


class _Fp16(Coding):
    dtype = _FP16

    def encode(self, values: Values) -> Encoded:
        if values.dtype == _FP16:
            return values
        return np.clip(values, -_LARGEST_FP16, _LARGEST_FP16).astype(_FP16)

    def decode(self, encoded: Encoded, dtype: np.dtype[np.generic]) -> Values:
        if dtype == _FP16:
            return encoded
        # Six times as fast as NumPy's conversion, for finite numbers: the bits are moved to where fp32 has
        # them; the exponents' biases differ by 112.
        bits = np.ascontiguousarray(encoded).view(np.int16).astype(np.int32)
        bits <<= np.int32(13)
        bits &= np.int32(~0x70000000)
        values = bits.view(np.float32)
        values *= np.float32(2.0**112)
        return values

    def largest_distances(self, encoded: Encoded, decoded: Values) -> Distances:
        if decoded.dtype == _FP16:
            return np.zeros(len(decoded))
        norms, denormals = _norms(decoded), math.sqrt(decoded.shape[1]) * 2.0**-24
        # Among numbers below 65504 none was out of range.
        return np.where(norms < _LARGEST_FP16, norms * (1.01 * 2.0**-11) + denormals, np.inf)


class _Bf16(Coding):
    dtype = np.dtype("<u2")

    def encode(self, values: Values) -> Encoded:
        # Rounded to nearest, ties to even.
        bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
        magnitude, sign = bits & np.uint32(0x7FFFFFFF), bits & np.uint32(0x80000000)
        magnitude += np.uint32(0x7FFF) + ((magnitude >> np.uint32(16)) & np.uint32(1))
        np.minimum(magnitude, _LARGEST_BF16_BITS, out=magnitude)
        return ((sign | magnitude) >> np.uint32(16)).astype(np.uint16)

    def decode(self, encoded: Encoded, dtype: np.dtype[np.generic]) -> Values:
        return (encoded.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(dtype, copy=False)

    def largest_distances(self, encoded: Encoded, decoded: Values) -> Distances:
        return _norms(decoded) * (1.01 * 2.0**-8) + 1e-18


class _Int8(Coding):
    dtype = np.dtype("u1")

    def width(self, dim: int) -> int:
        return dim + SCALE_AND_BIAS_BYTES

    def encode(self, values: Values) -> Encoded:
        return encode_int8(values.astype(np.float32, copy=False))

    def decode(self, encoded: Encoded, dtype: np.dtype[np.generic]) -> Values:
        return decode_int8(encoded).astype(dtype, copy=False)

    def largest_distances(self, encoded: Encoded, decoded: Values) -> Distances:
        scale, bias = scale_and_bias(encoded)
        # Half a step, the epsilon added to a row's range, and rounding to the table's type.
        rounding = 2 * _EPS[decoded.dtype]
        each: Distances = 0.501 * scale + 1e-7 + rounding * (np.abs(bias) + 255 * scale)
        return math.sqrt(decoded.shape[1]) * each


class _Tbe(Coding):
    dtype = np.dtype("u1")

    def __init__(self, bits: int) -> None:
        self.tbe_bits: int = bits
        self.dim_multiple = 16 // bits  # fbgemm wants rows of whole fp16 numbers.

    def width(self, dim: int) -> int:
        return width(dim, self.tbe_bits)

    def encode(self, values: Values) -> Encoded:
        return encode_tbe(values.astype(np.float32, copy=False), self.tbe_bits)

    def decode(self, encoded: Encoded, dtype: np.dtype[np.generic]) -> Values:
        values = decode_tbe(encoded, self.tbe_bits)
        return _Fp16().encode(values) if dtype == _FP16 else values

    def largest_distances(self, encoded: Encoded, decoded: Values) -> Distances:
        rounding = _EPS[decoded.dtype] * _norms(decoded)
        return math.sqrt(decoded.shape[1]) * largest_errors(encoded, self.tbe_bits) + rounding


class ValueType(Numbered):
    """What one value is sent as."""

    FP32 = "fp32", 1, _Fp32()
    FP16 = "fp16", 2, _Fp16()
    BF16 = "bf16", 3, _Bf16()
    INT8 = "int8", 4, _Int8()
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
        return self._coding.encode(values)

    def decode(self, encoded: Encoded, dtype: np.dtype[np.generic]) -> Values:
        """The rows ([n, D] of `dtype`, the table's own) that encoded ones ([n, width]) stand for: the same bits
        wherever it is done.
        """
        return self._coding.decode(encoded, dtype)

    def largest_distances(self, encoded: Encoded, decoded: Values) -> Distances:
        """An upper bound of how far (L2) each row lies from what it is encoded as: [n] float64, from the encoded
        rows and what they decode to. Infinite where there is no bound.
        """
        return self._coding.largest_distances(encoded, decoded)

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


def _norms(decoded: Values) -> Distances:
    """The L2 norms [n] of rows [n, D], as fp32 has them."""
    exact = decoded.astype(np.float32, copy=False)
    with np.errstate(over="ignore"):
        norms: Distances = np.sqrt(np.einsum("ij,ij->i", exact, exact)).astype(np.float64)
    return norms

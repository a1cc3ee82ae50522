"""The types in which values travel: rows [n, D] to what is sent of them, and back. NumPy only.

    fp32, fp16, bf16    one number per value; what is out of range becomes the largest number there is
    int8                row-wise: D codes (uint8), then scale and bias of the row (fp32, little-endian)

The codes of int8 are those of fbgemm's fused 8-bit row-wise operator:
`scale = (max - min) / 255`, `bias = min`, `code = rint((value - bias) * (255 / (max - min + 1e-8)))`, in fp32.
"""

import math
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from deltasync.core.rows import Values
from deltasync.core.tables import SCALE_AND_BIAS_BYTES, VALUE_TYPES, TableSpec

_LARGEST_FP16 = np.float32(np.finfo(np.float16).max)
_LARGEST_BF16_BITS = np.uint32(0x7F7F0000)
_EPSILON = np.float32(1e-8)
# Relative rounding of the types that tables have.
_EPS = {VALUE_TYPES[0]: 2.0**-23, VALUE_TYPES[1]: 2.0**-10}
_LARGEST_FP32 = float(np.finfo(np.float32).max)

Encoded = Values


class ValueType(Enum):
    """What one value is sent as."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"
    INT8 = "int8"


_STORED: dict[ValueType, np.dtype[np.generic]] = {
    ValueType.FP32: VALUE_TYPES[0],
    ValueType.FP16: VALUE_TYPES[1],
    ValueType.BF16: np.dtype("<u2"),
    ValueType.INT8: np.dtype("u1"),
}


def own_type(table: TableSpec) -> ValueType:
    """The type a table's values have anyway."""
    return ValueType.FP32 if table.dtype == VALUE_TYPES[0] else ValueType.FP16


def sent_as(table: TableSpec, wanted: ValueType) -> ValueType:
    """The type to send a table's rows in: the wanted one, or the table's own where that is no larger."""
    return wanted if row_bytes(table, wanted) < row_bytes(table, own_type(table)) else own_type(table)


def encoded_table(table: TableSpec, value_type: ValueType) -> TableSpec:
    """How a table's rows are stored in a type: [rows, width] numbers."""
    extra = SCALE_AND_BIAS_BYTES if value_type is ValueType.INT8 else 0
    return TableSpec(table.name, table.rows, table.dim + extra, _STORED[value_type])


def row_bytes(table: TableSpec, value_type: ValueType) -> int:
    """Bytes of one row's values in a type, without its id."""
    encoded = encoded_table(table, value_type)
    return encoded.dim * encoded.dtype.itemsize


def encode(values: Values, value_type: ValueType) -> Encoded:
    """Rows ([n, D] fp32 or fp16, finite) in a type: [n, width], see `encoded_table`."""
    if value_type is ValueType.INT8:
        return _to_int8(values.astype(np.float32, copy=False))
    if value_type is ValueType.BF16:
        return _to_bf16(values.astype(np.float32, copy=False))
    if value_type is ValueType.FP16 and values.dtype != VALUE_TYPES[1]:
        return np.clip(values, -_LARGEST_FP16, _LARGEST_FP16).astype(VALUE_TYPES[1])
    return values.astype(_STORED[value_type], copy=False)


def decode(encoded: Encoded, value_type: ValueType, dtype: np.dtype[np.generic]) -> Values:
    """The rows ([n, D] of `dtype`, the table's own) that encoded ones ([n, width]) stand for: the same bits
    wherever it is done.
    """
    if value_type is ValueType.INT8:
        return _from_int8(encoded).astype(dtype, copy=False)
    if value_type is ValueType.BF16:
        return (encoded.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(dtype, copy=False)
    if value_type is ValueType.FP16 and dtype == VALUE_TYPES[0]:
        return _from_fp16(encoded)
    return encoded.astype(dtype, copy=False)


def largest_distances(encoded: Encoded, decoded: Values, value_type: ValueType) -> NDArray[np.float64]:
    """An upper bound of how far (L2) each row lies from what it is encoded as: [n] float64, from the encoded rows
    and what they decode to. Infinite where there is no bound.
    """
    root = math.sqrt(decoded.shape[1])
    if value_type is ValueType.INT8:
        scale, bias = np.ascontiguousarray(encoded[:, -8:]).view("<f4").astype(np.float64).T
        # Half a step, the epsilon added to a row's range, and rounding to the table's type.
        each: NDArray[np.float64] = 0.501 * scale + 1e-7 + 2 * _EPS[decoded.dtype] * (np.abs(bias) + 255 * scale)
        return root * each
    if encoded.dtype == decoded.dtype:
        return np.zeros(len(encoded))
    exact = decoded.astype(np.float32, copy=False)
    with np.errstate(over="ignore"):
        norms: NDArray[np.float64] = np.sqrt(np.einsum("ij,ij->i", exact, exact)).astype(np.float64)
    if value_type is ValueType.BF16:
        return norms * (1.01 * 2.0**-8) + 1e-18
    # Among numbers below 65504 none was out of range.
    return np.where(norms < _LARGEST_FP16, norms * (1.01 * 2.0**-11) + root * 2.0**-24, np.inf)


def _to_bf16(values: NDArray[np.float32]) -> Encoded:
    """Rounded to nearest, ties to even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    magnitude, sign = bits & np.uint32(0x7FFFFFFF), bits & np.uint32(0x80000000)
    magnitude += np.uint32(0x7FFF) + ((magnitude >> np.uint32(16)) & np.uint32(1))
    np.minimum(magnitude, _LARGEST_BF16_BITS, out=magnitude)
    return ((sign | magnitude) >> np.uint32(16)).astype(np.uint16)


def _to_int8(values: NDArray[np.float32]) -> Encoded:
    columns = np.ascontiguousarray(values.T)  # NumPy reduces over the first axis five times as fast.
    low, high = columns.min(axis=0)[:, None], columns.max(axis=0)[:, None]
    with np.errstate(over="ignore"):
        reach = high - low
    encoded = np.empty((len(values), values.shape[1] + SCALE_AND_BIAS_BYTES), np.uint8)
    wide = np.isinf(reach[:, 0])
    if wide.any():
        encoded[wide], encoded[~wide] = _to_int8_wide(values[wide]), _to_int8(values[~wide])
        return encoded
    codes = values - low
    codes *= np.float32(255) / (reach + _EPSILON)
    np.rint(codes, out=codes)
    encoded[:, : values.shape[1]] = codes
    _append(encoded, reach / np.float32(255), low)
    return encoded


def _to_int8_wide(values: NDArray[np.float32]) -> Encoded:
    """The same for rows whose range does not fit fp32, which fbgemm makes an infinite scale of."""
    encoded = np.empty((len(values), values.shape[1] + SCALE_AND_BIAS_BYTES), np.uint8)
    exact = values.astype(np.float64)
    low = exact.min(axis=1, keepdims=True)
    scale = ((exact.max(axis=1, keepdims=True) - low) / 255).astype(np.float32)
    encoded[:, : values.shape[1]] = np.clip(np.rint((exact - low) / scale), 0, 255)
    _append(encoded, scale, low.astype(np.float32))
    return encoded


def _from_fp16(encoded: Encoded) -> NDArray[np.float32]:
    """Finite numbers only; six times as fast as NumPy's conversion. The bits are moved to where fp32 has them; the
    exponents' biases differ by 112.
    """
    bits = np.ascontiguousarray(encoded).view(np.int16).astype(np.int32)
    bits <<= np.int32(13)
    bits &= np.int32(~0x70000000)
    values = bits.view(np.float32)
    values *= np.float32(2.0**112)
    return values


def _append(encoded: Encoded, scale: NDArray[np.float32], bias: NDArray[np.float32]) -> None:
    encoded[:, -8:-4] = np.ascontiguousarray(scale).view(np.uint8)
    # Zero has no sign here: which of several zeros is the smallest depends on the processor.
    encoded[:, -4:] = np.ascontiguousarray(bias + np.float32(0)).view(np.uint8)


def _from_int8(encoded: Encoded) -> NDArray[np.float32]:
    """`code * scale + bias` in fp64, then rounded: what fbgemm's fused multiply-add gives, except in the last bit
    of rows whose bias is about a million times smaller than their scale.
    """
    scale_and_bias = np.ascontiguousarray(encoded[:, -8:]).view("<f4").astype(np.float64)
    exact = encoded[:, :-8].astype(np.float64)
    exact *= scale_and_bias[:, :1]
    exact += scale_and_bias[:, 1:]
    if np.any(scale_and_bias[:, 0] * 255 + np.abs(scale_and_bias[:, 1]) >= _LARGEST_FP32):
        np.clip(exact, -_LARGEST_FP32, _LARGEST_FP32, out=exact)
    return exact.astype(np.float32)

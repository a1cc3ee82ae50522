"""Rows as TorchRec quantises them for an inference TBE: D codes of 8 or 4 bits, then scale and bias of the row
(fp16, little-endian). NumPy only.

The bytes are those of fbgemm's `FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf`: with 2^bits - 1 steps,
`bias = fp16(min)`, `scale = fp16((max - bias) / steps)`, 1 where that is 0, and
`code = rint((value - bias) * (1 / scale))` within 0 and steps, in fp32; of two codes in a byte, the first has its
lower half. They differ in two things:

- A row that would be codes 0, scale 1 and bias 0, as a row of zeros is, is zero bytes only, like a row that never
  was. fbgemm gives no scale of 0: whoever writes into a TBE can tell, see `of_tbe` and `to_tbe`.
- Numbers beyond fp16 become the largest there is, where fbgemm serves infinity or NaN.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

SCALE_AND_BIAS_BYTES = 4
_ONE_BITS = np.uint16(0x3C00)
_LARGEST_FP16 = np.float32(np.finfo(np.float16).max)
_ONE = np.float32(1)
# fbgemm looks for a minimum in so many columns at a time.
_LANES = 8

Bytes = NDArray[Any]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


def width(dim: int, bits: int) -> int:
    """Bytes of a row of `dim` values, which fill bytes."""
    return dim * bits // 8 + SCALE_AND_BIAS_BYTES


def encode_tbe(values: Floats, bits: int) -> Bytes:
    """Rows [n, D], finite, as codes, scale and bias: [n, width]; 8 bits, or 4 where D is even."""
    steps = np.float32(2**bits - 1)
    columns = np.ascontiguousarray(values.T)  # NumPy reduces over the first axis five times as fast.
    bias, highest = _fp16(_lowest(values, columns))[:, None], columns.max(axis=0)[:, None]
    with np.errstate(over="ignore"):
        scale = _fp16((highest - bias) / steps)
        scale[scale == 0] = _ONE
        codes = values - bias
    codes *= _ONE / scale
    np.rint(codes, out=codes)
    encoded = np.empty((len(values), width(values.shape[1], bits)), np.uint8)
    encoded[:, :-SCALE_AND_BIAS_BYTES] = _packed(np.clip(codes, 0, steps, out=codes).astype(np.uint8), bits)
    encoded[:, -4:-2] = scale.astype("<f2").view(np.uint8)
    encoded[:, -2:] = bias.astype("<f2").view(np.uint8)
    return of_tbe(encoded)


def decode_tbe(encoded: Bytes, bits: int) -> Floats:
    """`code * scale + bias` in fp32: what a TBE looks up, but for the last bit where it multiplies and adds at
    once."""
    codes, (scale, bias) = encoded[:, :-SCALE_AND_BIAS_BYTES], scale_and_bias(encoded)
    values = (codes if bits == 8 else _unpacked(codes)).astype(np.float32)
    values *= scale[:, None].astype(np.float32)
    values += bias[:, None].astype(np.float32)
    return values


def largest_errors(encoded: Bytes, bits: int) -> Doubles:
    """An upper bound of how far each value of a row may be from what it is encoded as: [n]."""
    scale, bias = scale_and_bias(encoded)
    bias = np.abs(bias)
    # Half a step; what rounding the minimum and the scale to fp16 leaves outside of the codes; rounding in fp32.
    steps = 2**bits - 1
    errors = scale * (0.5 + steps * 2.0**-11) + bias * 2.0**-11 + 1e-5
    errors += 2.0**-22 * (bias + steps * scale)
    return np.where((bias < _LARGEST_FP16) & (scale < _LARGEST_FP16), errors, np.inf)


def scale_and_bias(encoded: Bytes) -> tuple[Doubles, Doubles]:
    """Scale and bias of encoded rows, each [n]."""
    scale, bias = np.ascontiguousarray(encoded[:, -SCALE_AND_BIAS_BYTES:]).view("<f2").astype(np.float64).T
    return scale, bias


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


def _fp16(values: Floats) -> Floats:
    """Values rounded to fp16."""
    return np.clip(values, -_LARGEST_FP16, _LARGEST_FP16).astype(np.float16).astype(np.float32)


def _lowest(values: Floats, columns: Floats) -> Floats:
    """The minimum of each row: of zeros with both signs the one that fbgemm finds."""
    lowest: Floats = columns.min(axis=0)
    zero = np.flatnonzero(lowest == 0)
    signed = zero[np.signbit(values[zero]).any(axis=1)]
    lowest[signed] = _lowest_by_lanes(values[signed])
    return lowest


def _lowest_by_lanes(values: Floats) -> Floats:
    """The minimum as fbgemm looks for it: by lanes, in which of equal numbers the last one wins, and then among
    these and the columns that fill no lanes, where the first one does."""
    whole = values.shape[1] // _LANES * _LANES
    lanes = np.full((len(values), _LANES), np.inf, np.float32)
    for first in range(0, whole, _LANES):
        some = values[:, first : first + _LANES]
        lanes = np.where(lanes < some, lanes, some)
    lowest = np.full(len(values), np.inf, np.float32)
    for column in np.concatenate([lanes, values[:, whole:]], axis=1).T:
        lowest = np.where(column < lowest, column, lowest)
    return lowest


def _packed(codes: Bytes, bits: int) -> Bytes:
    """Codes [n, D] as bytes [n, D * bits / 8]."""
    return codes if bits == 8 else codes[:, ::2] | (codes[:, 1::2] << 4)


def _unpacked(packed: Bytes) -> Bytes:
    """Codes of 4 bits [n, D], of bytes [n, D / 2]."""
    return np.stack([packed & 0xF, packed >> 4], axis=2).reshape(len(packed), 2 * packed.shape[1])

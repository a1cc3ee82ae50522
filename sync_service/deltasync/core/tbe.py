"""Rows as TorchRec quantises them for an inference TBE: D codes of 8 or 4 bits, then scale and bias of the row
(fp16, little-endian).

The bytes are those of fbgemm's `FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf`: with 2^bits - 1 steps,
`bias = fp16(min)`, `scale = fp16((max - bias) / steps)`, 1 where that is 0, and
`code = rint((value - bias) * (1 / scale))` within 0 and steps, in fp32; of two codes in a byte, the first has its
lower half. They differ in two things:

- A row that would be codes 0, scale 1 and bias 0, as a row of zeros is, is zero bytes only, like a row that never
  was. fbgemm gives no scale of 0: whoever writes into a TBE can tell, see `of_tbe` and `to_tbe`.
- Numbers beyond fp16 become the largest there is, where fbgemm serves infinity or NaN.

A value comes back as `code * scale + bias`, in fp32: what a TBE looks up, but for the last bit where it multiplies
and adds at once.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.kernels.tbe import SCALE_AND_BIAS_BYTES as SCALE_AND_BIAS_BYTES

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

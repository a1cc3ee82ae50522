"""Rows as one byte per value: D codes, then scale and bias of the row (fp32, little-endian). NumPy only.

The codes are those of fbgemm's fused 8-bit row-wise operator:
`scale = (max - min) / 255`, `bias = min`, `code = rint((value - bias) * (255 / (max - min + 1e-8)))`, in fp32.
"""

from typing import Any

import numpy as np
from numpy.typing import NDArray

SCALE_AND_BIAS_BYTES = 8
_EPSILON = np.float32(1e-8)
_LARGEST_FP32 = float(np.finfo(np.float32).max)

Bytes = NDArray[Any]
Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]


def encode_int8(values: Floats) -> Bytes:
    """Rows [n, D], finite, as codes, scale and bias: [n, D + 8]."""
    columns = np.ascontiguousarray(values.T)  # NumPy reduces over the first axis five times as fast.
    low, high = columns.min(axis=0)[:, None], columns.max(axis=0)[:, None]
    with np.errstate(over="ignore"):
        reach = high - low
    encoded = np.empty((len(values), values.shape[1] + SCALE_AND_BIAS_BYTES), np.uint8)
    wide = np.isinf(reach[:, 0])
    if wide.any():
        encoded[wide], encoded[~wide] = _encode_wide(values[wide]), encode_int8(values[~wide])
        return encoded
    codes = values - low
    codes *= np.float32(255) / (reach + _EPSILON)
    np.rint(codes, out=codes)
    encoded[:, : values.shape[1]] = codes
    _append(encoded, reach / np.float32(255), low)
    return encoded


def _encode_wide(values: Floats) -> Bytes:
    """The same for rows whose range does not fit fp32, which fbgemm makes an infinite scale of."""
    encoded = np.empty((len(values), values.shape[1] + SCALE_AND_BIAS_BYTES), np.uint8)
    exact = values.astype(np.float64)
    low = exact.min(axis=1, keepdims=True)
    scale = ((exact.max(axis=1, keepdims=True) - low) / 255).astype(np.float32)
    encoded[:, : values.shape[1]] = np.clip(np.rint((exact - low) / scale), 0, 255)
    _append(encoded, scale, low.astype(np.float32))
    return encoded


def _append(encoded: Bytes, scale: Floats, bias: Floats) -> None:
    encoded[:, -8:-4] = np.ascontiguousarray(scale).view(np.uint8)
    # Zero has no sign here: which of several zeros is the smallest depends on the processor.
    encoded[:, -4:] = np.ascontiguousarray(bias + np.float32(0)).view(np.uint8)


def decode_int8(encoded: Bytes) -> Floats:
    """`code * scale + bias` in fp64, then rounded: what fbgemm's fused multiply-add gives, except in the last bit
    of rows whose bias is about a million times smaller than their scale.
    """
    scale, bias = scale_and_bias(encoded)
    exact = encoded[:, :-8].astype(np.float64)
    exact *= scale[:, None]
    exact += bias[:, None]
    if np.any(scale * 255 + np.abs(bias) >= _LARGEST_FP32):
        np.clip(exact, -_LARGEST_FP32, _LARGEST_FP32, out=exact)
    return exact.astype(np.float32)


def scale_and_bias(encoded: Bytes) -> tuple[Doubles, Doubles]:
    """Scale and bias of encoded rows, each [n]."""
    scale, bias = np.ascontiguousarray(encoded[:, -SCALE_AND_BIAS_BYTES:]).view("<f4").astype(np.float64).T
    return scale, bias

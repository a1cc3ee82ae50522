"""Rows as a policy sends them, in a few lines of NumPy: what encoding costs where nobody has taken pains."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from deltasync.client import Mode, Policy, ValueType

Floats = NDArray[np.float32]
Array = NDArray[Any]


def encode(rows: Floats, policy: Policy) -> Array:
    """Rows [n, D] in the type of a policy; where it sends no rows, they are as they were."""
    if policy.mode is Mode.IDS:
        return rows
    match policy.value_type:
        case ValueType.FP16:
            return rows.astype(np.float16)
        case ValueType.BF16:
            return ((rows.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
        case ValueType.INT8 | ValueType.INT8_TBE:
            return _codes(rows, 255)
        case ValueType.INT4_TBE:
            codes = _codes(rows, 15)
            halves: Array = np.bitwise_or(codes[:, ::2], codes[:, 1::2] << np.uint8(4))
            return halves
        case _:
            return rows


def _codes(rows: Floats, steps: int) -> Array:
    low, high = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
    codes: Array = np.rint((rows - low) * (np.float32(steps) / (high - low))).astype(np.uint8)
    return codes

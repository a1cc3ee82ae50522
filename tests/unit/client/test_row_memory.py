"""Rows of arrays of any layout, and of tensors on a CPU and as on any other device, by their ids."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from deltasync.base.errors import Contradiction
from deltasync.client.targets.numpy_target import rows_at, staged_rows
from deltasync.client.targets.torch_tensors import TensorRows
from deltasync.core.digests import row_digests
from deltasync.core.rows import BLOCK_ROWS, Ids, Values

ROWS, DIM = 7, 5
DTYPES = ["<f4", "<f2", "<f8", "<i8", "u1", "?"]
LAYOUTS: dict[str, Callable[[Values], Values]] = {
    "row by row": np.ascontiguousarray,
    "padded": lambda rows: np.pad(rows, ((0, 0), (0, 3)))[:, : rows.shape[1]],
    "column by column": np.asfortranarray,
    "every other row": lambda rows: np.repeat(rows, 2, axis=0)[::2],
    "every other column": lambda rows: np.repeat(rows, 2, axis=1)[:, ::2],
    "backwards": lambda rows: np.ascontiguousarray(rows[::-1])[::-1],
}


def random_rows(rows: int, dtype: str, seed: int = 0) -> Values:
    bits = np.random.default_rng(seed).integers(
        0, 2 if dtype == "?" else 256, (rows, DIM * np.dtype(dtype).itemsize)
    )
    found: Values = bits.astype(np.uint8).view(dtype)
    return found


def unaligned(values: Values) -> Values:
    """As in the middle of a message: read-only, and from an odd address on."""
    raw = b"x" + values.tobytes()
    return np.frombuffer(raw, values.dtype, offset=1).reshape(values.shape)


GIVEN: dict[str, Callable[[Values], Values]] = {
    "row by row": np.ascontiguousarray,
    "of a message": unaligned,
    "backwards": lambda values: np.ascontiguousarray(values[::-1])[::-1],
}


def memory(rows: Values) -> bytes:
    """All that the memory holds of which these rows are a part."""
    base: Any = rows
    while base.base is not None:
        base = base.base
    return bytes(base.tobytes())


def some_ids(data: st.DataObject) -> Ids:
    return np.array(data.draw(st.lists(st.integers(0, ROWS - 1), unique=True).map(sorted)), np.int64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
@given(st.data(), st.sampled_from(sorted(GIVEN)), st.integers(0, 9), st.booleans())
def test_rows_are_written_and_read_bit_by_bit(
    layout: str, dtype: str, data: st.DataObject, given_as: str, seed: int, digested: bool
) -> None:
    held, expected = (LAYOUTS[layout](random_rows(ROWS, dtype, seed)) for _ in range(2))
    ids = some_ids(data)
    values = GIVEN[given_as](random_rows(len(ids), dtype, seed + 1))
    write = staged_rows(held, ids, values, digested=digested)
    assert memory(held) == memory(expected), "nothing is written before"
    digests = write()
    expected[ids] = values
    assert memory(held) == memory(expected)
    found = None if digests is None else digests.tolist()
    assert found == (row_digests(expected[ids]).tolist() if digested else None)
    assert rows_at(held, ids).tobytes() == expected[ids].tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_deleted_rows_become_zeros(layout: str, dtype: str) -> None:
    held, expected = (LAYOUTS[layout](random_rows(BLOCK_ROWS + 9, dtype)) for _ in range(2))
    ids = np.delete(np.arange(len(held)), [2, BLOCK_ROWS])
    digests = staged_rows(held, ids, np.broadcast_to(np.zeros((), dtype), (len(ids), DIM)), digested=True)()
    expected[ids] = 0
    assert memory(held) == memory(expected)
    assert digests is not None
    assert not digests.any()


def test_rows_past_the_end_are_zeros() -> None:
    held = random_rows(ROWS, "<f4")
    found = rows_at(held, np.array([0, ROWS - 1, ROWS, 2**40]))
    assert found[:2].tobytes() == held[[0, -1]].tobytes()
    assert not found[2:].any()


@pytest.mark.parametrize(
    ("ids", "values"),
    [
        *((ids, random_rows(len(ids), "<f4")) for ids in ([-1], [ROWS], [0, 2**40], [-(2**40), 0])),
        *(([1], values) for values in (np.zeros((1, 6), "<f4"), np.zeros((1, 5), "<f8"), np.zeros((1, 1), "<f4"))),
    ],
)
def test_rows_out_of_range_or_of_another_width_are_refused(ids: list[int], values: Values) -> None:
    held = random_rows(ROWS, "<f4")
    before, width = held.tobytes(), values[0].nbytes
    said = f"ids {ids[0]} to {ids[-1]} of {width} bytes a row, for memory of 7 rows of 20 bytes: not written"
    with pytest.raises(Contradiction, match=said):
        staged_rows(held, np.array(ids), values)
    assert held.tobytes() == before


def test_a_read_only_array_is_an_error() -> None:
    held = random_rows(ROWS, "<f4")
    held.flags.writeable = False
    with pytest.raises(ValueError, match="read-only"):
        staged_rows(held, np.array([1]), random_rows(1, "<f4"))()


TORCH_DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


class OnADevice(TensorRows):
    """Written as if NumPy could not reach the memory."""

    @property
    def _in_host_memory(self) -> bool:
        return False


def random_bytes(rows: int, row_bytes: int, dtype: torch.dtype) -> NDArray[np.uint8]:
    return np.random.default_rng(rows).integers(0, 2 if dtype is torch.bool else 256, (rows, row_bytes), np.uint8)


@pytest.mark.parametrize("kind", [TensorRows, OnADevice])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=str)
def test_rows_of_a_tensor_are_written_and_read_bit_by_bit(
    dtype: torch.dtype, padding: int, kind: type[TensorRows]
) -> None:
    memory = torch.zeros(7, 5 + padding, dtype=dtype)
    rows, size = kind(memory[:, :5]), 5 * memory.itemsize
    expected = np.zeros((7, size), np.uint8)
    for ids in ([1, 4, 6], [], [0]):
        expected[ids] = random_bytes(len(ids), size, dtype)
        rows.stage([(np.array(ids, np.int64), expected[ids])])()
        assert np.array_equal(rows.read(np.arange(7)), expected)
    one = random_bytes(1, size, dtype)
    rows.stage([], fill=one)()
    assert np.array_equal(rows.read(np.array([0, 3])), np.repeat(one, 2, axis=0))
    assert not memory[:, 5:].view(torch.uint8).any()


@pytest.mark.parametrize("kind", [TensorRows, OnADevice])
def test_rows_that_do_not_fit_a_tensor_are_refused_before_any_write(kind: type[TensorRows]) -> None:
    memory = torch.zeros(4, 2)
    rows = kind(memory)
    for ids, width in (([-1], 2), ([0, 4], 2), ([0], 3), ([0], 1)):
        with pytest.raises(Contradiction, match="for memory of 4 rows of 8 bytes: not written"):
            rows.stage([(np.array(ids), np.ones((len(ids), width), np.float32))])
    assert not memory.any()

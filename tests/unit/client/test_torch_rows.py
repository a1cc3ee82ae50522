"""Rows of a tensor by their ids, on a CPU and as they are on any other device."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deltasync.client.modules.tensor_rows import TensorRows
from deltasync.core.errors import Contradiction

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.uint8, torch.bool]


@pytest.fixture(params=["cpu", "other"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second is what goes on where NumPy cannot reach the memory; here it can."""
    if request.param == "other":
        monkeypatch.setattr(TensorRows, "_in_host_memory", False)


def random_bytes(rows: int, row_bytes: int, dtype: torch.dtype) -> NDArray[np.uint8]:
    return np.random.default_rng(rows).integers(0, 2 if dtype is torch.bool else 256, (rows, row_bytes), np.uint8)


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_are_written_and_read_bit_by_bit(dtype: torch.dtype, padding: int) -> None:
    memory = torch.zeros(7, 5 + padding, dtype=dtype)
    rows, size = TensorRows(memory[:, :5]), 5 * memory.itemsize
    expected = np.zeros((7, size), np.uint8)
    for ids in ([1, 4, 6], [], [0]):
        expected[ids] = random_bytes(len(ids), size, dtype)
        rows.stage(np.array(ids, np.int64), expected[ids])()
        assert np.array_equal(rows.read(np.arange(7)), expected)
    one = random_bytes(1, size, dtype)
    rows.stage_fill(one)()
    assert np.array_equal(rows.read(np.array([0, 3])), np.repeat(one, 2, axis=0))
    assert not memory[:, 5:].view(torch.uint8).any()


@pytest.mark.usefixtures("device")
def test_what_does_not_fit_is_refused_before_anything_is_written() -> None:
    memory = torch.zeros(4, 2)
    rows = TensorRows(memory)
    for ids, width in (([-1], 2), ([0, 4], 2), ([0], 3), ([0], 1)):
        with pytest.raises(Contradiction, match="for memory of 4 rows of 8 bytes: not written"):
            rows.stage(np.array(ids), np.ones((len(ids), width), np.float32))
    assert not memory.any()

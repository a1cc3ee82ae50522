"""Memory of reads: what is held stays as it is, what is dropped is used again."""

import numpy as np
import pytest
import torch

from deltasync.trainer.tracking.delta import ReadMemory

ROWS, DIM = 300_000, 64


@pytest.fixture(scope="module")
def table() -> torch.Tensor:
    return torch.arange(ROWS * DIM, dtype=torch.float32).view(ROWS, DIM)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("count", [0, 1, 1000, ROWS])
def test_selects_rows(table: torch.Tensor, count: int, dtype: torch.dtype) -> None:
    rows, ids = table.to(dtype), torch.arange(ROWS).flip(0)[:count]
    copies = ReadMemory().select(rows, ids)
    assert copies.dtype == dtype
    assert torch.equal(copies, rows[ids])


@pytest.mark.parametrize("part", [lambda rows: rows[5:7], lambda rows: rows.numpy()[5:7], lambda rows: rows[:, 3]])
def test_what_is_held_of_a_read_stays_as_it_is(table: torch.Tensor, part: object) -> None:
    memory, ids = ReadMemory(), torch.arange(ROWS)
    assert callable(part)
    held = part(memory.select(table, ids))
    for _ in range(3):
        memory.select(table + 1, ids)
    assert np.array_equal(np.asarray(held), np.asarray(part(table)))


def test_memory_is_kept_for_the_next_read_and_no_longer(table: torch.Tensor) -> None:
    memory, ids = ReadMemory(), torch.arange(ROWS)
    first = memory.select(table, ids)
    place = first.data_ptr()
    assert memory.nbytes == 0
    del first
    assert memory.nbytes >= table.nbytes
    second = memory.select(table, ids[:-1])
    assert second.data_ptr() == place
    del second
    memory.select(table, ids[:10])
    memory.trim()
    assert memory.nbytes == 0


def test_large_memory_is_not_held_by_a_small_read(table: torch.Tensor) -> None:
    memory = ReadMemory()
    large = memory.select(table.repeat(5, 1), torch.arange(5 * ROWS))
    place = large.data_ptr()
    del large
    assert memory.select(table, torch.arange(ROWS // 2)).data_ptr() != place

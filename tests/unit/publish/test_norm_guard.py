"""Whether a row's norm explodes: a pure decision, and what it is compared with."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.core.rows import RowBatch
from deltasync.core.tables import Shard, TableKind, TableSpec
from deltasync.publish.norm_guard import NormGuard, NormLimit, exceeds

TABLE = TableSpec("t", 10, 2)


def test_it_says_table_row_both_norms_and_the_limit() -> None:
    assert exceeds("t", 3, 25, 2, 10.0) == (
        "table 't': row 3 has norm 25, more than 10 times the largest that a row of it has had, 2 "
        "(--max-norm-growth)"
    )


def rows(values: list[float], kind: TableKind = TableKind.EMBEDDING, dtype: str = "<f4") -> RowBatch:
    table = TableSpec("t", 10, 2, np.dtype(dtype), kind)
    array = np.repeat(np.array(values, dtype)[:, None], 2, axis=1)
    return RowBatch(Shard.whole(table), np.arange(len(values)), array)


@given(st.lists(st.lists(st.floats(0, 1000, width=16), min_size=1, max_size=5), min_size=1, max_size=6))
def test_rows_are_compared_with_the_largest_of_all_cuts_before(cuts: list[list[float]]) -> None:
    guard, largest = NormGuard(NormLimit(4.0)), 0.0
    for values in cuts:
        found = guard.look(rows(values))
        norm = max(values) * 2**0.5
        assert found.largest == pytest.approx(norm, rel=1e-5)
        if abs(norm - 4 * largest) > 1e-3 * norm:
            assert bool(found.excess) is (largest > 0 and norm > 4 * largest)
        guard.note({"t": found.largest})
        largest = max(largest, norm)


def test_half_floats_deletes_and_buffers() -> None:
    guard = NormGuard(NormLimit(2.0))
    guard.note({"t": 1.0})
    assert guard.look(rows([60000.0], dtype="<f2")).excess
    assert not guard.look(rows([60000.0], TableKind.BUFFER)).excess
    assert not guard.look(RowBatch.deletes(Shard.whole(TABLE), np.arange(3))).excess
    assert not NormGuard(None).look(rows([1e30])).excess
    guard.forget("t")
    assert not guard.look(rows([60000.0])).excess

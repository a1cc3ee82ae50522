"""Sorted maps, compared with dictionaries."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deltasync.kernels import id_maps

ROWS, OFFSET, FREE = 6, 10, 2**63 - 1
RAW = st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 9)
ENTRIES = st.lists(st.tuples(RAW, st.integers(OFFSET - 1, OFFSET + ROWS)), max_size=ROWS)


def read(entries: list[tuple[int, int]], first: int, end: int) -> tuple[int, list[int]]:
    raw, rows = (np.array([entry[side] for entry in entries], np.int64) for side in (0, 1))
    column = np.zeros(ROWS, np.int64)
    return id_maps.read_sorted(raw, rows, OFFSET, first, end, column), column.tolist()


@given(st.dictionaries(RAW, st.integers(OFFSET, OFFSET + ROWS - 1), max_size=ROWS), st.integers(-5, 5))
def test_raw_ids_by_row(entries: dict[int, int], first: int) -> None:
    by_row = {row: raw for raw, row in entries.items() if raw != -1}
    named = sorted((raw, row) for row, raw in by_row.items())
    outside, column = read(named, first, 7)
    taken = {raw: row for raw, row in named if raw != FREE}
    assert outside == sum(not first <= raw < 7 for raw in taken)
    rows = {row: raw for raw, row in taken.items()}
    assert column == [rows[OFFSET + row] + 1 if OFFSET + row in rows else 0 for row in range(ROWS)]


@given(ENTRIES)
def test_what_is_no_map_is_found(entries: list[tuple[int, int]]) -> None:
    taken = [(raw, row) for raw, row in entries if raw != FREE]
    raw_ids, rows = [raw for raw, _ in taken], [row for _, row in taken]
    sound = (
        raw_ids == sorted(set(raw_ids))
        and -1 not in raw_ids
        and len(set(rows)) == len(rows)
        and all(OFFSET <= row < OFFSET + ROWS for row in rows)
    )
    outside, _ = read(entries, -(2**63), 2**63 - 1)
    assert outside == (0 if sound else id_maps.UNSOUND)

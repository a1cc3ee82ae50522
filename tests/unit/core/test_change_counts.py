"""Counts of changed rows against plain counting."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from deltasync.core.change_counts import ChangeCounts

# Steps from one number to the next: mostly small, some far beyond everything that is counted in groups.
STEPS = st.one_of(st.integers(1, 3), st.integers(1, 200), st.integers(1, 10_000), st.integers(1, 1 << 40))


def numbers(draw: st.DrawFn, most: int) -> list[int]:
    """Numbers in ascending order, from 1 on."""
    found = [draw(st.integers(1, 100))]
    for step in draw(st.lists(STEPS, max_size=most)):
        found.append(found[-1] + step)
    return found


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, list[tuple[int, list[int]]]]:
    """So many rows, and which of them each number stamps."""
    rows = draw(st.integers(1, 12))
    some = st.sets(st.integers(0, rows - 1)).map(sorted)
    return rows, [(number, draw(some)) for number in numbers(draw, 12)]


def check(counts: ChangeCounts, stamps: list[int]) -> None:
    newest = counts.newest
    assert counts.rows == len(stamps)
    assert counts.changed == counts.after(0) == sum(stamp > 0 for stamp in stamps)
    asked = {
        max(0, base + by) for base in (0, 1, *stamps, newest) for by in (-4097, -4096, -65, -64, -63, -1, 0, 1)
    }
    for number in asked:
        least = sum(stamp > number for stamp in stamps)
        if number >= newest - 64:
            assert counts.after(number) == least
        assert least <= counts.after(number) <= sum(stamp > bound(number, newest) for stamp in stamps)


def bound(number: int, newest: int) -> int:
    """The number below the group in which `number` + 1 is, if the newest 64 groups of its size reach that far."""
    sizes = (size for size in (1, 64, 4096) if newest // size - (number + 1) // size < 64)
    size = next(sizes, None)
    return (number + 1) // size * size - 1 if size else 0


@given(histories())
def test_counts_are_those_of_the_stamps(history: tuple[int, list[tuple[int, list[int]]]]) -> None:
    rows, changes = history
    stamps = np.zeros(rows, np.int64)
    counts = ChangeCounts.unchanged(rows)
    for number, changed in changes:
        counts = counts.moved(stamps[changed], number)
        stamps[changed] = number
        check(counts, stamps.tolist())
        check(ChangeCounts.of(stamps), stamps.tolist())


@given(histories(), st.data())
def test_rows_are_taken_out_and_put_back_whatever_their_stamps(
    history: tuple[int, list[tuple[int, list[int]]]], data: st.DataObject
) -> None:
    rows, changes = history
    stamps = np.zeros(rows, np.int64)
    for number, changed in changes:
        stamps[changed] = number
    out = data.draw(st.sets(st.integers(0, rows - 1)).map(sorted))
    counts = ChangeCounts.of(stamps).without(stamps[out])
    check(counts, np.delete(stamps, out).tolist())
    check(counts.plus(stamps[out]), stamps.tolist())
    # An older number than the newest there is, as when a log is applied again.
    older = data.draw(st.integers(1, max(1, int(stamps.max()))))
    stamped_again = [*np.delete(stamps, out).tolist(), *[older] * len(out)]
    check(counts.plus_rows(len(out), older), stamped_again)
    check(ChangeCounts.of(stamps).moved(stamps[out], older), stamped_again)


def test_a_count_does_not_change() -> None:
    """Any thread may hold one while rows are stamped."""
    counts = ChangeCounts.of(np.array([0, 1, 5]))
    found = {number: counts.after(number) for number in range(7)}
    assert counts.plus_rows(4, 6).without(np.array([5])).after(4) == 4
    assert {number: counts.after(number) for number in range(7)} == found

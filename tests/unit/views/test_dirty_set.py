"""The dirty set against a dictionary of rows."""

from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.core.rows import Ids, Mask
from deltasync.kernels.dirty_rows import DELETED, NEVER_SENT
from deltasync.views.dirty_set import DirtySet, Findings, Flags

IDS = st.sets(st.integers(0, 30), max_size=12)


class Row(NamedTuple):
    norm: float
    since: int
    never_sent: bool
    deleted: bool


Plain = dict[int, Row]


def flags_of(never_sent: Mask, deleted: Mask) -> Flags:
    flags: Flags = never_sent * NEVER_SENT | deleted * DELETED
    return flags


def sorted_ids(ids: set[int]) -> Ids:
    return np.array(sorted(ids), np.int64)


def plain(dirty: DirtySet) -> Plain:
    assert (np.diff(dirty.ids) > 0).all()
    columns = dirty.norms, dirty.since, dirty.never_sent, dirty.deleted
    rows = zip(*(each.tolist() for each in columns), strict=True)
    return {row: Row(*values) for row, values in zip(dirty.ids.tolist(), rows, strict=True)}


@st.composite
def findings(draw: st.DrawFn) -> Findings:
    ids = sorted_ids(draw(IDS))
    masks = [
        np.array(draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids))), np.bool_) for _ in "123"
    ]
    norms = np.array(draw(st.lists(st.sampled_from([0.0, 0.5, 9.0]), min_size=len(ids), max_size=len(ids))))
    return Findings(ids, norms.astype(np.float64), flags_of(masks[0], masks[1]), masks[2])


def found(before: Plain, seen: Findings, version: int) -> Plain:
    after = dict(before)
    for index, row in enumerate(seen.ids.tolist()):
        known = after.pop(row, None)
        if seen.dirty[index]:
            flags = int(seen.flags[index])
            since = known.since if known else version
            after[row] = Row(float(seen.norms[index]), since, bool(flags & 1), bool(flags & 2))
    return dict(sorted(after.items()))


@given(IDS, st.lists(findings() | IDS, max_size=6))
def test_a_dirty_set_is_what_a_dictionary_is(marked: set[int], steps: list[Findings | set[int]]) -> None:
    marks = np.zeros(31, np.int64)
    marks[sorted_ids(marked)] = 7
    dirty = DirtySet.of_marks(marks)
    expected = {row: Row(0.0, 7, False, False) for row in sorted(marked)}
    for version, step in enumerate(steps, 8):
        if isinstance(step, Findings):
            dirty, expected = dirty.after(step, version), found(expected, step, version)
        else:
            dirty = dirty.without(sorted_ids(step))
            expected = {row: values for row, values in expected.items() if row not in step}
        assert plain(dirty) == expected
        assert len(dirty) == len(expected)


@pytest.mark.parametrize("never_sent", [False, True])
@pytest.mark.parametrize("deleted", [False, True])
def test_flags_say_what_they_were_made_of(never_sent: bool, deleted: bool) -> None:
    one = DirtySet(np.array([3]), np.ones(1), np.array([1]), flags_of(np.array([never_sent]), np.array([deleted])))
    assert plain(one) == {3: Row(1.0, 1, never_sent, deleted)}

"""Doing again what a plain trainer did: after a kill, from a checkpoint, and in the verdict."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.soak.lineage import TrainingRun, stretches
from tests.soak.rank import shards_of, some_rows
from tests.soak.training import FIRST_TABLES, Training, beacons

from deltasync.core.rows import RowBatch

FIRST = TrainingRun(number=0, id="m-0", started_unix_ns=1, first_step=1, ranks=2, tables=FIRST_TABLES)


def later(run: TrainingRun, first_step: int, **more: int) -> TrainingRun:
    tables = {**run.tables, **more}
    return replace(run, number=run.number + 1, id=f"m-{run.number + 1}", first_step=first_step, tables=tables)


def trained(runs: Sequence[TrainingRun], last_step: int) -> Training:
    training = Training("m", runs)
    training.repeat(last_step, {})
    return training


@given(st.lists(st.integers(1, 30), max_size=5), st.integers(0, 10))
def test_every_step_is_done_once_by_the_newest_run_that_was_there(firsts: list[int], more: int) -> None:
    runs = [FIRST]
    for first in firsts:
        runs.append(later(runs[-1], first))
    last = runs[-1].first_step + more
    done = [(step, run) for run, steps in stretches(runs, last) for step in steps]
    assert [step for step, _ in done] == list(range(1, last + 1))
    for step, run in done:
        assert run.first_step <= step
        assert all(each.first_step > step for each in runs[run.number + 1 :])


def test_doing_it_again_gives_the_same_bits() -> None:
    runs = [FIRST, later(FIRST, 8, extra3=50, users=2100)]
    once, again = trained(runs, 15), trained(runs, 15)
    for name, rows in once.tables.rows.items():
        assert rows.tobytes() == again.tables.rows[name].tobytes()
    assert len(once.tables.rows["users"]) == 2100
    assert trained(runs[:1], 15).tables.rows["users"].tobytes() != once.tables.rows["users"][:2000].tobytes()


def test_every_version_says_in_all_tables_of_which_step_it_is() -> None:
    training = trained([FIRST, later(FIRST, 8, extra3=50)], 14)
    for name, rows in training.tables.rows.items():
        assert (rows[beacons(name)] == 14).all()


def test_rows_that_are_asked_for_are_published_as_they_are_now_or_deleted() -> None:
    training = trained([FIRST], 14)
    rows = some_rows(shards_of(FIRST, 0)[0], training.tables, np.arange(2000))
    there = training.tables.there["users"][:1000]
    assert ids_of(rows, deleted=False) == np.flatnonzero(there).tolist()
    assert ids_of(rows, deleted=True) == np.flatnonzero(~there).tolist()


def test_deletes_by_operators_are_repeated_unless_a_step_has_them() -> None:
    training = Training("m", [FIRST])
    training.repeat(5, {(0, 5): {"users": np.arange(10)}})
    assert training.tables.there["users"][:10].tolist() == [True] + [False] * 9
    assert (training.changed_at["users"][1:10] == (0, 5)).all()


def test_a_table_may_grow_in_a_step_that_deletes_some_of_its_new_rows() -> None:
    training = trained([FIRST, later(FIRST, 14, users=6000)], 14)
    there = training.tables.there["users"]
    assert len(there) == 6000
    assert not there[2000:].all()


def ids_of(rows: list[RowBatch], *, deleted: bool) -> list[int]:
    return [id_ for each in rows if each.deleted is deleted for id_ in each.ids.tolist()]

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tests.support.keyed_model import BIAS, CHANGES, ITEM, RAW_IDS, ROWS, TABLES, USER, Change, KeyedModel
from tests.support.targets import read_rows

from deltasync.base.errors import Contradiction
from deltasync.client import NumpyTarget, Position, RowBatch, Shard
from deltasync.client.targets.checksums import TargetChecksums
from deltasync.client.targets.keyed_target import KeyedCopy, KeyedTarget
from deltasync.client.targets.redis_layout import Meta
from deltasync.client.targets.target import Reads, Release
from deltasync.core.tables import FREE_ID

WHOLE = st.frozensets(st.sampled_from([table.name for table in TABLES]))


def held_by(target: KeyedTarget) -> dict[str, dict[int, float]]:
    """The first value of each row by key, after looking all of them up."""
    held = {}
    with target.reading() as now:
        tables = now.tables
        for name in (USER.name, ITEM.name, BIAS.name):
            keys = tables[name].keys()
            assert len(keys) == len(tables[name])
            values, found = tables[name].lookup(keys[::-1])
            assert found.all()
            assert (values == values[:, :1]).all()
            held[name] = dict(zip(keys[::-1].tolist(), values[:, 0].tolist(), strict=True))
    return held


@pytest.mark.parametrize("reads", ["pause", "copies"])
@given(steps=st.lists(st.tuples(CHANGES, st.booleans(), WHOLE), min_size=1, max_size=8))
def test_a_target_holds_what_the_model_does(
    reads: Reads, steps: list[tuple[Change, bool, frozenset[str]]]
) -> None:
    model, target, plain = KeyedModel(), KeyedTarget(reads=reads), NumpyTarget()
    by_row, by_key = TargetChecksums(plain), TargetChecksums(target)
    for change, resync, whole in steps:
        held = model.version
        model.change(change)
        release = model.release(held, resync=resync or not held, whole=whole)
        sums = []
        for checksums, each in ((by_row, plain), (by_key, target)):
            each.apply(release)
            sums.append(checksums.after(release))
        assert sums[0] == sums[1]
        assert held_by(target) == model.expected()
        with target.reading() as now:
            assert (
                (now.position, now.version)
                == (release.position, release.version)
                == (target.position, model.version)
            )


def test_arrays_are_allocated_before_readers_have_to_wait() -> None:
    table = dataclasses.replace(USER, rows=1000)
    id_map = dataclasses.replace(RAW_IDS, rows=1000)
    made = list[int]()

    def allocate(shape: tuple[int, int], dtype: Any) -> NDArray[Any]:
        made.append(shape[0])
        return np.zeros(shape, dtype)

    copy = KeyedCopy(allocate)
    whole = {1: frozenset({USER.name, RAW_IDS.name}), 7: frozenset({RAW_IDS.name}), 8: frozenset({USER.name})}
    for version in range(1, 12):
        ids = np.arange(1000 if version in whole else 90 * version)
        entries = 1000 * version + ids[:, None]
        rows = [
            RowBatch.of_table(table, ids, np.full((len(ids), 2), version, np.float32)),
            RowBatch.of_table(id_map, ids, entries),
        ]
        release = Release(
            Position("h", version), 0, 0, False, [table, id_map], rows, whole.get(version, frozenset()), version
        )
        write, before = copy.stage(release), len(made)
        write()
        assert len(made) == before
        assert copy.tables[USER.name].lookup(entries[:, 0] ^ FREE_ID)[1].all()
        assert len(copy.tables[USER.name]) == 1000
    assert len(made) > 4


def test_unknown_keys_are_reported() -> None:
    model, target = KeyedModel(), KeyedTarget()
    model.change(Change(users=frozenset({0}), items=frozenset({3}), raw_ids={0: 7}))
    target.apply(model.release(0, resync=True))
    with target.reading() as now:
        tables = now.tables
        values, found = tables[USER.name].lookup(np.array([7, 0, 7, -5]))
        assert found.tolist() == [True, False, True, False]
        assert (values[~found] == 0).all()
        values, found = tables[ITEM.name].lookup(np.array([3, 0, -1, ROWS, 2**62]))
        assert found.tolist() == [True, False, False, False, False]


def _swapped(version: int, raw_ids: list[tuple[int, int]]) -> Release:
    model = KeyedModel()
    model.change(Change())
    release = model.release(0)
    ids, values = (np.array(each) for each in zip(*raw_ids, strict=True))
    rows = [RowBatch.of_table(RAW_IDS, ids, values[:, None] ^ FREE_ID)]
    return Release(release.position, version, 0, False, TABLES, rows, version=version)


@pytest.mark.parametrize("raw_ids", [[(2, 8), (4, 8)], [(4, 7)]])
def test_one_raw_id_for_two_rows_is_an_error_before_any_write(raw_ids: list[tuple[int, int]]) -> None:
    model, target = KeyedModel(), KeyedTarget()
    model.change(Change(users=frozenset(range(ROWS)), raw_ids={0: 7}))
    target.apply(model.release(0, resync=True))
    raw, rows = raw_ids[0][1], "2 and 4" if len(raw_ids) == 2 else "0 and 4"
    said = f"table 'sparse.user.raw_ids': raw id {raw} has two rows, {rows}"
    with pytest.raises(Contradiction, match=re.escape(said)):
        target.apply(_swapped(2, raw_ids))
    assert held_by(target) == model.expected()
    read = read_rows(target, RAW_IDS, np.arange(ROWS))
    assert read[:, 0].tolist() == [7 ^ FREE_ID, 0, 0, 0, 0, 0]


def test_a_table_may_change_its_form() -> None:
    model, target = KeyedModel(), KeyedTarget()
    model.change(Change(users=frozenset(range(ROWS)), raw_ids={0: 7, 1: 5, 2: 1}))
    target.apply(model.release(0, resync=True))
    model.change(Change(deleted=frozenset({0})))
    half = dataclasses.replace(USER, dtype=np.dtype("<f2"))
    batches = [
        RowBatch.of_table(half, np.arange(1, ROWS), np.full((ROWS - 1, 2), 3, np.float16)),
        RowBatch.deletes(Shard.whole(half), np.array([0])),
    ]
    target.apply(dataclasses.replace(model.release(1), tables=[half, *TABLES[1:]], rows=batches))
    with target.reading() as now:
        assert now.tables[USER.name].keys().tolist() == [1, 5]
        rows, found = now.tables[USER.name].lookup(np.array([5, 7]))
        assert rows.dtype == np.float16
        assert rows.tolist() == [[3, 3], [0, 0]]
        assert found.tolist() == [True, False]


def test_tables_grow() -> None:
    model, target = KeyedModel(), KeyedTarget()
    model.change(Change(users=frozenset(range(ROWS)), items=frozenset({1}), raw_ids={0: 7}))
    target.apply(model.release(0, resync=True))
    model.change(Change())
    tables = [dataclasses.replace(table, rows=2 * ROWS) for table in TABLES[:3]] + [BIAS]
    values = np.full((1, 2), 5, np.float32)
    rows = [
        RowBatch.of_table(tables[0], np.array([ROWS + 1]), values),
        RowBatch.of_table(tables[2], np.array([0, ROWS + 1]), np.array([[0], [7 ^ FREE_ID]])),
    ]
    with target.reading() as before:
        assert before.tables[USER.name].lookup(np.array([7]))[1].all()
    target.apply(dataclasses.replace(model.release(1), tables=tables, rows=rows))
    with target.reading() as after:
        found, known = after.tables[USER.name].lookup(np.array([7, 8]))
        assert found.tolist() == [[5, 5], [0, 0]]
        assert known.tolist() == [True, False]
        assert after.tables[ITEM.name].keys().tolist() == [1]


def test_the_redis_store_keeps_the_seal_of_a_position() -> None:
    meta = Meta("clicks", (), Position("h", 7, seal=2**64 - 1), version=7)
    found = Meta.of_fields({name.encode(): value.encode() for name, value in meta.fields().items()}, "the store")
    assert found == meta
    assert found.position.seal == meta.position.seal

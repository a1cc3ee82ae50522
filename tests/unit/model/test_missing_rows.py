"""Missing rows, until a cut brings all of their columns, or says that all rows of a table are in it."""

import numpy as np
from tests.support.wire import USER

from deltasync.core.rows import RowBatch
from deltasync.core.tables import Shard
from deltasync.model.applied_tables import NOTHING_MISSING, Arriving, in_words

MISSING = {USER.name: np.array([3, 4, 9]), "item": np.array([1])}


def batch(ids: list[int], first: int = 0, cols: int = USER.dim) -> RowBatch:
    return RowBatch(Shard(USER, 0, USER.rows, first, cols), np.array(ids), np.zeros((len(ids), cols), USER.dtype))


def left(*batches: RowBatch, whole: tuple[str, ...] = ()) -> dict[str, list[int]]:
    arriving = Arriving(MISSING)
    for each in batches:
        arriving.note(each)
    return {name: ids.tolist() for name, ids in arriving.left(whole).items()}


def test_rows_that_come_are_no_longer_missing() -> None:
    assert left() == {USER.name: [3, 4, 9], "item": [1]}
    assert left(batch([1, 4])) == {USER.name: [3, 9], "item": [1]}
    assert left(batch([3, 4]), batch([9, 11]), whole=("item",)) == {}
    assert left(RowBatch.deletes(Shard.whole(USER), np.array([9]))) == {USER.name: [3, 4], "item": [1]}


def test_a_row_comes_with_all_of_its_columns_or_is_missing() -> None:
    assert left(batch([3, 4], 0, 2), batch([4, 9], 2, 2))[USER.name] == [3, 9]
    assert left(batch([3, 4], 2, 2), batch([3], 0, 2))[USER.name] == [4, 9]
    assert left(batch([3], 0, 2), batch([3], 0, 2))[USER.name] == [3, 4, 9], "the same columns twice"
    assert left(batch([3], 0, 3), batch([3], 1, 3))[USER.name] == [4, 9], "columns that overlap"
    assert left(batch([3], 0, 1), batch([3], 2, 2))[USER.name] == [3, 4, 9], "a gap"


def test_words() -> None:
    assert in_words(NOTHING_MISSING) == ""
    assert in_words({"a": np.array([3, 4, 5, 9])}) == "4 rows of table 'a' (3 to 5, 9)"
    many = in_words({"a": np.array([7]), "b": np.arange(0, 100, 2)})
    assert many == "1 row of table 'a' (7) and 50 rows of table 'b' (0, 2, 4, 6, 8, 10, 12, 14, 16, 18, ...)"

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.core.errors import InvalidInput
from deltasync.core.names import check_name
from deltasync.core.tables import MAX_DIM, MAX_ROWS, Shard, TableSpec

TABLE = TableSpec("emb.user", 100, 8)
LETTERS = "abcXYZ019_-"


@given(st.text(LETTERS, min_size=1, max_size=1), st.text(LETTERS + ".", max_size=127))
def test_names_of_letters_digits_and_some_signs_are_taken(first: str, rest: str) -> None:
    assert check_name("model", first + rest) == first + rest


@pytest.mark.parametrize("name", ["", ".", "..", ".hidden", "a/b", "a b", "a\n", "ä", "a\0", "x" * 129, "a=b"])
def test_other_names_are_refused(name: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        check_name("consumer", name)
    assert f"consumer name {name!r}" in str(refused.value)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"name": ""}, "table name ''"),
        ({"name": "x" * 513}, "1 to 512 characters"),
        ({"rows": 0}, "table 't': 0 rows"),
        ({"rows": MAX_ROWS + 1}, f"table 't': {MAX_ROWS + 1} rows"),
        ({"dim": 0}, "table 't': dim 0"),
        ({"dim": MAX_DIM + 1}, f"table 't': dim {MAX_DIM + 1}"),
        ({"dtype": np.dtype("<f8")}, "table 't': values of type float64"),
        ({"dtype": np.dtype("<i4")}, "table 't': values of type int32"),
        ({"dtype": np.dtype("u1")}, "table 't': values of type uint8"),
        ({"dtype": np.dtype("<u2")}, "table 't': values of type uint16"),
    ],
)
def test_a_wrong_table_is_refused(wrong: dict[str, object], said: str) -> None:
    fields: dict[str, object] = {"name": "t", "rows": 1, "dim": 1} | wrong
    with pytest.raises(InvalidInput) as refused:
        TableSpec(**fields)  # type: ignore[arg-type]
    assert said in str(refused.value)


@pytest.mark.parametrize("fields", [("x" * 512, 1, 1), ("t", MAX_ROWS, 1), ("t", 1, MAX_DIM)])
def test_the_bounds_themselves_are_allowed(fields: tuple[str, int, int]) -> None:
    TableSpec(*fields)


def test_bytes_of_a_table() -> None:
    table = TableSpec("t", 10, 3, np.dtype("<f2"))
    assert (table.row_bytes, table.nbytes) == (8 + 6, 60)
    assert Shard(table, 0, 5, 1, 2).row_bytes == 8 + 4


@given(*(st.integers(0, 120) for _ in range(2)), *(st.integers(0, 10) for _ in range(2)))
def test_a_shard_lies_inside_its_table(row_offset: int, rows: int, col_offset: int, cols: int) -> None:
    inside = row_offset + rows <= TABLE.rows and col_offset + cols <= TABLE.dim and cols >= 1
    if inside:
        Shard(TABLE, row_offset, rows, col_offset, cols)
        return
    with pytest.raises(InvalidInput) as refused:
        Shard(TABLE, row_offset, rows, col_offset, cols)
    assert "shard of table 'emb.user'" in str(refused.value)


def test_a_negative_shard_is_refused() -> None:
    for fields in [(-1, 1, 0, 1), (0, -1, 0, 1), (0, 1, -1, 1), (0, 1, 0, -1)]:
        with pytest.raises(InvalidInput):
            Shard(TABLE, *fields)

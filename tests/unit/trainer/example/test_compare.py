"""The demo's verdict: one bit that differs, anywhere, is told."""

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deltasync.trainer.example.compare import WHATS, Holdings, trainer_tables, unequal_rows, verdict
from deltasync.trainer.example.processes import DemoFailed
from deltasync.trainer.example.report import all_equal


def test_rows_are_compared_bit_by_bit() -> None:
    ours = {"t": np.array([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]], np.float32)}
    theirs = {"t": ours["t"].copy()}
    assert unequal_rows(ours, theirs) == {}
    theirs["t"][0, 0] = -0.0
    theirs["t"][2, 1] = np.nextafter(np.float32(5), np.float32(6))
    assert unequal_rows(ours, theirs) == {"t": 2}


def test_a_missing_table_or_another_shape_counts_whole() -> None:
    ours = {"a": np.zeros((3, 2), np.float32), "b": np.zeros((4, 2), np.float32)}
    assert unequal_rows(ours, {"b": np.zeros((4, 3), np.float32)}) == {"a": 3, "b": 4}


def _rank(folder: Path, rank: int, shards: list[tuple[int, int, np.ndarray]]) -> None:
    facts = {"tables": [("t", 4, 2, "<f4")], "shards": [("t", row, column) for row, column, _ in shards]}
    (folder / f"trainer-{rank}.json").write_text(json.dumps(facts))
    arrays = {f"shard{number}": block.astype(np.float32) for number, (_, _, block) in enumerate(shards)}
    np.savez(folder / f"tables-trainer-{rank}.npz", **arrays)  # type: ignore[arg-type]


def test_shards_are_put_together(tmp_path: Path) -> None:
    whole = np.arange(8).reshape(4, 2)
    _rank(tmp_path, 0, [(0, 0, whole[:2]), (2, 0, whole[2:, :1])])
    _rank(tmp_path, 1, [(2, 1, whole[2:, 1:])])
    np.testing.assert_array_equal(trainer_tables(tmp_path, 2)["t"], whole)


def test_copies_that_differ_and_holes_are_errors(tmp_path: Path) -> None:
    whole = np.arange(8).reshape(4, 2)
    _rank(tmp_path, 0, [(0, 0, whole)])
    _rank(tmp_path, 1, [(0, 0, whole + 1)])
    with pytest.raises(DemoFailed, match="table 't', rank 1: the ranks' copies differ"):
        trainer_tables(tmp_path, 2)
    _rank(tmp_path, 0, [(0, 0, whole[:3])])
    with pytest.raises(DemoFailed, match="table 't': the ranks' shards do not cover all its rows"):
        trainer_tables(tmp_path, 1)


def holdings() -> Holdings:
    rng = np.random.default_rng(0)
    return {
        "rows": {"t": rng.random((4, 3), np.float32), "bias": rng.random((1, 2), np.float32)},
        "map": {"t": rng.integers(0, 2**63, (4, 1))},
        "buffers": {"mean": rng.random((1, 3), np.float32), "batches": np.array([[7]])},
        "outputs": {"logit": rng.random((5, 1), np.float32)},
    }


def flip(values: np.ndarray[Any, Any]) -> None:
    """Change the lowest bit of the first value."""
    values.view(f"u{values.dtype.itemsize}")[0, 0] ^= 1


def test_replicas_that_hold_the_same_are_equal() -> None:
    found = verdict(holdings(), {"a": holdings(), "b": holdings()})
    assert [found[f"{what}_equal"] for what in WHATS] == [True] * 4
    assert [found[f"{what}_unequal"] for what in WHATS] == [{"a": {}, "b": {}}] * 4
    assert [found[f"{what}_compared"] for what in WHATS] == [10, 8, 4, 10]
    assert all_equal(found)


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("rows", "t"),
        ("rows", "bias"),
        ("map", "t"),
        ("buffers", "mean"),
        ("buffers", "batches"),
        ("outputs", "logit"),
    ],
)
def test_one_bit_of_one_replica_is_told(what: str, name: str) -> None:
    damaged = holdings()
    flip(damaged[what][name])
    found = verdict(holdings(), {"a": holdings(), "b": damaged})
    assert {each: found[f"{each}_equal"] for each in WHATS} == {each: each != what for each in WHATS}
    assert found[f"{what}_unequal"] == {"a": {}, "b": {name: 1}}
    assert not all_equal(found)


@pytest.mark.parametrize("what", WHATS)
def test_what_a_replica_lacks_or_has_alone_is_told(what: str) -> None:
    for place in (0, 1):
        pair = [holdings(), holdings()]
        name, values = pair[place][what].popitem()
        found = verdict(pair[0], {"a": pair[1]})
        assert found[f"{what}_unequal"] == {"a": {name: len(values)}}
        assert not all_equal(found)


def test_what_the_model_has_none_of_is_neither_equal_nor_unequal() -> None:
    plain = holdings() | {"map": {}, "buffers": {}}
    found = verdict(plain, {"a": deepcopy(plain)})
    assert (found["map_equal"], found["buffers_equal"], found["map_compared"]) == (None, None, 0)
    assert all_equal(found)

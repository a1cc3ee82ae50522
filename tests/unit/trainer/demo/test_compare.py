"""The demo's verdict: equal rows, freshness."""

import json
from pathlib import Path

import numpy as np
import pytest

from deltasync.trainer.demo.compare import freshness, trainer_tables, unequal_rows
from deltasync.trainer.demo.processes import DemoFailed


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
    with pytest.raises(DemoFailed, match="no rank holds all of table 't'"):
        trainer_tables(tmp_path, 1)


def test_freshness_counts_every_step_by_the_release_that_brought_it() -> None:
    ends = [1_000_000_000, 2_000_000_000, 3_000_000_000]
    applied = [(1, 0, 100), (3, 2, 2_500_000_000)]
    assert freshness(ends, applied) == [1.5, 0.5]
    assert freshness(ends, [(3, 3, 2_500_000_000)]) == [1.5, 0.5, 0.0], "the clock was set back"

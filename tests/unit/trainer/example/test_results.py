"""Rows in files, compared bit by bit, and AUC against its definition."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.client import Policy, ValueType
from deltasync.trainer.example.processes import DemoFailed
from deltasync.trainer.example.results import (
    as_released,
    auc,
    trainer_tables,
    unequal_rows,
    write_arrays,
)


def test_missing_table_or_other_shape_counts_all_rows() -> None:
    ours = {"a": np.zeros((3, 2), np.float32), "b": np.zeros((4, 2), np.float32)}
    assert unequal_rows(ours, {"b": np.zeros((4, 3), np.float32)}) == {"a": 3, "b": 4}


def _rank(folder: Path, rank: int, shards: list[tuple[int, int, np.ndarray]]) -> None:
    facts = {"tables": [("t", 4, 2, "<f4")], "shards": [("t", row, column) for row, column, _ in shards]}
    (folder / f"trainer-{rank}.json").write_text(json.dumps(facts))
    blocks = {f"shard{number}": block.astype(np.float32) for number, (_, _, block) in enumerate(shards)}
    write_arrays(folder, f"tables-trainer-{rank}", blocks)


def test_shards_are_assembled(tmp_path: Path) -> None:
    whole = np.arange(8).reshape(4, 2)
    _rank(tmp_path, 0, [(0, 0, whole[:2]), (2, 0, whole[2:, :1])])
    _rank(tmp_path, 1, [(2, 1, whole[2:, 1:])])
    np.testing.assert_array_equal(trainer_tables(tmp_path, 2)["t"], whole)


def test_missing_shard_is_an_error(tmp_path: Path) -> None:
    _rank(tmp_path, 0, [(0, 0, np.ones((3, 2)))])
    with pytest.raises(DemoFailed, match="table 't': the ranks' shards do not cover all its rows"):
        trainer_tables(tmp_path, 1)


def test_only_embedding_tables_are_encoded() -> None:
    rows = np.random.default_rng(0).random((4, 3), np.float32)
    released = as_released(
        {"t": rows, "map": np.array([[2**60]])}, Policy(value_type=ValueType.INT8), parameters=["map"]
    )
    assert released["map"].tolist() == [[2**60]]
    assert unequal_rows(released, {"t": rows, "map": released["map"]}) == {"t": 4}
    np.testing.assert_allclose(released["t"], rows, atol=0.01)


SCORED = st.lists(st.tuples(st.booleans(), st.integers(-3, 3)), min_size=2, max_size=40).filter(
    lambda events: len({label for label, _ in events}) == 2
)


@given(SCORED)
def test_auc_is_the_share_of_pairs_in_order(events: list[tuple[bool, int]]) -> None:
    labels = np.array([label for label, _ in events], np.float32)
    scores = np.array([score for _, score in events], np.float32)
    pairs = [np.sign(p - n) / 2 + 0.5 for p in scores[labels == 1] for n in scores[labels == 0]]
    assert auc(labels, scores) == pytest.approx(float(np.mean(pairs)))


def test_auc_needs_both_labels() -> None:
    with pytest.raises(ValueError, match="3 positive and 0 negative"):
        auc(np.ones(3, np.float32), np.zeros(3, np.float32))

"""The demo's verdict: one bit that differs, anywhere, is told."""

from copy import deepcopy
from typing import Any

import numpy as np
import pytest

from deltasync.trainer.demo.verdict import WHATS, Holdings, all_equal, verdict


def holdings() -> Holdings:
    rng = np.random.default_rng(0)
    return Holdings(
        rows={"t": rng.random((4, 3), np.float32), "bias": rng.random((1, 2), np.float32)},
        map={"t": rng.integers(0, 2**63, (4, 1))},
        buffers={"mean": rng.random((1, 3), np.float32), "batches": np.array([[7]])},
        outputs={"logit": rng.random((5, 1), np.float32)},
    )


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
    flip(getattr(damaged, what)[name])
    found = verdict(holdings(), {"a": holdings(), "b": damaged})
    assert {each: found[f"{each}_equal"] for each in WHATS} == {each: each != what for each in WHATS}
    assert found[f"{what}_unequal"] == {"a": {}, "b": {name: 1}}
    assert not all_equal(found)


@pytest.mark.parametrize("what", WHATS)
def test_what_a_replica_lacks_or_has_alone_is_told(what: str) -> None:
    for place in (0, 1):
        pair = [holdings(), holdings()]
        name, values = getattr(pair[place], what).popitem()
        found = verdict(pair[0], {"a": pair[1]})
        assert found[f"{what}_unequal"] == {"a": {name: len(values)}}
        assert not all_equal(found)


def test_what_the_model_has_none_of_is_neither_equal_nor_unequal() -> None:
    plain = Holdings(holdings().rows, {}, {}, holdings().outputs)
    found = verdict(plain, {"a": deepcopy(plain)})
    assert (found["map_equal"], found["buffers_equal"], found["map_compared"]) == (None, None, 0)
    assert all_equal(found)

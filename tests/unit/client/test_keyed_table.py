import os
import re
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from numpy.typing import NDArray
from tests.support.examples import stateful

from deltasync.base.errors import InvalidInput
from deltasync.client.targets.keyed_table import KeyedRows, KeyIndex
from deltasync.core.rows import Ids
from deltasync.kernels import keys as key_kernels

SMALLEST, LARGEST = np.iinfo(np.int64).min, np.iinfo(np.int64).max
# Few enough to meet again, with the extremes, and many that are multiples of powers of two.
KEYS = st.one_of(
    st.sampled_from([SMALLEST, SMALLEST + 1, -2, -1, 0, 1, LARGEST - 1, LARGEST]),
    st.integers(-30, 30),
    st.integers(0, 30).map(lambda number: number << 50),
)
SOME = st.lists(KEYS, max_size=20)


def ids(keys: list[int]) -> Ids:
    return np.array(keys, np.int64)


class Index(RuleBasedStateMachine):
    """An index beside a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.index, self.model = KeyIndex(), dict[int, int]()

    @rule(keys=SOME)
    def put(self, keys: list[int]) -> None:
        places = np.arange(len(keys))
        self.index.put(ids(keys), places)
        self.model.update(zip(keys, places.tolist(), strict=True))

    @rule(keys=SOME)
    def remove(self, keys: list[int]) -> None:
        self.index.remove(ids(keys))
        for key in keys:
            self.model.pop(key, None)

    @rule(keys=SOME)
    def find(self, keys: list[int]) -> None:
        assert self.index.find(ids(keys)).tolist() == [self.model.get(key, -1) for key in keys]

    @invariant()
    def has_the_keys(self) -> None:
        assert dict(zip(*(each.tolist() for each in self.index.items()), strict=True)) == self.model
        assert len(self.index) == len(self.model)


TestIndex = Index.TestCase


@given(st.sampled_from([1, 1 << 20, 1 << 44, 0x9E3779B97F4A7C15 >> 1]), st.booleans())
def test_keys_of_any_pattern_are_found_after_few_looks(step: int, negative: bool) -> None:
    count = 20_000
    keys = (np.arange(count, dtype=np.int64) * np.int64(step)) * (-1 if negative else 1)
    assert looks_of(keys).sum() < 2 * count


def looks_of(keys: Ids) -> NDArray[np.int64]:
    """The number of slots at which a search for each key looks, in an index of the keys."""
    index, places = KeyIndex(), np.arange(len(keys))
    index.put(keys, places)
    assert np.array_equal(index.find(keys), places)
    slots = index.slots
    taken = np.flatnonzero(slots[:, 1] >= 0)
    first = np.empty(len(taken), np.int64)
    key_kernels.first_slots(index.array, slots[taken, 0].copy(), first)
    # A search goes in steps of 1, 2, 3 and so on.
    at = (np.arange(len(slots)) * (np.arange(len(slots)) + 1) // 2) % len(slots)
    looks = np.empty(len(slots), np.int64)
    looks[at] = np.arange(len(slots)) + 1
    found: NDArray[np.int64] = looks[(taken - first) % len(slots)]
    return found


def test_nobody_can_choose_keys_that_collide() -> None:
    count = 3000
    mixed = np.arange(count, dtype=np.uint64) + np.uint64(7 << 32)  # They share the bits that choose a slot.
    for factor in (0xD6E8FEB86659FD93, 0x9E3779B97F4A7C15):  # Inverts a mix without a salt.
        mixed = mixed * np.uint64(pow(factor, -1, 1 << 64))
        mixed = mixed ^ (mixed >> np.uint64(32))
    assert looks_of(mixed.astype(np.int64)).sum() < 2 * count


def test_each_index_has_its_own_order_and_keeps_it() -> None:
    keys = np.arange(1000, dtype=np.int64)
    indices = [KeyIndex(keys=1000), KeyIndex(keys=1000)]
    for index in indices:
        index.put(keys, keys)
    assert not np.array_equal(indices[0].slots, indices[1].slots)
    again = KeyIndex.of(indices[0].array.copy(), np.zeros)
    assert np.array_equal(again.find(keys), keys)


def test_keys_are_hashed_by_siphash() -> None:
    if sys.hash_info.algorithm != "siphash13":
        pytest.skip("needs a Python that hashes bytes by SipHash-1-3")
    keys, slots = np.arange(-50, 50, dtype=np.int64) * 0x123456789ABCDEF, np.empty(100, np.int64)
    program = "import sys; print(*(hash(sys.stdin.buffer.read(8)) & 0xFFFF for _ in range(100)))"
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=keys.tobytes(),
        capture_output=True,
        check=True,
        env=os.environ | {"PYTHONHASHSEED": "0"},  # A salt of zeros.
    )
    key_kernels.first_slots(np.zeros((0x10000 + 1, 2), np.int64), keys, slots)
    assert slots.tolist() == list(map(int, done.stdout.split()))


def test_removed_keys_free_their_slots() -> None:
    index = KeyIndex()
    for round_ in range(200):
        keys = np.arange(1000, dtype=np.int64) + 1000 * round_
        index.put(keys, keys)
        index.remove(keys)
    assert len(index) == 0
    assert len(index.slots) < 16_000


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (np.zeros(1, np.int32), "keys of shape [1] and type int32: expected int64 [n]"),
        (np.zeros((1, 1), np.int64), "keys of shape [1, 1]"),
        ([1, 2], "keys: a list, expected a NumPy array"),
        (None, "keys: a NoneType, expected a NumPy array"),
    ],
)
def test_a_lookup_refuses_keys_of_another_type_or_shape(keys: Any, problem: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(problem)):
        KeyedRows(KeyIndex(), np.zeros((1, 2))).lookup(keys)


TestIndex.settings = stateful()

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
from deltasync.client.targets.keyed_table import KeyedTable, KeyIndex
from deltasync.core.rows import Ids, Values
from deltasync.kernels import keys as key_kernels
from deltasync.kernels.compiled import Kernel

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


class Table(RuleBasedStateMachine):
    """A table beside a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.model, self.number = KeyedTable(2, np.float32), dict[int, float](), 0.0

    def values(self, keys: list[int]) -> Values:
        numbers = self.number + 1 + np.arange(len(keys), dtype=np.float32)
        self.number += len(keys)
        return np.stack([numbers, -numbers], axis=1)

    @rule(keys=SOME)
    def insert(self, keys: list[int]) -> None:
        values = self.values(keys)
        self.table.insert(ids(keys), values)
        self.model.update(zip(keys, values[:, 0].tolist(), strict=True))

    @rule(keys=SOME)
    def update(self, keys: list[int]) -> None:
        values = self.values(keys)
        found = self.table.update(ids(keys), values)
        assert found.tolist() == [key in self.model for key in keys]
        known = [(key, value) for key, value in zip(keys, values[:, 0].tolist(), strict=True) if key in self.model]
        self.model.update(known)

    @rule(keys=SOME)
    def erase(self, keys: list[int]) -> None:
        found = self.table.erase(ids(keys))
        assert found.tolist() == [key in self.model for key in keys]
        for key in keys:
            self.model.pop(key, None)

    @rule(keys=SOME)
    def lookup(self, keys: list[int]) -> None:
        values, found = self.table.lookup(ids(keys))
        assert found.tolist() == [key in self.model for key in keys]
        assert values[:, 0].tolist() == [self.model.get(key, 0) for key in keys]
        assert values[:, 1].tolist() == [-self.model.get(key, 0) for key in keys]

    @invariant()
    def holds_the_keys(self) -> None:
        assert self.table.keys().tolist() == sorted(self.model)
        assert len(self.table) == len(self.model)


TestTable = Table.TestCase


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


def test_erased_keys_take_no_memory_for_long() -> None:
    table = KeyedTable(1)
    for round_ in range(200):
        keys = np.arange(1000, dtype=np.int64) + 1000 * round_
        table.insert(keys, np.zeros((1000, 1), np.float32))
        assert table.erase(keys).all()
    assert len(table) == 0
    assert len(table._rows) < 4000
    assert len(table._index.slots) < 16_000


def test_what_is_read_is_a_copy() -> None:
    table = KeyedTable(1)
    table.insert(ids([7]), np.ones((1, 1), np.float32))
    table.lookup(ids([7]))[0][:] = 5
    assert table.lookup(ids([7]))[0].tolist() == [[1]]


@pytest.mark.parametrize(
    ("keys", "values", "said"),
    [
        (
            np.zeros(1, np.int32),
            np.zeros((1, 2), np.float32),
            "keys of shape [1] and type int32: expected int64 [n]",
        ),
        (np.zeros((1, 1), np.int64), np.zeros((1, 2), np.float32), "keys of shape [1, 1]"),
        (
            ids([1]),
            np.zeros((1, 3), np.float32),
            "values of shape [1, 3] and type float32: expected [1, 2]",
        ),
        (ids([1, 2]), np.zeros((1, 2), np.float32), "expected [2, 2]"),
        (ids([1]), np.zeros((1, 2), "U1"), "type <U1"),
    ],
)
def test_what_does_not_fit_is_an_error(keys: Ids, values: Values, said: str) -> None:
    table = KeyedTable(2)
    for change in (table.insert, table.update):
        with pytest.raises(InvalidInput, match=re.escape(said)):
            change(keys, values)
    assert len(table) == 0


@pytest.mark.parametrize("keys", [[1, 2], 1, None])
def test_keys_that_are_no_array_are_an_error(keys: Any) -> None:
    table = KeyedTable(2)
    for use in (table.lookup, table.erase):
        with pytest.raises(InvalidInput, match=f"keys: a {type(keys).__name__}, expected a NumPy array"):
            use(keys)


def test_nothing_is_compiled_by_who_looks_up_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for each in (key_kernels.first_slots, key_kernels.find, key_kernels.put, key_kernels.remove):
        monkeypatch.setattr(each, "_compiled", None)
    index = KeyIndex()
    monkeypatch.setattr(Kernel, "compile", lambda kernel: pytest.fail(f"compiles {kernel.__name__}"))
    index.put(ids([7]), ids([0]))
    assert index.find(ids([7, 8])).tolist() == [0, -1]
    index.remove(ids([7]))


TestTable.settings = stateful()

"""The ids of lookups are stamped in the tables that they are of."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.trainer.tracking.module_tensors import module_tensors
from deltasync.trainer.tracking.row_marking import RowMarking, TrackerCost
from deltasync.trainer.tracking.shards import dense_table
from deltasync.trainer.tracking.stamps import STAMP_BYTES, RowStamps
from deltasync.trainer.tracking.tracked_model import Lookup, TrackedModel, TrackerOptions
from deltasync.trainer.tracking.update_gate import UpdateGate

ROWS = (70, 5, 130)
KEYS = ("a", "b", "c", "d")
# By kernel: which table is marked, and how many keys are looked up in it.
LOOKUPS: dict[str, list[Lookup]] = {
    "one table": [(0, 4)],
    "no table": [(None, 4)],
    "several": [(2, 1), (None, 1), (0, 2)],
    "one without keys": [(1, 1), (0, 0), (2, 3)],
}
BAG = st.lists(st.integers(-3, 140), max_size=4)
INTEGERS = st.sampled_from((torch.int32, torch.int64))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ParameterList([nn.Parameter(torch.zeros(rows, 1)) for rows in ROWS])


class Lookups:
    """Looks rows up, and runs their backward."""

    def __init__(self, by_name: dict[str, list[Lookup]]) -> None:
        tables = [dense_table(tensor) for tensor in module_tensors(Rows())]
        self.stamps, self.cost = RowStamps(tables), TrackerCost()
        self._kernels: dict[str, nn.Module] = {name: nn.Identity() for name in by_name}
        lookups = {self._kernels[name]: looked_up for name, looked_up in by_name.items()}
        model = TrackedModel({}, tables, [], lookups, frozenset(), [], None)
        gate = UpdateGate(torch.device("cpu"))
        self.marking = RowMarking(model, self.stamps, gate, self.cost, TrackerOptions())

    def look_up(self, name: str, features: KeyedJaggedTensor) -> None:
        output = torch.zeros(1, requires_grad=True)
        self.marking.record_lookup(features, output, self._kernels[name])
        output.sum().backward()  # type: ignore[no-untyped-call]


@st.composite
def bags_of_keys(draw: st.DrawFn) -> tuple[list[list[list[int]]], bool]:
    """The ids of each bag of each key, and whether keys have as many bags."""
    even = draw(st.booleans())
    bags = draw(st.integers(0, 3))
    counts = [bags if even else draw(st.integers(0, 3)) for _ in KEYS]
    return [draw(st.lists(BAG, min_size=count, max_size=count)) for count in counts], even


def features_of(
    bags: list[list[list[int]]], *, even: bool, dtype: torch.dtype, lengths_dtype: torch.dtype
) -> KeyedJaggedTensor:
    values = torch.tensor([row for key in bags for bag in key for row in bag], dtype=dtype)
    lengths = torch.tensor([len(bag) for key in bags for bag in key], dtype=lengths_dtype)
    strides = None if even else [[len(key)] for key in bags]
    return KeyedJaggedTensor(list(KEYS), values, lengths=lengths, stride_per_key_per_rank=strides)


@given(
    st.lists(st.tuples(st.sampled_from(list(LOOKUPS)), bags_of_keys()), max_size=4),
    INTEGERS | st.just(torch.int16),
    INTEGERS,
)
def test_lookups_stamp_the_rows_of_their_tables(
    lookups: list[tuple[str, tuple[list[list[list[int]]], bool]]], dtype: torch.dtype, lengths_dtype: torch.dtype
) -> None:
    """An id that a table does not have stands for its row 0."""
    model = Lookups(LOOKUPS)
    expected: list[list[int]] = [[] for _ in ROWS]
    for name, (bags, even) in lookups:
        model.look_up(name, features_of(bags, even=even, dtype=dtype, lengths_dtype=lengths_dtype))
        first = 0
        for table, keys in LOOKUPS[name]:
            if table is not None:
                expected[table] += [row for key in bags[first : first + keys] for bag in key for row in bag]
            first += keys
    model.marking.end_step()
    assert model.marking.nbytes == 0
    assert model.stamps.written.tolist() == [len(ids) for ids in expected]
    assert model.cost.compaction_bytes == STAMP_BYTES * sum(map(len, expected))
    for number, (rows, ids) in enumerate(zip(ROWS, expected, strict=True)):
        assert model.stamps.later(number, 0).tolist() == sorted({row if 0 <= row < rows else 0 for row in ids})


@pytest.mark.parametrize(("ids", "lookups", "most_bytes"), [(1 << 20, 12, 64 << 20), (3, 3000, 1024 * 3 * 8)])
def test_lookups_take_bounded_memory_although_no_step_ends(ids: int, lookups: int, most_bytes: int) -> None:
    model = Lookups(LOOKUPS)
    lengths = torch.tensor([ids, 0, 0, 0], dtype=torch.int32)
    features = KeyedJaggedTensor(list(KEYS), torch.arange(ids) % ROWS[0], lengths=lengths)
    held = []
    for _ in range(lookups):
        model.look_up("one table", features)
        held.append(model.marking.nbytes)
    assert max(held) <= most_bytes
    assert len(model.stamps.later(0, 0)) == min(ids, ROWS[0])

"""Batches of one lookup put together, against a plain model: for each key, its examples; an example is its ids."""

from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from deltasync.base.errors import InvalidInput
from deltasync.trainer.pipelines.deferred_tables import (
    DeferredLookup,
    DeferredTables,
    one_batch,
    why_not_deferred,
)

Example = list[int]
# By key, which may come twice: two tables of a kernel may have the same feature.
Plain = list[list[Example]]
KEYS = ("f", "g", "f")

EXAMPLE = st.lists(st.integers(0, 2**40), max_size=3)


def plain_batches(keys: int) -> st.SearchStrategy[list[Plain]]:
    """Some batches with this number of keys, each of its own size."""
    one = st.integers(1, 4).flatmap(
        lambda size: st.lists(st.lists(EXAMPLE, min_size=size, max_size=size), min_size=keys, max_size=keys)
    )
    return st.lists(one, min_size=1, max_size=4)


BATCHES = st.integers(1, len(KEYS)).flatmap(plain_batches)


def features(plain: Plain, *, weighted: bool) -> KeyedJaggedTensor:
    examples = [example for of_key in plain for example in of_key]
    ids = torch.tensor([one for example in examples for one in example], dtype=torch.int64)
    lengths = torch.tensor([len(example) for example in examples], dtype=torch.int32)
    return KeyedJaggedTensor(list(KEYS[: len(plain)]), ids, _weights(ids) if weighted else None, lengths)


def _weights(ids: torch.Tensor) -> torch.Tensor:
    """So that it shows if one goes to another id."""
    return ids.double() / 2


def as_plain(kjt: KeyedJaggedTensor) -> Plain:
    ids, lengths = kjt.values().tolist(), kjt.lengths().tolist()
    ends = list(accumulate(lengths))
    examples = [ids[end - length : end] for end, length in zip(ends, lengths, strict=True)]
    return [examples[start : start + kjt.stride()] for start in range(0, len(examples), kjt.stride())]


def together(batches: list[Plain]) -> Plain:
    """For each key, the examples of all batches."""
    return [[example for of_key in of_keys for example in of_key] for of_keys in zip(*batches, strict=True)]


@given(BATCHES, st.booleans())
def test_one_batch_has_the_examples_of_all(batches: list[Plain], weighted: bool) -> None:
    found = one_batch([features(batch, weighted=weighted) for batch in batches])
    expected = together(batches)
    assert as_plain(found) == expected
    by_key = found.split([1] * len(expected))  # As a lookup with several kernels does.
    assert [as_plain(one)[0] for one in by_key] == expected
    assert found.keys() == list(KEYS[: len(expected)])
    assert found.stride() == len(expected[0])
    assert found.length_per_key() == [sum(map(len, of_key)) for of_key in expected]
    assert found.values().dtype == torch.int64
    if weighted:
        assert torch.equal(found.weights(), _weights(found.values()))
    else:
        assert found.weights_or_none() is None


def test_features_of_variable_batch_size_cannot_be_kept() -> None:
    variable = KeyedJaggedTensor(
        keys=["f", "g"],
        values=torch.arange(3),
        lengths=torch.ones(3, dtype=torch.int32),
        stride_per_key_per_rank=[[2], [1]],
    )
    assert why_not_deferred(variable) == "its features ['f', 'g'] vary in batch size"


class SumOfRows(nn.Module):
    """A lookup of one table: adds up the rows of each example, feature beside feature."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.arange(12.0).view(6, 2))
        self._emb_modules: list[Any] = []

    def forward(self, found: KeyedJaggedTensor) -> torch.Tensor:
        ids, lengths = found.values(), found.lengths()
        weighted = self.rows[ids] * found.weights().unsqueeze(1)
        examples = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        pooled = torch.zeros(len(lengths), 2).index_add(0, examples, weighted)
        return pooled.view(len(found.keys()), -1, 2).transpose(0, 1).flatten(1)


FIRST: Plain = [[[1, 2], []], [[5], [1]]]
SECOND: Plain = [[[0]], [[2, 2]]]


def ids_of(plain: Plain) -> KeyedJaggedTensor:
    found = features(plain, weighted=True)
    return KeyedJaggedTensor(found.keys(), found.values(), found.weights().float(), found.lengths())


def train(lookup: Any, batch: KeyedJaggedTensor) -> torch.Tensor:
    output: torch.Tensor = lookup(batch)
    output.square().sum().backward()  # type: ignore[no-untyped-call]
    return output


def deferring(lookup: SumOfRows, name: str = "lookup") -> DeferredLookup:
    return DeferredLookup(DeferredTables(nn.Sequential(), lambda: True), name, lookup)


def is_as_of_one_batch(lookup: SumOfRows) -> bool:
    """Its gradient is that of the two batches together."""
    other = SumOfRows()
    train(other, ids_of(together([FIRST, SECOND])))
    assert lookup.rows.grad is not None
    assert other.rows.grad is not None
    return torch.equal(lookup.rows.grad, other.rows.grad)


def test_a_deferred_lookup_updates_as_one_batch_if_batches_are_reused() -> None:
    lookup = SumOfRows()
    deferred = deferring(lookup)
    for batch in FIRST, SECOND:
        found = ids_of(batch)
        assert torch.equal(train(deferred, found), lookup(ids_of(batch)))
        assert lookup.rows.grad is None
        for memory in found.values(), found.weights(), found.lengths():
            memory.fill_(1)
    deferred.apply()
    assert is_as_of_one_batch(lookup)
    assert deferred.pending == []


def test_outputs_without_a_gradient_are_left_out() -> None:
    lookup = SumOfRows()
    deferred = deferring(lookup)
    outputs = [deferred(ids_of(batch)) for batch in (FIRST, SECOND, FIRST)]
    outputs[1].sum().backward()  # type: ignore[no-untyped-call]
    deferred.apply()
    assert lookup.rows.grad is not None
    assert lookup.rows.grad.sum(1).tolist() == [0, 0, 4, 0, 0, 0]
    deferred(ids_of(FIRST))
    lookup.rows.grad = None
    deferred.apply()
    assert lookup.rows.grad is None


def test_a_lookup_without_gradients_is_not_kept() -> None:
    deferred = deferring(SumOfRows())
    with torch.no_grad():
        assert not deferred(ids_of(FIRST)).requires_grad
    assert deferred.pending == []


def test_outside_of_its_forward_a_lookup_is_as_it_was() -> None:
    lookup = SumOfRows()
    deferred = DeferredLookup(DeferredTables(nn.Sequential(), lambda: False), "lookup", lookup)
    train(deferred, ids_of(FIRST))
    assert lookup.rows.grad is not None
    assert deferred.pending == []


def test_features_that_cannot_be_kept_are_refused_by_name() -> None:
    learnt = ids_of(FIRST)
    learnt.weights().requires_grad_()
    assert not why_not_deferred(ids_of(FIRST))
    deferred = deferring(SumOfRows(), "lookup of module 'm'")
    said = r"lookup of module 'm': the weights of its features \['f', 'g'\] are learnt in its backward"
    with pytest.raises(InvalidInput, match=said):
        deferred(learnt)
    with torch.no_grad():
        deferred(learnt)


@pytest.mark.parametrize("module", [nn.Linear(1, 1), nn.Sequential()])
def test_a_model_without_tables_has_nothing_to_keep(module: Any) -> None:
    tables = DeferredTables(module, lambda: True)
    tables.attach()
    tables.apply()
    tables.clear()
    tables.detach()
    assert tables.outputs == []

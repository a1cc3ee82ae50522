"""A TensorDict's jagged keys as a KeyedJaggedTensor, against plain lists of ids."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, lazy_stack
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from deltasync.base.errors import InvalidInput
from deltasync.trainer.pipelines import to_kjt

Examples = list[list[int]]


def flat(examples: Examples, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor([one for example in examples for one in example], dtype=dtype)


def lengths(examples: Examples, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor([len(example) for example in examples], dtype=dtype)


def offsets(examples: Examples, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.cat([torch.zeros(1, dtype=dtype), lengths(examples).cumsum(0).to(dtype)])


def by_lengths(examples: Examples, dtype: torch.dtype) -> JaggedTensor:
    return JaggedTensor(flat(examples, dtype), lengths=lengths(examples, dtype))


def by_offsets(examples: Examples, dtype: torch.dtype) -> JaggedTensor:
    return JaggedTensor(flat(examples, dtype), offsets=offsets(examples, dtype))


def by_both(examples: Examples, dtype: torch.dtype) -> JaggedTensor:
    return JaggedTensor(flat(examples, dtype), lengths=lengths(examples), offsets=offsets(examples, dtype))


def nested(examples: Examples, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.nested.nested_tensor([flat([one], dtype) for one in examples], layout=torch.jagged)


def nested_by_offsets(examples: Examples, dtype: torch.dtype) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(flat(examples, dtype), offsets(examples))


def narrowed(examples: Examples, dtype: torch.dtype) -> torch.Tensor:
    """Ids have others before and after them."""
    padded = torch.full((len(examples), 8), 99, dtype=dtype)
    for row, example in zip(padded, examples, strict=True):
        row[2 : 2 + len(example)] = flat([example], dtype)
    starts = torch.full((len(examples),), 2)
    return torch.nested.narrow(padded, 1, starts, lengths(examples), layout=torch.jagged)


def chunk(examples: Examples, dtype: torch.dtype) -> torch.Tensor:
    """The second half of twice as many examples."""
    second: torch.Tensor = nested([[99]] * len(examples) + examples, dtype).chunk(2)[1]
    return second


WAYS: list[Callable[[Examples, torch.dtype], Any]] = [
    by_lengths,
    by_offsets,
    by_both,
    nested,
    nested_by_offsets,
    narrowed,
    chunk,
]
DTYPES = (torch.int32, torch.int64)
KEYS = tuple("abcdef")


@st.composite
def features(draw: st.DrawFn) -> tuple[dict[str, Examples], TensorDict]:
    """The ids of some keys, and a TensorDict that has them in any order, each in its own way."""
    size = draw(st.integers(1, 4))
    keys = draw(st.lists(st.sampled_from(KEYS), min_size=1, unique=True))
    examples = st.lists(st.lists(st.integers(0, 50), max_size=5), min_size=size, max_size=size)
    of_key = {key: draw(examples) for key in keys}
    values = {key: draw(st.sampled_from(WAYS))(of_key[key], draw(st.sampled_from(DTYPES))) for key in keys}
    return of_key, TensorDict(values, batch_size=draw(st.sampled_from([[], [size]])))


@given(features(), st.data())
def test_any_keys_that_lie_in_any_way(drawn: tuple[dict[str, Examples], TensorDict], data: st.DataObject) -> None:
    of_key, tensordict = drawn
    wanted = data.draw(st.lists(st.sampled_from(sorted(of_key)), min_size=1, unique=True))
    kjt = to_kjt(tensordict, wanted)
    assert kjt.keys() == wanted
    assert {key: listed(kjt[key]) for key in wanted} == {key: of_key[key] for key in wanted}
    assert kjt.stride() == len(of_key[wanted[0]])
    assert kjt.length_per_key() == [sum(map(len, of_key[key])) for key in wanted]


@given(
    st.lists(st.lists(st.lists(st.integers(0, 50), max_size=3), min_size=2, max_size=2), min_size=1, max_size=4)
)
def test_weights_go_with_their_ids(of_keys: list[Examples]) -> None:
    of_key = dict(zip(KEYS, of_keys, strict=False))
    values = {
        key: JaggedTensor(flat(of), lengths=lengths(of), weights=flat(of) * 0.5 + number)
        for number, (key, of) in enumerate(of_key.items())
    }
    wanted = list(reversed(of_key))
    kjt = to_kjt(TensorDict(values), wanted, weighted=True)
    for number, key in enumerate(of_key):
        assert kjt[key].weights().tolist() == [one * 0.5 + number for one in flat(of_key[key]).tolist()]
    assert to_kjt(TensorDict(values), wanted).weights_or_none() is None


def listed(jagged: JaggedTensor) -> Examples:
    return [one.tolist() for one in jagged.to_dense()]


RIGHT = nested([[1, 2], [3]])
LENGTHS = torch.tensor([2, 1])
NO_IDS = [
    torch.ones(3),
    torch.ones(3, dtype=torch.bool),
    torch.ones(3, dtype=torch.int16),
    torch.ones(3, 1).long(),
]
TRANSPOSED = torch.nested.nested_tensor(
    [torch.ones(2, 1, dtype=torch.int64), torch.ones(1, 1, dtype=torch.int64)], layout=torch.jagged
).transpose(1, 2)


def ids_123(lengths: list[int] | torch.Tensor = LENGTHS, weights: torch.Tensor | None = None) -> JaggedTensor:
    return JaggedTensor(torch.tensor([1, 2, 3]), lengths=torch.as_tensor(lengths), weights=weights)


def refused(wrong: Any, *, weighted: bool = False) -> str:
    """What is said about what is under "wrong", beside what lies right."""
    features = TensorDict({"right": ids_123(weights=torch.ones(3)), "wrong": wrong})
    with pytest.raises(InvalidInput) as refusal:
        to_kjt(features, ["right", "wrong"], **({"weighted": True} if weighted else {}))
    assert "'wrong'" in str(refusal.value)
    return str(refusal.value)


def test_a_missing_key_is_named_and_those_that_are_there() -> None:
    with pytest.raises(InvalidInput, match=r"'c' is not in the TensorDict, which has a, b"):
        to_kjt(TensorDict({"a": RIGHT, "b": RIGHT}), ["a", "c"])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        *((JaggedTensor(ids, lengths=LENGTHS), "") for ids in NO_IDS),
        *((torch.nested.nested_tensor(list(torch.split(ids, [2, 1])), layout=torch.jagged), "") for ids in NO_IDS),
        (torch.tensor([1, 2]), "expected ids of B examples"),
        (torch.tensor([[1, 2], [3, 0]]), "expected ids of B examples"),
        (RIGHT.unsqueeze(2), "expected ids of B examples"),
        ("text", "expected ids of B examples"),
        (TensorDict({"wrong": RIGHT}), "expected ids of B examples"),
        (
            KeyedJaggedTensor(["wrong"], torch.tensor([1]), lengths=torch.tensor([1, 0])),
            "expected ids of B examples",
        ),
        (TRANSPOSED, ""),
        (nested([[1]]), "1 examples, key 'right' has 2"),
        *((ids_123(lengths), "3 ids") for lengths in [[2, 2], [1, 1], [0, 0]]),
    ],
)
def test_what_are_no_ids_of_so_many_examples_is_refused(wrong: Any, said: str) -> None:
    assert said in refused(wrong)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_of_another_layout_is_refused() -> None:
    rows = [torch.tensor([1, 2]), torch.tensor([3])]
    assert "torch.strided" in refused(torch.nested.nested_tensor(rows, layout=torch.strided))


def test_lengths_that_are_wrong_in_opposite_ways_are_refused() -> None:
    longer = JaggedTensor(torch.tensor([1, 2]), lengths=LENGTHS)
    shorter = JaggedTensor(torch.tensor([1, 2]), lengths=torch.tensor([1, 0]))
    with pytest.raises(InvalidInput, match="'a'"):
        to_kjt(TensorDict({"a": longer, "b": shorter}), ["a", "b"])


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (ids_123(), "without weights"),
        (RIGHT, "without weights"),
        *((ids_123(weights=weights), "weights") for weights in (torch.ones(2), torch.ones(4), torch.ones(3, 1))),
    ],
)
def test_weights_that_do_not_fit_ids_are_refused(wrong: Any, said: str) -> None:
    assert said in refused(wrong, weighted=True)


def test_examples_that_are_stacked_lazily_are_refused() -> None:
    with pytest.raises(RuntimeError, match="under the key 'a'"):  # By tensordict itself, which tells what to do.
        to_kjt(lazy_stack([TensorDict({"a": torch.tensor([1, 2])}), TensorDict({"a": torch.tensor([3])})]), ["a"])
    with pytest.raises(InvalidInput, match="'a'"):
        to_kjt(lazy_stack([TensorDict({"a": by_lengths([[1]], torch.int64)})] * 2), ["a"])


@pytest.mark.parametrize("keys", [[], ["a", "a"]])
def test_no_keys_or_one_twice_are_refused(keys: list[str]) -> None:
    with pytest.raises(InvalidInput, match="keys"):
        to_kjt(TensorDict({"a": RIGHT}), keys)


def test_no_examples() -> None:
    nothing = JaggedTensor(torch.zeros(0, dtype=torch.int64), lengths=torch.zeros(0, dtype=torch.int64))
    kjt = to_kjt(TensorDict({"a": nothing, "b": nothing}), ["b", "a"])
    assert (kjt.keys(), kjt.stride(), kjt.values().tolist(), kjt.lengths().tolist()) == (["b", "a"], 0, [], [])


def test_other_keys_may_hold_anything() -> None:
    others = {"text": "text", "dense": torch.ones(2), "more": TensorDict({"a": RIGHT}), "float": torch.ones(3)}
    assert listed(to_kjt(TensorDict({**others, "a": RIGHT}), ["a"])["a"]) == [[1, 2], [3]]


def test_values_of_a_keyed_jagged_tensor() -> None:
    """As its `to_dict` hands them out: views into all of its ids, with offsets or lengths."""
    kjt = KeyedJaggedTensor(["a", "b"], torch.arange(6), lengths=torch.tensor([2, 1, 0, 3]))
    for of_key in (kjt.to_dict(), {key: kjt[key] for key in kjt.keys()}):  # noqa: SIM118
        again = to_kjt(TensorDict(of_key), ["b", "a"])
        assert {key: listed(again[key]) for key in "ab"} == {"a": [[0, 1], [2]], "b": [[], [3, 4, 5]]}

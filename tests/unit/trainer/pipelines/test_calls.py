"""Whether a call is the one that was made ahead."""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from deltasync.trainer.pipelines.calls import ModuleCall, is_same

Pair = namedtuple("Pair", "one other")  # What forwards return that are traced.


@dataclass
class Held:
    value: Any


CONSTANTS = st.one_of(
    st.integers(-2, 2),
    st.sampled_from((0.0, 0.5, 1.0, -0.0, float("inf"), 1j, True, False, None, "", "a", b"a")),
    st.sampled_from((torch.int64, torch.float32, torch.device("cpu"), torch.strided, slice(1), range(2))),
)
VALUES = st.recursive(
    CONSTANTS,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
        st.tuples(inner, inner).map(lambda both: Pair(*both)),
        inner.map(Held),
    ),
    max_leaves=6,
)


def model(value: Any) -> Any:
    """What tells values apart, in words: types, contents and order."""
    if isinstance(value, Held):
        return "Held", model(value.value)
    if isinstance(value, list | tuple):
        return type(value).__name__, [model(item) for item in value]
    if isinstance(value, dict):
        return [(key, model(item)) for key, item in value.items()]
    return type(value).__name__, value


@given(VALUES, VALUES)
def test_constants_are_the_same_if_their_types_and_contents_are(one: Any, other: Any) -> None:
    assert is_same(one, other) == (model(one) == model(other))


@given(VALUES)
def test_a_value_made_anew_is_the_same(value: Any) -> None:
    assert is_same(value, _anew(value))


def _anew(value: Any) -> Any:
    if isinstance(value, Held):
        return Held(_anew(value.value))
    if isinstance(value, Pair):
        return Pair(*map(_anew, value))
    if isinstance(value, list | tuple):
        return type(value)(_anew(item) for item in value)
    return {key: _anew(item) for key, item in value.items()} if isinstance(value, dict) else value


def jagged(**parts: Any) -> KeyedJaggedTensor:
    whole = {"values": VALUES_OF, "lengths": LENGTHS, "weights": None, "keys": ["f", "g"]} | parts
    return KeyedJaggedTensor(**whole)


VALUES_OF, LENGTHS = torch.arange(4), torch.tensor([1, 1, 2, 0])
TENSOR = torch.arange(6)


@pytest.mark.parametrize(
    "again",
    [
        lambda: (TENSOR, TENSOR[:]),
        lambda: (TENSOR[2:], TENSOR[2:]),
        lambda: (TENSOR.view(2, 3), TENSOR.view(2, 3)),
        lambda: (jagged(), jagged()),
        lambda: (JaggedTensor(VALUES_OF, lengths=LENGTHS), JaggedTensor(VALUES_OF, lengths=LENGTHS)),
        lambda: (jagged(weights=TENSOR[:4]), jagged(weights=TENSOR[:4])),
        lambda: ({"a": [TENSOR]}, {"a": [TENSOR.detach()]}),
        lambda: (TensorDict({"a": TENSOR}, batch_size=[6]), TensorDict({"a": TENSOR}, batch_size=[6])),
        lambda: (Held(TENSOR), Held(TENSOR)),
    ],
)
def test_the_same_memory_is_the_same(again: Callable[[], tuple[Any, Any]]) -> None:
    assert is_same(*again())


@pytest.mark.parametrize(
    "others",
    [
        lambda: (TENSOR, TENSOR.clone()),
        lambda: (TENSOR[1:], TENSOR[:-1]),
        lambda: (TENSOR, TENSOR[:5]),
        lambda: (TENSOR.view(2, 3), TENSOR.view(3, 2)),
        lambda: (TENSOR.view(2, 3), TENSOR.view(3, 2).T),
        lambda: (TENSOR, TENSOR.view(torch.float64)),
        lambda: (TENSOR, TENSOR.tolist()),
        lambda: (TENSOR, None),
        lambda: (jagged(), jagged(keys=["g", "f"])),
        lambda: (jagged(), jagged(values=VALUES_OF.clone())),
        lambda: (jagged(), jagged(lengths=LENGTHS.clone())),
        lambda: (jagged(), jagged(weights=TENSOR[:4])),
        lambda: (jagged(weights=TENSOR[:4]), jagged(weights=TENSOR[1:5])),
        lambda: (jagged(), JaggedTensor(VALUES_OF, lengths=LENGTHS)),
        lambda: ({"a": TENSOR}, {"b": TENSOR}),
        lambda: (TensorDict({"a": TENSOR}, batch_size=[6]), TensorDict({"a": TENSOR.clone()}, batch_size=[6])),
        lambda: (Held(TENSOR), Held(TENSOR.clone())),
        lambda: (object(), object()),
    ],
)
def test_other_memory_is_another(others: Callable[[], tuple[Any, Any]]) -> None:
    assert not is_same(*others())
    assert not is_same(*reversed(others()))


def test_a_call_stands_for_one_with_the_same_arguments() -> None:
    call = ModuleCall.of([TENSOR, 1], {"by": [TENSOR]}, "made")
    assert call.result == "made"
    assert call.why_different([TENSOR, 1], {"by": [TENSOR]}) == ""


@pytest.mark.parametrize(
    ("args", "kwargs", "reason"),
    [
        ([TENSOR], {"by": 1}, r"it has arguments \[0, 'by'\], where the traced forward has \[0, 1, 'by'\]"),
        ([TENSOR, 1], {}, r"it has arguments \[0, 1\], where"),
        ([TENSOR, 1], {"of": 1}, r"it has arguments \[0, 1, 'of'\], where"),
        ([TENSOR, 2], {"by": 1}, "its argument 1 is not the one"),
        ([TENSOR, True], {"by": 1}, "its argument 1 is not the one"),
        ([TENSOR, 1], {"by": 2}, "its argument by is not the one"),
        ([TENSOR.clone(), 1], {"by": 1}, "its argument 0 is not the one"),
    ],
)
def test_a_call_says_which_argument_is_another(args: list[Any], kwargs: dict[str, Any], reason: str) -> None:
    call = ModuleCall.of([TENSOR, 1], {"by": 1})
    with pytest.raises(AssertionError, match=reason):
        assert not call.why_different(args, kwargs), call.why_different(args, kwargs)


@pytest.mark.parametrize(
    ("path", "hold"),
    [
        ("0", lambda tensor: tensor),
        ("0.a.1", lambda tensor: {"a": [None, tensor]}),
        ("0.value", Held),
        ("0._values", lambda tensor: jagged(values=tensor)),
        ("0._weights", lambda tensor: jagged(weights=tensor)),
        ("0._lengths", lambda tensor: jagged(lengths=tensor)),
        ("0.a", lambda tensor: TensorDict({"a": tensor}, batch_size=[4])),
    ],
)
def test_a_call_says_which_tensor_is_written_to(path: str, hold: Callable[[torch.Tensor], Any]) -> None:
    tensor = LENGTHS.clone()
    argument = hold(tensor)
    call = ModuleCall.of([argument], {})
    assert call.why_different([argument], {}) == ""
    tensor[:1] += 1
    assert call.why_different([argument], {}) == f"its argument {path} is written to on the way"


def test_a_call_says_that_the_ids_are_replaced() -> None:
    features = jagged()
    call = ModuleCall.of([features], {})
    features._values = VALUES_OF + 1
    assert call.why_different([features], {}) == "its argument 0._values is written to on the way"


def test_offsets_that_are_computed_later_are_no_change() -> None:
    features = jagged()
    call = ModuleCall.of([features], {})
    features.offsets()
    assert call.why_different([features], {}) == ""


def test_tensors_of_inference_are_taken_as_they_are() -> None:
    with torch.inference_mode():
        tensor = torch.arange(3)
    assert ModuleCall.of([tensor], {}).why_different([tensor], {}) == ""


def test_nested_tensors_are_the_same_only_if_they_are_one() -> None:
    nested = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    call = ModuleCall.of([nested], {})
    assert call.why_different([nested], {}) == ""
    assert call.why_different([nested.clone()], {}) != ""
    nested.values().add_(1)
    assert call.why_different([nested], {}) == "its argument 0._values is written to on the way"

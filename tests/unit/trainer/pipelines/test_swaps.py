import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deltasync.trainer.pipelines.swaps import Swaps

NAMES = ("own", "of_class", "missing")


class Owner:
    of_class = "of the class"

    def __init__(self) -> None:
        self.own = "own"


def test_put_replaces_and_undo_puts_back() -> None:
    swaps, owner = Swaps(), Owner()
    swaps.put(owner, "own", 1)
    assert vars(owner) == {"own": 1}
    assert swaps.in_place
    swaps.undo()
    assert vars(owner) == {"own": "own"}
    assert swaps.in_place


def test_a_method_of_the_class_comes_back() -> None:
    swaps, module = Swaps(), nn.Linear(1, 1)
    before = dict(vars(module))
    swaps.put(module, "forward", lambda: "swapped")
    assert module() == "swapped"
    swaps.undo()
    assert vars(module) == before
    assert module.forward == nn.Linear.forward.__get__(module)


def test_names_of_parameters_stay() -> None:
    swaps, model = Swaps(), nn.Sequential(nn.Linear(1, 1))
    keys = list(model.state_dict())
    swaps.put(model[0], "forward", lambda value: value)
    assert list(model.state_dict()) == keys


@pytest.mark.parametrize("name", NAMES)
def test_what_others_have_put_in_its_place_is_noticed(name: str) -> None:
    swaps, owner = Swaps(), Owner()
    swaps.put(owner, name, 1)
    setattr(owner, name, 1.0)  # Equal, but another.
    assert not swaps.in_place


def test_what_others_have_taken_away_is_noticed() -> None:
    swaps, owner = Swaps(), Owner()
    swaps.put(owner, "of_class", 1)
    del owner.of_class
    assert not swaps.in_place


def test_undo_twice_changes_nothing_more() -> None:
    swaps, owner = Swaps(), Owner()
    swaps.put(owner, "own", 1)
    swaps.undo()
    owner.own = "later"
    swaps.undo()
    assert owner.own == "later"


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(NAMES), st.integers()), max_size=12))
def test_any_swaps_are_undone(puts: list[tuple[int, str, int]]) -> None:
    swaps, owners = Swaps(), [Owner() for _ in range(3)]
    before = [dict(vars(owner)) for owner in owners]
    for number, name, value in puts:
        swaps.put(owners[number], name, value)
        assert getattr(owners[number], name) == value
    swaps.undo()
    assert [vars(owner) for owner in owners] == before

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from deltasync.trainer.pipelines.lookahead import AttributePatches

NAMES = ("own", "of_class", "missing")


class Owner:
    of_class = "of the class"

    def __init__(self) -> None:
        self.own = "own"


def test_a_method_of_the_class_comes_back() -> None:
    patches, module = AttributePatches(), nn.Linear(1, 1)
    before = dict(vars(module))
    patches.replace(module, "forward", lambda: "swapped")
    assert module() == "swapped"
    patches.undo()
    assert vars(module) == before
    assert module.forward == nn.Linear.forward.__get__(module)


@pytest.mark.parametrize("name", NAMES)
def test_what_others_have_put_in_its_place_is_noticed(name: str) -> None:
    patches, owner = AttributePatches(), Owner()
    patches.replace(owner, name, 1)
    setattr(owner, name, 1.0)  # Equal, but another.
    assert not patches.in_place


def test_what_others_have_taken_away_is_noticed() -> None:
    patches, owner = AttributePatches(), Owner()
    patches.replace(owner, "of_class", 1)
    del owner.of_class
    assert not patches.in_place


def test_undo_twice_changes_nothing_more() -> None:
    patches, owner = AttributePatches(), Owner()
    patches.replace(owner, "own", 1)
    patches.undo()
    owner.own = "later"
    patches.undo()
    assert owner.own == "later"


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(NAMES), st.integers()), max_size=12))
def test_any_swaps_are_undone(puts: list[tuple[int, str, int]]) -> None:
    patches, owners = AttributePatches(), [Owner() for _ in range(3)]
    before = [dict(vars(owner)) for owner in owners]
    for number, name, value in puts:
        patches.replace(owners[number], name, value)
        assert getattr(owners[number], name) == value
    patches.undo()
    assert [vars(owner) for owner in owners] == before

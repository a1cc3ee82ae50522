import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.trainer.pipelines.lookahead import AttributePatches

NAMES = ("own", "of_class", "missing")


class Owner:
    of_class = "of the class"

    def __init__(self) -> None:
        self.own = "own"


@pytest.mark.parametrize("name", NAMES)
def test_what_others_have_put_in_its_place_is_noticed(name: str) -> None:
    patches, owner = AttributePatches(), Owner()
    patches.replace(owner, name, 1)
    vars(owner)[name] = 1.0  # Equal, but another.
    assert not patches.in_place


def test_what_others_have_taken_away_is_noticed() -> None:
    patches, owner = AttributePatches(), Owner()
    patches.replace(owner, "of_class", 1)
    del owner.of_class
    assert not patches.in_place


@given(st.lists(st.tuples(st.integers(0, 2), st.sampled_from(NAMES), st.integers()), max_size=12))
def test_any_swaps_are_undone(puts: list[tuple[int, str, int]]) -> None:
    patches, owners = AttributePatches(), [Owner() for _ in range(3)]
    before = [dict(vars(owner)) for owner in owners]
    for number, name, value in puts:
        patches.replace(owners[number], name, value)
        assert getattr(owners[number], name) == value
    patches.undo()
    assert [vars(owner) for owner in owners] == before

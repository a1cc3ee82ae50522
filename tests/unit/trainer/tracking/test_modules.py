"""Which tables are skipped."""

from hypothesis import given
from hypothesis import strategies as st

from deltasync.trainer.tracking.modules import is_skipped

FQNS = st.lists(st.sampled_from(("a", "ab", "b", "t0")), min_size=1, max_size=5)


def is_run(parts: list[str], skip: list[str]) -> bool:
    return any(parts[at : at + len(skip)] == skip for at in range(len(parts)))


@given(FQNS, st.lists(FQNS, max_size=3))
def test_a_run_of_parts_skips_a_table(parts: list[str], skips: list[list[str]]) -> None:
    expected = any(is_run(parts, skip) for skip in skips)
    assert is_skipped(".".join(parts), [".".join(skip) for skip in skips]) == expected


@given(FQNS, st.data())
def test_by_name_by_parent_and_by_itself(parts: list[str], data: st.DataObject) -> None:
    end = data.draw(st.integers(1, len(parts)))
    for skip in (parts[-1], ".".join(parts[:end]), ".".join(parts)):
        assert is_skipped(".".join(parts), [skip])
    assert not is_skipped(".".join(parts), [])

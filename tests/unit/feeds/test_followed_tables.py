"""What policies follow is what their patterns say, however tables and policies come and go."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from deltasync.core.policy import Policy
from deltasync.core.tables import TableSpec
from deltasync.feeds.followed_tables import FollowedTables

NAMES = ("user", "item", "towers.user", "ad")
PATTERNS = st.lists(st.sampled_from(["*", "user", "*user", "i*", "none"]), min_size=1, max_size=2, unique=True)
STEPS = st.lists(st.tuples(st.sampled_from(["add", "remove"]), st.sampled_from(NAMES), PATTERNS), max_size=20)


@given(STEPS)
def test_what_is_followed_is_what_the_patterns_say(steps: list[tuple[str, str, list[str]]]) -> None:
    followed, tables = FollowedTables(), list[Any]()
    for step, name, patterns in steps:
        if step == "add":
            tables.append(SimpleNamespace(spec=TableSpec(name, 1, 2)))
        else:
            tables = [each for each in tables if each.spec.name != name]
        for _ in range(2):
            policy = Policy(tables=tuple(patterns))
            assert followed.of(policy, tables) == tuple(each for each in tables if policy.follows(each.spec))

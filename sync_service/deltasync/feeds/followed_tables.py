"""Which of a model's tables policies follow: found once, for as long as the tables stay the same."""

from dataclasses import dataclass, field

from deltasync.core.policy import Policy
from deltasync.core.stamps import StampedTable

# So many patterns are remembered; operators may change them as often as they like.
_MOST = 4096


@dataclass(frozen=True)
class _Known:
    tables: list[StampedTable]
    count: int
    followed: dict[tuple[str, ...], tuple[StampedTable, ...]] = field(default_factory=dict)


class FollowedTables:
    """Used by one model, on any thread: what is known is replaced whole, and may be found twice."""

    def __init__(self) -> None:
        self._known = _Known([], 0)

    def of(self, policy: Policy, tables: list[StampedTable]) -> tuple[StampedTable, ...]:
        """The tables that a policy follows, of a list that is only appended to, or replaced."""
        known = self._known
        if known.tables is not tables or known.count != len(tables) or len(known.followed) >= _MOST:
            known = self._known = _Known(tables, len(tables))
        if (found := known.followed.get(policy.tables)) is None:
            found = known.followed[policy.tables] = tuple(each for each in tables if policy.follows(each.spec))
        return found

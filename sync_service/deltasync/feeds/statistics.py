"""What a release took of the dirty rows and what it left for later: kept with the view, and shown to operators."""

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Amount:
    """Some dirty rows: how many, the bytes of their ids and values as sent, and the L2 norm of their deltas."""

    rows: int = 0
    bytes: int = 0
    norm: float = 0.0


@dataclass(frozen=True)
class Backlog:
    """The dirty rows of one table that are left for later releases.

    Attributes:
        amount: how much they are.
        table_norm: the L2 norm of all rows of the model's table.
        oldest_version: the version since which the oldest of them is dirty; 0 = there is none, or it is not known.
    """

    amount: Amount
    table_norm: float = 0.0
    oldest_version: int = 0


@dataclass(frozen=True, kw_only=True)
class ReleaseStatistics:
    """One release of a view.

    Attributes:
        number: the release's number.
        version: the version it was made at.
        made_unix_ns: when it was made, nanoseconds since 1970.
        taken: the rows it took.
        backlog: the rows of all tables that are left for later, as of the last time they were looked for.
        reason: why these rows were taken, in one sentence.
    """

    number: int
    version: int
    made_unix_ns: int
    taken: Amount
    backlog: Amount
    reason: str


def total(amounts: Iterable[Amount]) -> Amount:
    """The amounts of several tables together."""
    every = list(amounts)
    rows, size = sum(each.rows for each in every), sum(each.bytes for each in every)
    return Amount(rows, size, math.hypot(*(each.norm for each in every)))

"""What a release took, and what it left: kept with the view, and told to operators."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from deltasync.feeds.release import Head
from deltasync.views.ranking import DirtyRows, Mask


@dataclass(frozen=True, kw_only=True)
class Account:
    """One release. Times are nanoseconds since 1970, norms L2.

    Attributes:
        number: the release's number.
        version: the version it was made at.
        made_unix_ns: when.
        rows: rows it took.
        bytes: bytes of their ids and values.
        norm: of what they changed by.
        reason: why these rows, in one sentence.
        left_rows: dirty rows it left, as of the last look.
        left_bytes: what these take once they go out.
        left_norm: of what is unsent of them.
    """

    number: int
    version: int
    made_unix_ns: int
    rows: int
    bytes: int
    norm: float
    reason: str
    left_rows: int = 0
    left_bytes: int = 0
    left_norm: float = 0.0


@dataclass(frozen=True)
class TableLeft:
    """What a look has left of a table: dirty rows, bytes that they take, the norm of what is unsent of them, the
    table's own norm then, and the version since which the oldest is dirty (0 = none is).
    """

    rows: int = 0
    bytes: int = 0
    norm: float = 0.0
    table_norm: float = 0.0
    since: int = 0


@dataclass(frozen=True)
class Taken:
    """What a release took: rows, bytes of ids and values, the norm of what they changed by, and why these."""

    rows: int
    bytes: int
    norm: float
    reason: str


def account_of(head: Head, made_unix_ns: int, taken: Taken, left: Iterable[TableLeft]) -> Account:
    """The account of the release that makes `head` the newest."""
    account = Account(
        number=head.number,
        version=head.version,
        made_unix_ns=made_unix_ns,
        rows=taken.rows,
        bytes=taken.bytes,
        norm=taken.norm,
        reason=taken.reason,
    )
    return with_left(account, left)


def with_left(account: Account, left: Iterable[TableLeft]) -> Account:
    """The account once a look has found that this is left."""
    every = list(left)
    return replace(
        account,
        left_rows=sum(each.rows for each in every),
        left_bytes=sum(each.bytes for each in every),
        left_norm=math.hypot(*(each.norm for each in every)),
    )


def taken_of(dirty: Sequence[DirtyRows], masks: Sequence[Mask], reason: str) -> Taken:
    """What a release takes of the dirty rows."""
    parts = [_part(rows, mask) for rows, mask in zip(dirty, masks, strict=True)]
    rows, sizes, norms = zip(*parts, strict=True) if parts else ((), (), ())
    return Taken(sum(rows), sum(sizes), math.hypot(*norms), reason)


def table_left(rows: DirtyRows, mask: Mask, since: NDArray[np.int64], table_norm: float) -> TableLeft:
    """What is left of one table; `since` [n] are the versions since which its rows are dirty."""
    return TableLeft(*_part(rows, mask), table_norm, int(since[mask].min()) if mask.any() else 0)


def _part(rows: DirtyRows, mask: Mask) -> tuple[int, int, float]:
    count = int(np.count_nonzero(mask))
    return count, count * rows.row_bytes, math.sqrt(float(np.square(rows.norms[mask]).sum()))

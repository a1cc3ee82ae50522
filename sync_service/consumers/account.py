"""What a release took, and what it left: kept with the view, and told to operators."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sync_service.consumers.ranking import DirtyRows, Mask, Pick
from sync_service.release import Head


@dataclass(frozen=True, kw_only=True)
class Account:
    """One release. Times are nanoseconds since 1970, norms L2.

    Attributes:
        number: the release's number; a look that found nothing to release keeps the last one's.
        version: the version it was made at.
        made_unix_ns: when.
        rows: rows it took.
        bytes: bytes of their ids and values.
        norm: of what they changed by.
        left_rows: dirty rows it left.
        left_bytes: what these take once they go out.
        left_norm: of what is unsent of them.
        reason: why these rows, in one sentence.
    """

    number: int
    version: int
    made_unix_ns: int
    rows: int
    bytes: int
    norm: float
    left_rows: int
    left_bytes: int
    left_norm: float
    reason: str


@dataclass(frozen=True)
class TableLeft:
    """What the last release has left of a table: dirty rows, the norm of what is unsent of them, the table's own
    norm then, and the version since which the oldest is dirty (0 = none is).
    """

    rows: int = 0
    norm: float = 0.0
    table_norm: float = 0.0
    since: int = 0


def account_of(dirty: Sequence[DirtyRows], picked: Pick, head: Head, made_unix_ns: int) -> Account:
    """The account of a release that takes what was picked, and that makes `head` the newest."""
    left = [~mask for mask in picked.taken]
    return Account(
        number=head.number,
        version=head.version,
        made_unix_ns=made_unix_ns,
        rows=_count(picked.taken),
        bytes=_bytes(dirty, picked.taken),
        norm=_norm(dirty, picked.taken),
        left_rows=_count(left),
        left_bytes=_bytes(dirty, left),
        left_norm=_norm(dirty, left),
        reason=picked.reason,
    )


def account_of_made(tables: Sequence[tuple[int, int]], head: Head, made_unix_ns: int, norm: float) -> Account:
    """The account of a release that gives whole tables, of so many rows of so many bytes, for the first time."""
    rows = sum(count for count, _ in tables)
    return Account(
        number=head.number,
        version=head.version,
        made_unix_ns=made_unix_ns,
        rows=rows,
        bytes=sum(count * size for count, size in tables),
        norm=norm,
        left_rows=0,
        left_bytes=0,
        left_norm=0.0,
        reason=f"took all {rows} rows of {len(tables)} tables that the replicas did not have in this form",
    )


def table_left(rows: DirtyRows, taken: Mask, since: NDArray[np.int64], table_norm: float) -> TableLeft:
    """What a release leaves of one table; `since` [n] are the versions since which its rows are dirty."""
    if taken.all():
        return TableLeft(table_norm=table_norm)
    return TableLeft(_count([~taken]), _norm([rows], [~taken]), table_norm, int(since[~taken].min()))


def _count(masks: Sequence[Mask]) -> int:
    return sum(int(np.count_nonzero(mask)) for mask in masks)


def _bytes(dirty: Sequence[DirtyRows], masks: Sequence[Mask]) -> int:
    return sum(_count([mask]) * rows.row_bytes for rows, mask in zip(dirty, masks, strict=True))


def _norm(dirty: Sequence[DirtyRows], masks: Sequence[Mask]) -> float:
    return math.sqrt(
        sum(float(np.square(rows.norms[mask]).sum()) for rows, mask in zip(dirty, masks, strict=True))
    )

"""Tags of rows: what shows that stamps and digests are those that were stored, of these rows of this table."""

from typing import TypeAlias

import numpy as np
import xxhash
from numpy.typing import NDArray

from deltasync.core.change_counts import Stamps
from deltasync.core.digests import RowDigests
from deltasync.core.rows import Ids
from deltasync.core.tables import TableSpec
from deltasync.kernels import tags as kernels

Tags: TypeAlias = NDArray[np.uint16]
# No stamp is as large; whatever is, can be counted with no more.
IMPOSSIBLE = 1 << 62


def tag_key(role: str, spec: TableSpec) -> int:
    """What tags of a table have in common, which no other table of its model has; `role` is what its rows are."""
    return xxhash.xxh3_64_intdigest(f"{role} {spec.dim} {spec.dtype} {spec.name}".encode())


def tags_of(key: int, ids: Ids, stamps: Stamps, digests: RowDigests) -> Tags:
    """The tags [n] of the rows `ids` [n] with these stamps [n] and digests [n, segments]."""
    tags = np.empty(len(ids), np.uint16)
    kernels.tags_of(key, np.require(ids, np.int64, ["C", "A"]), stamps, digests, tags)
    return tags


def may_be_deleted(
    key: int, ids: Ids, stamps: Stamps, digests: RowDigests, tags: Tags, number: int
) -> NDArray[np.bool_]:
    """Which of the rows `ids` [n], which may not fit their tags [n], may have been deleted while `number` was the
    newest: those whose stamp says so, or would if one 16-bit word of it were as the tag shows.

    A tag is the sum of these words, among others: where only one of them has changed, the tags differ by the same.
    """
    change = (tags_of(key, ids, stamps, digests) ^ tags).astype(np.int64)
    before = np.stack([stamps, *(stamps ^ change << shift for shift in range(0, 64, 16))])
    deleted: NDArray[np.bool_] = np.any((before < 0) & (before >= -number), axis=0)
    return deleted


def countable(stamps: Stamps) -> Stamps:
    """Stamps [n] that cannot be one, as others that can be counted.

    They differ in the highest of their 16-bit words, and do not fit their tags either.
    """
    counted: Stamps = np.clip((stamps << 2 >> 2) ^ IMPOSSIBLE >> 1, 1 - IMPOSSIBLE, IMPOSSIBLE - 1)
    return counted


def wrong_tags(key: int, first: int, stamps: Stamps, digests: RowDigests, tags: Tags) -> Ids:
    """The ids of those rows that do not fit their tags.

    The rows are those from `first` on, with these stamps [n], digests [n, segments] and tags [n].
    """
    found = np.empty(len(stamps), np.int64)
    return found[: kernels.wrong_tags(key, first, stamps, digests, tags, found)]

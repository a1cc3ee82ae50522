"""What is known of a model's damaged rows: ids [n], strictly ascending, by the table's name. Pure functions."""

from collections.abc import Mapping, Set
from typing import TypeAlias

import numpy as np

from deltasync.core.damage import ranges
from deltasync.core.id_sets import difference, union
from deltasync.core.rows import Ids
from deltasync.storage.data_directory import RESTORE

Damage: TypeAlias = Mapping[str, Ids]

# What becomes of damaged rows that the log does not mend.
FROM_TRAINERS = (
    "the trainer publishes them again with its next cut; where none runs any more, start one that publishes the "
    f"model, or {RESTORE}"
)


def joined(some: Damage, others: Damage) -> Damage:
    """The rows of both."""
    names = sorted({*some, *others})
    none = np.empty(0, np.int64)
    return {name: union(some.get(name, none), others.get(name, none)) for name in names}


def without(damage: Damage, others: Damage) -> Damage:
    """The rows that are not among the others."""
    left = {name: difference(ids, others[name]) if name in others else ids for name, ids in damage.items()}
    return {name: ids for name, ids in left.items() if len(ids)}


def of_tables(damage: Damage, names: Set[str]) -> Damage:
    """The rows of these tables alone."""
    return {name: ids for name, ids in damage.items() if name in names}


def in_words(damage: Damage, remedy: str) -> str:
    """What is wrong, and what becomes of it; empty if nothing is."""
    if not damage:
        return ""
    found = "; ".join(f"{ranges(ids)} of table {name!r}" for name, ids in damage.items())
    return f"other bits than were stored in {found}: they are not sent, and {remedy}"

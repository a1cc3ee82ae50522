"""Picking what a release takes while some rows of the model are damaged: they stay dirty until they are mended."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from deltasync.core.id_sets import members
from deltasync.core.policy import Policy
from deltasync.core.rows import Mask
from deltasync.feeds.damage import IdsByTable
from deltasync.views.ranking import DirtyRows, Pick, pick
from deltasync.views.table import ViewTable


def pick_sound(
    tables: Sequence[ViewTable], dirty: Sequence[DirtyRows], damage: IdsByTable, policy: Policy
) -> tuple[list[DirtyRows], Pick]:
    """What a release takes of the dirty rows but those that are damaged, and these as if they had not changed.

    Damaged ones that are forced stay among them: they belong with others, so that nothing goes without them.
    """
    pairs = list(zip(tables, dirty, strict=True))
    damaged = [_damaged(table, rows, damage) for table, rows in pairs if damage]
    if not any(mask.any() for mask in damaged):
        return list(dirty), pick(dirty, policy)
    for (table, _), mask in zip(pairs, damaged, strict=True):
        if mask.any():
            table.look_again()  # How far these have changed is not known before they are mended.
    picked = pick([_some(rows, ~mask) for rows, mask in zip(dirty, damaged, strict=True)], policy)
    taken = [_spread(some, ~mask) for some, mask in zip(picked.taken, damaged, strict=True)]
    count = sum(map(np.count_nonzero, damaged))
    unchanged = [
        replace(rows, norms=np.where(mask, 0, rows.norms)) for rows, mask in zip(dirty, damaged, strict=True)
    ]
    return unchanged, Pick(taken, f"{picked.reason}; and not {count} that are damaged")


def _damaged(table: ViewTable, rows: DirtyRows, damage: IdsByTable) -> Mask:
    ids = damage.get(table.source.spec.name)
    return np.zeros(len(rows.ids), np.bool_) if ids is None else members(rows.ids, ids) & ~rows.forced


def _some(rows: DirtyRows, mask: Mask) -> DirtyRows:
    return DirtyRows(
        rows.ids[mask],
        rows.norms[mask],
        rows.never_sent[mask],
        rows.overdue[mask],
        rows.forced[mask],
        rows.row_bytes,
    )


def _spread(some: Mask, among: Mask) -> Mask:
    every = np.zeros(len(among), np.bool_)
    every[among] = some
    return every

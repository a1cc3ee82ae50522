"""A release updates the rows of a view in pieces, between which a checkpoint copies them."""

import numpy as np

from deltasync.base.threads import not_shared_yet
from deltasync.core.precopy import PreCopy
from deltasync.core.rows import RowBatch
from deltasync.core.stamped_table import StampedTable
from deltasync.core.table_form import TableForm
from deltasync.core.tables import TableSpec
from deltasync.views.table import RowUpdate, ViewTable

SPEC = TableSpec("user", 20_000, 64)
IDS = np.arange(SPEC.rows)


def change(table: StampedTable, version: int) -> None:
    table.apply(RowBatch.of_table(SPEC, IDS, np.full((SPEC.rows, SPEC.dim), version, "<f4")), version)


@not_shared_yet()
def test_a_copy_that_begins_between_two_pieces_has_the_rows_of_both() -> None:
    source = StampedTable(SPEC)
    change(source, 1)
    view = ViewTable(source, TableForm.unchanged(SPEC))
    view.copy(IDS)
    view.note_clean(1)
    change(source, 2)
    update = RowUpdate(view, IDS, np.zeros(SPEC.rows), 2)
    update.begin()
    assert not update.go_on()
    copying, copied = PreCopy([view.held], [0], limit=0), np.zeros_like(view.held.rows)
    block = copying.next_block(SPEC.rows // 2 * SPEC.row_bytes)
    assert block
    copied[block[1]] = view.held.rows[block[1]]
    while not update.go_on():
        pass
    for _, ids in copying.rest():
        copied[ids] = view.held.rows[ids]
    assert (copied == 2).all()

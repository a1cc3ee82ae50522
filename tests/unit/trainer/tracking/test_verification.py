"""What verifying finds, and what it does not complain about."""

import pytest
import torch

from deltasync.base.errors import Contradiction
from deltasync.core.tables import Shard, TableSpec
from deltasync.trainer.tracking.row_marking import Verification
from deltasync.trainer.tracking.shards import TrackedShard, TrackedTable
from deltasync.trainer.tracking.stamps import CLOCK_END, RowStamps

ROWS = 30


def table(name: str = "user", row_offset: int = 0, *, fused: bool = True) -> TrackedTable:
    """Whose columns are held in two shards."""
    spec = TableSpec(name, row_offset + ROWS, 4)
    shards = [TrackedShard(Shard(spec, row_offset, ROWS, column, 2), torch.zeros(ROWS, 2)) for column in (0, 2)]
    return TrackedTable(spec, shards, [], fused=fused, replicated=False)


def verified(*tables: TrackedTable) -> tuple[RowStamps, Verification]:
    stamps = RowStamps(tables)
    return stamps, Verification(tables, stamps)


def test_rows_that_changed_unmarked_are_named_and_marked() -> None:
    held = table(row_offset=100)
    stamps, verification = verified(held)
    held.shards[1].weight[3, 1] = 1.0
    held.shards[0].weight[7, 0] = 1.0
    with pytest.raises(Contradiction, match=r"table 'user': rows 103, 107 have changed, .*mark\(table, ids\)"):
        verification.check()
    assert torch.nonzero(stamps.of(0)).view(-1).tolist() == [3, 7]
    verification.check()


def test_all_tables_are_named_and_many_rows_are_counted() -> None:
    some, others = table("user"), table("item")
    _, verification = verified(some, others)
    some.shards[0].weight[1] = 1.0
    others.shards[0].weight.add_(1.0)
    said = r"'user': rows 1 have .*; table 'item': rows 0, 1, 2, 3, 4, 5, 6, 7, 8, 9 and 20 more have changed"
    with pytest.raises(Contradiction, match=said):
        verification.check()


def test_rows_marked_or_deleted_since_the_last_check_are_fine() -> None:
    held = table()
    stamps, verification = verified(held)
    for _ in range(3):
        held.shards[0].weight[4] += 1.0
        stamps.stamp(0, torch.tensor([4, 5]))
        verification.check()
    held.shards[0].weight[4] = 0.0
    stamps.stamp_deleted(0, torch.tensor([4]))
    verification.check()
    held.shards[0].weight[4] += 1.0
    with pytest.raises(Contradiction, match="rows 4 have changed"):
        verification.check()


def test_tables_that_are_compared_anyway_are_left_out() -> None:
    held = table(fused=False)
    _, verification = verified(held)
    assert verification.nbytes == 0
    held.shards[0].weight.add_(1.0)
    verification.check()


def test_a_table_is_excused_once() -> None:
    held = table()
    _, verification = verified(held)
    for excused in True, False:
        held.shards[0].weight.add_(1.0)
        if excused:
            verification.excused.add(0)
            verification.check()
        else:
            with pytest.raises(Contradiction, match="have changed"):
                verification.check()


def test_a_clock_that_starts_over() -> None:
    held = table()
    stamps, verification = verified(held)
    stamps.clock = CLOCK_END - 1
    verification.renew()
    stamps.restart_clock()
    held.shards[0].weight[2] = 1.0
    stamps.stamp(0, torch.tensor([2]))
    verification.check()


def test_at_the_end_of_the_clock_it_waits_for_the_read_that_starts_it_over() -> None:
    """Later stamps than that do not fit."""
    held = table()
    stamps, verification = verified(held)
    stamps.clock = CLOCK_END
    verification.renew()
    held.shards[0].weight[2] = 1.0
    stamps.stamp(0, torch.tensor([2]))
    verification.check()
    assert stamps.clock == CLOCK_END, "which is how the read knows"
    held.shards[0].weight[3] = 1.0
    with pytest.raises(Contradiction, match="rows 3 have changed"):
        verification.check()

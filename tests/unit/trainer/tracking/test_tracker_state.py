"""A tracker's state between ranks that hold a table in different pieces, and states that are none."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.deltas import first_of, values_of
from torch import nn

from deltasync.base.errors import InvalidInput
from deltasync.core.tables import Shard, TableKind, TableSpec
from deltasync.trainer.sync import DeltaSync, SyncOptions
from deltasync.trainer.tracking import Tracker, TrackerOptions, TrackingMode
from deltasync.trainer.tracking.delta import ConsumerCursor
from deltasync.trainer.tracking.shards import TrackedShard, TrackedTable
from deltasync.trainer.tracking.stamps import RowStamps
from deltasync.trainer.tracking.tracker_state import load, save

ROWS, COLUMNS = 7, 6
TABLE = TableSpec("t", ROWS, COLUMNS, np.dtype("<f4"))


@dataclass(frozen=True)
class Piece:
    """What one rank holds: a range of rows, in one shard or more of columns."""

    rows: tuple[int, int]
    columns: list[tuple[int, int]]

    def slice(self, whole: torch.Tensor) -> torch.Tensor:
        (low, high), columns = self.rows, [whole[:, first:end] for first, end in self.columns]
        return torch.cat(columns, dim=1)[low:high]

    def local(self, rows: set[int]) -> torch.Tensor:
        """Those of some rows that are held here, counted from the first."""
        low, high = self.rows
        return torch.tensor([row - low for row in sorted(rows) if low <= row < high], dtype=torch.int64)

    def table(self, whole: torch.Tensor) -> TrackedTable:
        (low, high), shards = self.rows, []
        for first, end in self.columns:
            shard = Shard(TABLE, low, high - low, first, end - first)
            shards.append(TrackedShard(shard, whole[low:high, first:end].clone()))
        return TrackedTable(TABLE, shards, [], fused=True, replicated=False)


@st.composite
def pieces(draw: st.DrawFn) -> list[Piece]:
    """A whole table cut up; each range of rows may be shared by several ranks, by columns."""
    found = []
    for rows in draw(cuts(ROWS)):
        shards = draw(cuts(COLUMNS))
        owners = draw(st.lists(st.integers(0, 2), min_size=len(shards), max_size=len(shards)))
        for owner in sorted(set(owners)):
            found.append(Piece(rows, [one for one, its in zip(shards, owners, strict=True) if its == owner]))
    return found


def cuts(size: int) -> st.SearchStrategy[list[tuple[int, int]]]:
    inner = st.sets(st.integers(1, size - 1), max_size=3)
    return inner.map(lambda at: list(pairwise([0, *sorted(at), size])))


HELD = torch.arange(ROWS * COLUMNS, dtype=torch.float32).view(ROWS, COLUMNS)


def saved(piece: Piece, rows: dict[str, set[int]], ticks: int) -> dict[str, Any]:
    """A rank's state: its consumer holds `HELD`."""
    table = piece.table(HELD)
    stamps = RowStamps([table])
    for _ in range(ticks):
        stamps.tick()
    stamps.stamp(0, piece.local(rows["acknowledged"]))
    consumer = ConsumerCursor.at(stamps.tick(), "c", TrackingMode.EMBEDDING, [table])
    stamps.stamp(0, piece.local(rows["due"]))
    stamps.stamp_deleted(0, piece.local(rows["deleted"]))
    return save([table], stamps, [consumer]) | {"steps": 1}


SOME = st.sets(st.integers(0, ROWS - 1))


@given(
    pieces(),
    pieces(),
    st.fixed_dictionaries(dict.fromkeys(("acknowledged", "due", "deleted"), SOME)),
    st.data(),
)
def test_first_values_find_their_columns(
    before: list[Piece], after: list[Piece], rows: dict[str, set[int]], data: st.DataObject
) -> None:
    """Clocks of the ranks differ; so do their pieces before and after."""
    states = [saved(piece, rows, data.draw(st.integers(0, 5))) for piece in before]
    expected = rows["due"] - rows["deleted"]
    now = HELD.clone()
    now[sorted(expected)] += 0.5
    now[sorted(rows["deleted"])] = 0.0
    for piece in after:
        table = piece.table(now)
        stamps = RowStamps([table])
        consumer = load([table], stamps, states)["c"]
        ids = stamps.later(0, consumer.cursor)
        assert torch.equal(ids, piece.local(expected))
        first = torch.cat([consumer.first_values[tracked.shard][ids] for tracked in table.shards], dim=1)
        assert torch.equal(first, piece.slice(HELD)[ids])
        assert torch.equal(stamps.deleted_later(0, consumer.cursor), piece.local(rows["deleted"]))


RANGES = TableSpec("t.id_ranges", ROWS, 3, np.dtype("<i8"), TableKind.ID_RANGES, "t")
MAP = TableSpec("t.raw_ids", ROWS, 1, np.dtype("<i8"), TableKind.ID_MAP, "t")


def resharded(spec: TableSpec, before: list[tuple[int, int]], after: list[tuple[int, int]]) -> list[set[int]]:
    """The rows of a table that are due on each rank, where others than before hold its rows."""

    def table_of(rows: tuple[int, int]) -> TrackedTable:
        shard = Shard(spec, rows[0], rows[1] - rows[0], 0, spec.dim)
        weight = torch.zeros(shard.rows, spec.dim, dtype=torch.int64)
        return TrackedTable(spec, [TrackedShard(shard, weight)], [], fused=False, replicated=False)

    states, due = [], []
    for rows in before:
        stamps = RowStamps([table_of(rows)])
        consumer = ConsumerCursor.at(stamps.tick(), "c", TrackingMode.EMBEDDING_LAST, [])
        states.append(save([table_of(rows)], stamps, [consumer]) | {"steps": 1})
    for rows in after:
        table = table_of(rows)
        stamps = RowStamps([table])
        consumer = load([table], stamps, states)["c"]
        due.append({row + rows[0] for row in stamps.later(0, consumer.cursor).tolist()})
    return due


@given(cuts(ROWS), cuts(ROWS))
def test_maps_of_other_ranks_have_changed(before: list[tuple[int, int]], after: list[tuple[int, int]]) -> None:
    """Only where a shard ends, or ended, is a row of ranges that is not zero. Raw ids may be looked up elsewhere,
    so that rows have none, or have one again.
    """
    assert set().union(*resharded(RANGES, before, after)) == {end - 1 for _, end in (*before, *after)}
    assert resharded(MAP, before, after) == [set() if rows in before else set(range(*rows)) for rows in after]


def rows_of(count: int = 3) -> nn.Module:
    return nn.ParameterDict({"t": torch.zeros(count, 2)})


def tracker(rows: int = 3) -> Tracker:
    return Tracker(rows_of(rows), TrackerOptions(mode=TrackingMode.EMBEDDING, dense=True))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["clock"], "noon"),
        (["tables"], None),
        (["tables", "t"], {}),
        (["consumers", "default"], {}),
        (["consumers", "default", "mode"], "psychic"),
        (["consumers", "default", "first"], 7),
    ],
)
def test_a_spoilt_state_is_refused_and_changes_nothing(path: list[str], value: Any) -> None:
    loading, state = tracker(), tracker().state_dict()
    part = state
    for name in path[:-1]:
        part = part[name]
    part[path[-1]] = value
    loading.mark("t", torch.tensor([1]))
    with pytest.raises(InvalidInput, match="not the state of a tracker"):
        loading.load_state_dict(state)
    assert loading.get_delta().ids["t"].tolist() == [1]


@pytest.mark.parametrize("state", [{}, [], [{}], {"tracker": {}, "world_size": 2}, ["clock"], [7]])
def test_what_is_no_state_is_told_from_one(state: Any) -> None:
    with pytest.raises(InvalidInput, match="with clock, consumers, format, steps, tables"):
        tracker().load_state_dict(state)


def of_format_1() -> dict[str, Any]:
    """A state: row 1 is due, and was 0.5 in its second column."""
    first = {"ids": torch.tensor([1]), "values": torch.tensor([[0.0, 0.5]])}
    consumer = {"mode": "embedding", "cursor": 1, "first": {"t": first}}
    table = {"row_offset": 0, "columns": [(0, 2)], "stamps": torch.tensor([0, 2, 0], dtype=torch.int32)}
    return {"format": 1, "clock": 2, "tables": {"t": table}, "consumers": {"default": consumer}, "steps": 7}


def test_what_was_saved_is_known_again() -> None:
    loading = tracker()
    loading.load_state_dict(of_format_1())
    delta = loading.get_delta()
    assert loading.steps == 7
    assert delta.ids["t"].tolist() == [1]
    assert first_of(delta, "t").tolist() == [[0.0, 0.5]]


def names(state: Any) -> Any:
    """Everything in a state but its values."""
    return {name: names(its) for name, its in state.items()} if isinstance(state, dict) else None


def test_the_names_in_a_state_are_those_of_its_format() -> None:
    """Another name is another format, and what has this one must still be read."""
    saving = tracker()
    saving.mark("t", torch.tensor([1]))
    assert names(saving.state_dict()) == names(of_format_1())


def test_a_newer_format_is_refused_and_changes_nothing() -> None:
    loading = tracker()
    loading.mark("t", torch.tensor([2]))
    with pytest.raises(InvalidInput, match="a tracker's state is of format 2, this version reads 1"):
        loading.load_state_dict([loading.state_dict(), {"format": 2, "rows": "elsewhere"}])
    assert loading.get_delta().ids["t"].tolist() == [2]


def test_rows_and_tables_come_and_go() -> None:
    before = tracker(5)
    before.mark("t", torch.tensor([1, 4]))
    state = before.state_dict()
    shrunk, grown = tracker(3), tracker(7)
    shrunk.load_state_dict(state)
    grown.load_state_dict(state)
    assert shrunk.get_delta().ids["t"].tolist() == [1]
    assert grown.get_delta().ids["t"].tolist() == [1, 4, 5, 6]
    other = Tracker(nn.Sequential(rows_of(2)), TrackerOptions(dense=True))
    other.load_state_dict(state)
    assert other.get_delta().ids["0.t"].tolist() == [0, 1], "a new table has changed"


def test_consumers_are_those_of_the_checkpoint() -> None:
    before = tracker()
    before.add_consumer("old", TrackingMode.ID_ONLY)
    before.remove_consumer("default")
    before.mark("t", torch.tensor([1]))
    after = tracker()
    after.add_consumer("new")
    after.mark_all()
    after.load_state_dict(before.state_dict())
    assert {name: after.get_delta(name).ids for name in ("default", "new")} == {"default": {}, "new": {}}
    assert after.get_delta("old").ids["t"].tolist() == [1]
    assert values_of(after.get_delta("old"), "t").numel() == 0, "its mode is that of the checkpoint"


class TestDeltaSync:
    def sync(self) -> DeltaSync:
        return DeltaSync(rows_of(), SyncOptions(service="localhost:1", model="m"))

    @pytest.mark.parametrize(
        ("saved", "got"),
        [
            ([], "none"),
            ([(0, 2)], "0 of 2"),
            ([(0, 2), (0, 2)], "0 of 2, 0 of 2"),
            ([(0, 2), (1, 3)], "0 of 2, 1 of 3"),
            ([(1, 1)], "1 of 1"),
        ],
    )
    def test_states_that_are_not_those_of_all_ranks(self, saved: list[tuple[int, int]], got: str) -> None:
        state = self.sync().state_dict()
        states = [state | {"rank": rank, "world_size": world_size} for rank, world_size in saved]
        with pytest.raises(InvalidInput, match=f"all ranks of one checkpoint, got rank {got}$"):
            self.sync().load_state_dict(states)

    def test_a_newer_format_is_refused(self) -> None:
        with pytest.raises(
            InvalidInput, match="a state of DeltaSync is of format 2, this version reads 1: update"
        ):
            self.sync().load_state_dict([{"format": 2, "ranks": "elsewhere"}])

    def test_the_names_in_a_state_are_those_of_its_format(self) -> None:
        state = self.sync().state_dict()
        assert set(state) == {
            "format",
            "rank",
            "world_size",
            "tracker",
            "history",
            "version",
            "seal",
            "versions",
            "event_time_unix_ns",
        }
        assert state["format"] == 1

"""A consumer that knows what its deltas must be."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from tests.integration.trainer.tracking.rows import Ids, Rows, differing

from deltasync.trainer.tracking.delta import Delta, DeltaRows
from deltasync.trainer.tracking.options import TrackingMode
from deltasync.trainer.tracking.tracker import Tracker

_WITH_ROWS = (TrackingMode.EMBEDDING_LAST, TrackingMode.EMBEDDING)
_WITH_FIRST = (TrackingMode.EMBEDDING, TrackingMode.MOMENTUM_DIFF, TrackingMode.ROWWISE_ADAGRAD)


class Follower:
    """Builds a copy from deltas only. It reads every few batches; `held` says what it is a copy of.

    Attributes:
        problems: what was wrong so far.
    """

    def __init__(self, tracker: Tracker, mode: TrackingMode, every: int, held: Callable[[], Rows]) -> None:
        self.problems: list[str] = []
        self._name = f"{mode.value} every {every}, consumer {len(tracker.consumers)}"
        self._tracker, self._mode, self._every, self._held = tracker, mode, every, held
        self._changed: Ids = {}
        self._batches = 0
        tracker.add_consumer(self._name, mode)
        tracker.resync(self._name)
        live = held()
        self._copy = {table: torch.full_like(rows, float("nan")) for table, rows in live.items()}
        with self._checking("at first"):
            self._take(self._delta(), live)

    def after(self, what: str, changed: Ids, *, read: bool) -> None:
        """Something has changed these rows. `read`: see now what is said of it, whether it is time or not."""
        for table, ids in changed.items():
            self._changed.setdefault(table, set()).update(ids)
        self._batches += 1
        if read or self._batches % self._every == 0:
            with self._checking(what):
                self._read()

    @contextmanager
    def _checking(self, what: str) -> Iterator[None]:
        """A rank that stopped at a problem would leave the others waiting."""
        try:
            yield
        except AssertionError as problem:
            self.problems.append(f"{what}, {self._name}: {problem}")

    def _delta(self) -> Delta:
        return self._tracker.get_delta(self._name)

    def _read(self) -> None:
        first, delta = self._delta(), self._delta()
        live = self._held()
        for table in live:
            assert _ids(first, table) == _ids(delta, table), f"{table}: the second read differs"
            self._check_ids(table, _ids(delta, table), differing(self._copy[table], live[table]))
        for table, rows in delta.rows.items():
            self._check_first(table, rows)
        self._take(delta, live)
        self._changed = {}

    def _check_ids(self, table: str, reported: set[int], now_different: set[int]) -> None:
        """Exactly the changed rows; of several steps, one that is again what it was may be missing."""
        missing, added = now_different - reported, reported - self._changed.get(table, set())
        assert not missing, f"{table}: rows {sorted(missing)} have changed, reported {sorted(reported)}"
        assert not added, f"{table}: rows {sorted(added)} are reported, and have not changed"

    def _check_first(self, table: str, rows: DeltaRows) -> None:
        """The first values are those that this consumer has been given last."""
        if self._mode not in _WITH_FIRST:
            assert rows.first is None, f"{table}: has first values"
            return
        assert rows.first is not None, f"{table}: has no first values"
        kept = self._copy[table][rows.ids]
        wrong = differing(_in_place(rows, rows.first, kept), kept)
        assert not wrong, f"{table}: first values of rows {rows.ids[list(wrong)].tolist()}"

    def _take(self, delta: Delta, live: Rows) -> None:
        assert set(delta.rows) <= set(live), f"reported {sorted(delta.rows)}, held {sorted(live)}"
        for table, rows in delta.rows.items():
            now = live[table][rows.ids]
            self._copy[table][rows.ids] = now if rows.values is None else _in_place(rows, rows.values, now)
            if self._mode in _WITH_ROWS:
                _check_batches(table, rows)
        assert self._tracker.acknowledge(delta.token), "the cursor did not move"
        for table, current in live.items():
            wrong = differing(self._copy[table], current)
            assert not wrong, f"{table}: the copy differs in rows {sorted(wrong)}"


def _ids(delta: Delta, table: str) -> set[int]:
    return set(delta.rows[table].ids.tolist()) if table in delta.rows else set()


def _check_batches(table: str, rows: DeltaRows) -> None:
    """What is published of each shard is the same, bit by bit."""
    assert rows.values is not None
    batches, widths = rows.batches(), [width for _, width in rows.columns]
    for batch, column, values in zip(batches, rows.columns, torch.split(rows.values, widths, dim=1), strict=True):
        shard = batch.shard
        assert (shard.table.name, shard.col_offset, shard.cols) == (table, *column), f"{table}: {shard}"
        assert batch.ids.tolist() == rows.ids.tolist(), f"{table}: the ids of a batch"
        wrong = differing(torch.from_numpy(batch.values), values)
        assert not wrong, f"{table}: rows {sorted(wrong)} of the batch of {shard}"


def _in_place(rows: DeltaRows, values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Values of the columns held, in whole rows; one value per shard stands in all of its columns."""
    assert values.dtype == like.dtype, f"values of type {values.dtype}, held {like.dtype}"
    whole = torch.full_like(like, float("nan"))
    widths = [width for _, width in rows.columns]
    by_shard = torch.split(values, widths if values.shape[1] == sum(widths) else 1, dim=1)
    for (column, width), part in zip(rows.columns, by_shard, strict=True):
        whole[:, column : column + width] = part
    return whole

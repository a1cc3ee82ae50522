"""A consumer that knows what its deltas must be."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from tests.integration.trainer.tracking.rows import Ids, Rows, differing

from deltasync.core.rows import RowBatch
from deltasync.trainer.tracking.delta import Delta
from deltasync.trainer.tracking.tracked_model import TrackingMode
from deltasync.trainer.tracking.tracker import Tracker


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
        for batch in delta.rows:
            self._check_first(batch, delta)
        self._take(delta, live)
        self._changed = {}

    def _check_ids(self, table: str, reported: set[int], now_different: set[int]) -> None:
        """Exactly the changed rows; of several steps, one that is again what it was may be missing."""
        missing, added = now_different - reported, reported - self._changed.get(table, set())
        assert not missing, f"{table}: rows {sorted(missing)} have changed, reported {sorted(reported)}"
        assert not added, f"{table}: rows {sorted(added)} are reported, and have not changed"

    def _check_first(self, batch: RowBatch, delta: Delta) -> None:
        """The first values are those that this consumer has been given last."""
        if self._mode is not TrackingMode.EMBEDDING:
            assert not delta.first, f"{batch.shard}: has first values"
            return
        wrong = differing(torch.from_numpy(delta.first[batch.shard]), self._columns(self._copy, batch))
        assert not wrong, f"{batch.shard}: first values of rows {batch.ids[list(wrong)].tolist()}"

    def _take(self, delta: Delta, live: Rows) -> None:
        assert set(delta.ids) <= set(live), f"reported {sorted(delta.ids)}, held {sorted(live)}"
        for batch in delta.rows:
            now = self._columns(live, batch)
            if self._mode is not TrackingMode.ID_ONLY:
                wrong = differing(torch.from_numpy(batch.values), now)
                assert not wrong, f"rows {sorted(wrong)} of the batch of {batch.shard}"
            self._copy[batch.table.name][batch.ids, _columns_of(batch)] = now
        assert self._tracker.acknowledge(delta), "the cursor did not move"
        for table, current in live.items():
            wrong = differing(self._copy[table], current)
            assert not wrong, f"{table}: the copy differs in rows {sorted(wrong)}"

    def _columns(self, tables: Rows, batch: RowBatch) -> torch.Tensor:
        return tables[batch.table.name][batch.ids][:, _columns_of(batch)]


def _columns_of(batch: RowBatch) -> slice:
    return slice(batch.shard.col_offset, batch.shard.col_offset + batch.shard.cols)


def _ids(delta: Delta, table: str) -> set[int]:
    return set(delta.ids.get(table, ()))

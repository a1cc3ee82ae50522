"""Runs the same operations on a tracker and on its plain model, and compares their results."""

import io
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from tests.support.deltas import first_of, values_of
from tests.support.tracker_model import ModelConsumer, ModelRead, Row, TrackerModel, Values
from torch import nn

from deltasync.base.errors import Contradiction, NotFound
from deltasync.trainer.tracking import Delta, Tracker, TrackerOptions, TrackingMode
from deltasync.trainer.tracking.shards import TrackedTable


@dataclass(frozen=True)
class Operation:
    """An operation for both: a method of `SideBySide` and its arguments."""

    name: str
    arguments: tuple[Any, ...]

    def __repr__(self) -> str:
        return f"{self.name}{self.arguments}"


def operations(name: str, *arguments: st.SearchStrategy[Any]) -> st.SearchStrategy[Operation]:
    return st.builds(Operation, st.just(name), st.tuples(*arguments))


@dataclass(frozen=True)
class _Checkpoint:
    weights: list[torch.Tensor]
    state: bytes
    consumers: dict[str, ModelConsumer]
    silent: set[Row]
    deleted: set[Row]
    steps: int


class SideBySide:
    """Runs operations. Subclasses add operations that train."""

    def __init__(self, model: nn.Module, options: TrackerOptions) -> None:
        self.model, self._options = model, options
        self.tracker = Tracker(model, options)
        self.plain = TrackerModel(self.values)
        self.steps = 0
        # Older ones go, and with them what they hold.
        self._deltas: deque[tuple[Delta, ModelRead]] = deque(maxlen=8)
        self._checkpoint: _Checkpoint | None = None
        for name in options.consumers:
            self.plain.add(name, options.mode)

    def run(self, program: Sequence[Operation]) -> None:
        for one in program:
            getattr(self, one.name)(*one.arguments)
            assert self.tracker.nbytes <= self._most_bytes()
        for name in self.plain.consumers:
            self.read(name)
        assert not self.plain.lost()

    def values(self) -> Values:
        """Every row."""
        return {
            (table.name, table.row_offset + row): values.tobytes()
            for table in self.tracker.tables
            for row, values in enumerate(_tensor(table).numpy())
        }

    # -- operations

    def end_step(self) -> None:
        self.tracker.step()
        self.steps += 1
        assert self.tracker.steps == self.steps

    def mark(self, table: int, rows: Sequence[int]) -> None:
        tracked = self.tracker.tables[table % len(self.tracker.tables)]
        ids = [row % tracked.table.rows for row in rows]
        self.tracker.mark(tracked.name, torch.tensor(ids, dtype=torch.int32))
        self.plain.mark({(tracked.name, row) for row in ids} & self.plain.rows)

    def delete(self, table: int, rows: Sequence[int]) -> None:
        tracked = self.tracker.tables[table % len(self.tracker.tables)]
        ids = [row % tracked.table.rows for row in rows]
        self.tracker.delete(tracked.name, torch.tensor(ids, dtype=torch.int64))
        held = {(tracked.name, row) for row in ids} & self.plain.rows
        self.plain.delete(held)
        values = self.values()
        assert not any(any(values[row]) for row in held), "deleted rows are zeros"

    def mark_all(self, table: int | None) -> None:
        name = None if table is None else self.tracker.tables[table % len(self.tracker.tables)].name
        self.tracker.mark_all(name)
        self.plain.mark(row for row in self.plain.rows if name in (None, row[0]))

    def add(self, name: str, mode: TrackingMode) -> None:
        if name in self.plain.consumers:
            with pytest.raises(Contradiction):
                self.tracker.add_consumer(name, mode)
            return
        self.tracker.add_consumer(name, mode)
        self.plain.add(name, mode)

    def remove(self, name: str) -> None:
        self._if_known(name, self.tracker.remove_consumer, self.plain.remove)

    def resync(self, name: str) -> None:
        self._if_known(name, self.tracker.resync, self.plain.resync)

    def read(self, name: str) -> None:
        if self._if_known(name, self.tracker.get_delta):
            self._check_read(name, self.tracker.get_delta(name), self._model_read(name))

    def count(self, name: str) -> None:
        if self._if_known(name, self.tracker.count_ahead):
            self.tracker.count_ahead(name)

    def read_begun(self, name: str) -> None:
        if self._if_known(name, self.tracker.begin_delta):
            self._check_read(name, self.tracker.begin_delta(name).result, self._model_read(name))

    def read_ids(self, name: str) -> None:
        if self._if_known(name, self.tracker.get_delta_ids):
            delta, expected = self.tracker.get_delta_ids(name), self._model_read(name)
            self._check_read(name, delta, expected, values=False)

    def acknowledge(self, number: int) -> None:
        """Acknowledge the newest delta, an older one, a used one, or one of a removed consumer."""
        if self._deltas:
            delta, read = self._deltas[-1 - number % len(self._deltas)]
            assert self.tracker.acknowledge(delta) == self.plain.acknowledge(read)

    def save(self) -> None:
        buffer = io.BytesIO()
        torch.save(self.tracker.state_dict(), buffer)
        weights = [tensor.clone() for tensor in self._live()]
        consumers = self.plain.save()
        self._checkpoint = _Checkpoint(
            weights,
            buffer.getvalue(),
            consumers,
            set(self.plain.silent),
            set(self.plain.deleted),
            self.tracker.steps,
        )

    def restore(self) -> None:
        """Load the last checkpoint in a new tracker."""
        if self._checkpoint is None:
            return
        for live, saved in zip(self._live(), self._checkpoint.weights, strict=True):
            live.copy_(saved)
        self.tracker.close()
        self.tracker = Tracker(self.model, self._options)
        self.tracker.load_state_dict(torch.load(io.BytesIO(self._checkpoint.state), weights_only=True))
        self.plain.load(self._checkpoint.consumers, self._checkpoint.silent, self._checkpoint.deleted)
        for name in self._options.consumers:
            if name not in self.plain.consumers:
                self.plain.begin(name, self._options.mode)
        self.steps = self._checkpoint.steps

    def reload(self) -> None:
        self.save()
        self.restore()

    # -- inside

    def _live(self) -> list[torch.Tensor]:
        return [each.weight for table in self.tracker.tables for each in table.shards]

    def _if_known(self, name: str, call: Callable[[str], Any], then: Callable[[str], Any] | None = None) -> bool:
        """Call both if there is such a consumer; otherwise check that the tracker raises an error."""
        if name not in self.plain.consumers:
            with pytest.raises(NotFound, match=name):
                call(name)
            return False
        if then:
            call(name)
            then(name)
        return True

    def _model_read(self, name: str) -> tuple[dict[Row, bytes | None], ModelRead]:
        first = dict(self.plain.consumers[name].holds)
        return first, self.plain.read(name)

    def _check_read(
        self, name: str, delta: Delta, expected: tuple[dict[Row, bytes | None], ModelRead], *, values: bool = True
    ) -> None:
        first, read = expected
        assert not self.plain.lost()
        assert _rows(delta) == set(read.taken), name
        assert _deletes(delta) == set(read.deletes), name
        mode = self.plain.consumers[name].mode
        for table, ids in delta.ids.items():
            rows = ids.tolist()
            assert rows, "tables without changed rows are left out"
            assert rows == sorted(set(rows))
            if mode is TrackingMode.EMBEDDING or (values and mode is TrackingMode.EMBEDDING_LAST):
                given = [row.tobytes() for row in values_of(delta, table).numpy()]
                assert given == [read.taken[table, row] for row in rows], "values are current"
            else:
                assert not values_of(delta, table).numel()
            if mode is TrackingMode.EMBEDDING:
                _check_first(first_of(delta, table), [first[table, row] for row in rows])
            else:
                assert not delta.first
        self._deltas.append((delta, read))

    def _most_bytes(self) -> int:
        """Upper bound of memory: stamps and copies, and for each consumer its first values."""
        stamps = sum(4 * table.rows + 12 * -(-table.rows // 64) for table in self.tracker.tables)
        live = sum(tensor.nbytes for tensor in self._live())
        return stamps + live + len(self.plain.consumers) * live + self.bytes_under_way

    @property
    def bytes_under_way(self) -> int:
        """Additional memory that is only used for a while."""
        return 0


def _tensor(table: TrackedTable) -> torch.Tensor:
    return torch.cat([shard.weight for shard in table.shards], dim=1).cpu()


def _rows(delta: Delta) -> set[Row]:
    return {(table, row) for table, ids in delta.ids.items() for row in ids.tolist()}


def _deletes(delta: Delta) -> set[Row]:
    for deleted in delta.deletes.values():
        ids = deleted.tolist()
        assert ids, "tables without deleted rows are left out"
        assert ids == sorted(set(ids))
    return {(table, row) for table, ids in delta.deletes.items() for row in ids.tolist()}


def _check_first(first: torch.Tensor, held: list[bytes | None]) -> None:
    for given, expected in zip(first, held, strict=True):
        if expected is None:
            assert given.isnan().all(), "it never had any"
        else:
            assert given.numpy().tobytes() == expected, "what the consumer holds"

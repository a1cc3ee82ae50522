"""A reference for the tracker, with plain sets: which rows are due to each consumer, and which it has.

It does not know stamps, cursors or tensors. A row is a table's FQN and a global row id; a value is its bytes.
"""

from collections.abc import Callable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property

from deltasync.trainer.tracking import TrackingMode

Row = tuple[str, int]
Values = Mapping[Row, bytes]
# What every row of the model holds now.
Reader = Callable[[], Values]


@dataclass(eq=False)
class ModelConsumer:
    """The known state of one consumer.

    Attributes:
        holds: the values that it has acknowledged; None for rows that it never got.
        due: rows that the tracker must offer.
        offered: read and value of rows that it got since without acknowledging them, and so may have.
        acknowledged: the newest read that it has acknowledged.
    """

    mode: TrackingMode
    holds: dict[Row, bytes | None]
    due: set[Row] = field(default_factory=set)
    offered: dict[Row, dict[int, bytes]] = field(default_factory=dict)
    acknowledged: int = 0

    def may_hold(self, row: Row) -> set[bytes | None]:
        """Values that the receiver may have, because an acknowledgement may have been lost."""
        return {self.holds[row], *self.offered.get(row, {}).values()}


@dataclass(eq=False)
class ModelRead:
    """The result of one read of a consumer.

    Attributes:
        number: sequence number of the read.
        deletes: rows that it reported as deleted, with their remaining values.
        later: rows that have changed since.
    """

    consumer: ModelConsumer
    number: int
    taken: dict[Row, bytes]
    deletes: dict[Row, bytes]
    later: set[Row] = field(default_factory=set)


class TrackerModel:
    """Follows a tracker: tests call each method together with the tracker's of the same name.

    Attributes:
        consumers: by name.
        silent: rows that have changed in a way that the tracker was told to ignore.
        deleted: deleted rows.
    """

    def __init__(self, read: Reader) -> None:
        self.read_values = read
        self.consumers: dict[str, ModelConsumer] = {}
        self.silent: set[Row] = set()
        self.deleted: set[Row] = set()
        self._reads: list[ModelRead] = []
        self._count = 0
        self._seen = dict(read())

    @cached_property
    def rows(self) -> set[Row]:
        return set(self._seen)

    # -- what happens to rows

    def settle(self) -> None:
        """Mark rows whose bits differ from before as changed."""
        now = self.read_values()
        self.mark(row for row in self.rows if now[row] != self._seen[row])
        self._seen = dict(now)

    def overlook(self) -> None:
        """Ignore all changes since the last `settle`."""
        now = self.read_values()
        self.silent |= {row for row in self.rows if now[row] != self._seen[row]}
        self._seen = dict(now)

    def mark(self, rows: Iterable[Row]) -> None:
        changed = set(rows)
        self.deleted -= changed
        self._change(changed)

    def delete(self, rows: set[Row]) -> None:
        """Delete rows: no consumer is known to have any value of them until it gets the delete."""
        now = self.read_values()
        self._seen |= {row: now[row] for row in rows}
        self.deleted |= rows
        for consumer in self.consumers.values():
            consumer.holds |= dict.fromkeys(rows)
        self._change(rows)

    def _change(self, changed: set[Row]) -> None:
        self.silent -= changed
        for consumer in self.consumers.values():
            consumer.due |= changed
        for read in self._reads:
            read.later |= changed

    # -- consumers

    def add(self, name: str, mode: TrackingMode) -> None:
        self.settle()
        self.begin(name, mode)

    def begin(self, name: str, mode: TrackingMode) -> None:
        """Start a consumer that has all current rows."""
        self.consumers[name] = ModelConsumer(mode, dict(self.read_values()))

    def remove(self, name: str) -> None:
        del self.consumers[name]

    def resync(self, name: str) -> None:
        holds: dict[Row, bytes | None] = dict.fromkeys(self.rows)
        self.consumers[name] = ModelConsumer(self.consumers[name].mode, holds, set(self.rows))

    # -- reading

    def read(self, name: str) -> ModelRead:
        self.settle()
        self._count += 1
        consumer, now = self.consumers[name], self.read_values()
        taken = {row: now[row] for row in consumer.due - self.deleted}
        deletes = {row: now[row] for row in consumer.due & self.deleted}
        read = ModelRead(consumer, self._count, taken, deletes)
        for row, value in (taken | deletes).items():
            consumer.offered.setdefault(row, {})[read.number] = value
        self._reads.append(read)
        return read

    def acknowledge(self, read: ModelRead) -> bool:
        consumer = read.consumer
        if consumer not in self.consumers.values() or read.number <= consumer.acknowledged:
            return False
        consumer.acknowledged = read.number
        consumer.due = set(read.later)
        for row, value in (read.taken | read.deletes).items():
            consumer.holds[row] = value
            left = {number: given for number, given in consumer.offered.pop(row).items() if number > read.number}
            consumer.offered |= {row: left} if left else {}
        return True

    def lost(self) -> set[tuple[str, Row]]:
        """Rows of which a consumer may have an old value without ever being offered the current one."""
        return {
            (name, row)
            for name, consumer in self.consumers.items()
            for row, value in self.read_values().items()
            if row not in consumer.due | self.silent and consumer.may_hold(row) != {value}
        }

    # -- checkpoints

    def save(self) -> "dict[str, ModelConsumer]":
        self.settle()
        return deepcopy(self.consumers)

    def load(self, saved: "Mapping[str, ModelConsumer]", silent: set[Row], deleted: set[Row]) -> None:
        """Restore an earlier state.

        Reads that were not acknowledged never happened, and ignored changes count as known to consumers.
        """
        self.consumers = deepcopy(dict(saved))
        for consumer in self.consumers.values():
            consumer.offered = {}
            now = self.read_values()
            consumer.holds |= {row: now[row] for row in silent - consumer.due}
        self.silent, self.deleted = set(), set(deleted)
        self._seen = dict(self.read_values())

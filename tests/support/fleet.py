"""A trainer of one rank, replicas that record what they receive, and waits for a service's status."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

import numpy as np
from tests.support.server import TOKEN
from tests.support.state import Reachable
from tests.support.wire import ack, random_rows

from deltasync.client import (
    Admin,
    Endpoint,
    NumpyTarget,
    Part,
    Position,
    Publisher,
    PublisherOptions,
    Release,
    RowBatch,
    Shard,
    Subscriber,
    SubscriberOptions,
    TableSpec,
)
from deltasync.client.targets.checksums import TargetChecksums
from deltasync.client.targets.local import LocalTarget
from deltasync.client.targets.target import ReadableTarget, Written
from deltasync.core.rows import Values
from deltasync.core.table_form import Mode, TableForm
from deltasync.core.value_types import ValueType, sent_as
from deltasync.v1 import subscribe_pb2
from deltasync.views.decision import ReleaseOptions
from deltasync.wire.messages import checksums_to_message

WAIT = 20.0
# Of both, int8 is shorter.
USER = TableSpec("user", 60, 8)
ITEM = TableSpec("item", 40, 16, np.dtype("<f2"))
TABLES = [USER, ITEM]


class Trainer:
    """Publishes rows of tables that it owns alone; at first all of them."""

    def __init__(
        self,
        address: str | Endpoint,
        tables: Sequence[TableSpec] = TABLES,
        *,
        run: str = "r",
        started: int = 1,
        seed: int = 0,
        continues: Position | None = None,
        start_over: bool = False,
    ) -> None:
        self.tables = list(tables)
        self.rows = {table.name: rows for table, rows in zip(tables, random_rows(seed, tables), strict=True)}
        self._random = np.random.default_rng(seed)
        options = PublisherOptions(
            service=address,
            model="clicks",
            run=run,
            run_started_unix_ns=started,
            continues=continues or Position(),
            start_over=start_over,
        )
        self.publisher = Publisher(options, self.tables, [Shard.whole(table) for table in tables])
        self._step = 0
        self.wait_seconds = WAIT  # For a cut to be sealed.

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.publisher.close()

    def publish_all(self) -> Position:
        return self._publish([np.arange(table.rows) for table in self.tables], full=True)

    def publish_some(self, every: Mapping[TableSpec, int]) -> Position:
        """Publish every n-th row of some tables, and all rows of the others."""
        some = [np.arange(0, table.rows, every.get(table, 1)) for table in self.tables]
        for table, ids in zip(self.tables, some, strict=True):
            self.rows[table.name][np.setdiff1d(np.arange(table.rows), ids)] = 0
        return self._publish(some, full=True)

    def change(self, count: int, tables: Sequence[TableSpec] | None = None) -> Position:
        """Change a number of rows in each table, and publish them."""
        changed = []
        for table in self.tables:
            some = count if tables is None or table in tables else 0
            ids = np.sort(self._random.choice(table.rows, min(some, table.rows), replace=False))
            self.rows[table.name][ids] = self._random.normal(size=(len(ids), table.dim))
            changed.append(ids)
        return self._publish(changed)

    def set(self, table: TableSpec, row: int, value: float) -> Position:
        self.rows[table.name][row] = value
        ids = [np.array([row] if each is table else [], np.int64) for each in self.tables]
        return self._publish(ids)

    def delete(self, table: TableSpec, ids: Any) -> Position:
        """Delete rows of a table, and publish the deletes."""
        self._step += 1
        self.rows[table.name][ids] = 0
        rows = [RowBatch.deletes(Shard.whole(table), np.asarray(ids, np.int64))]
        return self.publisher.publish(Part(step=self._step, step_end_unix_ns=time.time_ns(), rows=rows)).result(
            WAIT
        )

    def expected(self, value_type: ValueType = ValueType.FP32) -> dict[str, bytes]:
        """The rows of a complete replica with a value type."""
        return {table.name: as_sent(table, self.rows[table.name], value_type).tobytes() for table in self.tables}

    def _publish(self, ids: list[Any], *, full: bool = False) -> Position:
        self._step += 1
        rows = [
            RowBatch(Shard.whole(table), each, self.rows[table.name][each])
            for table, each in zip(self.tables, ids, strict=True)
        ]
        part = Part(step=self._step, step_end_unix_ns=time.time_ns(), rows=rows, full=full)
        return self.publisher.publish(part).result(self.wait_seconds)


def as_sent(table: TableSpec, rows: Values, value_type: ValueType) -> Values:
    """Rows as replicas have them after encoding with a value type."""
    form = TableForm(table, sent_as(table, value_type), Mode.EMBEDDINGS)
    return form.held(form.encode(rows))


def held(target: NumpyTarget) -> dict[str, bytes]:
    """The bytes of a replica's tables, like `Trainer.expected`."""
    return {name: rows.tobytes() for name, rows in target.tables.items()}


class Recorder(NumpyTarget):
    """Records every release, and the rows after it, also if these are for quantised modules."""

    def __init__(self) -> None:
        super().__init__()
        self.releases: list[Release] = []
        self.held: dict[Position, dict[str, bytes]] = {}

    def apply(self, release: Release) -> Written | None:
        written = LocalTarget.apply(self, release)
        self.releases.append(release)
        self.held[release.position] = self.bytes()
        return written

    def bytes(self) -> dict[str, bytes]:
        return held(self)

    @property
    def received_rows(self) -> int:
        return sum(len(rows.ids) for release in self.releases for rows in release.rows)


def checked_ack(
    received_bytes: int, applied: Position, checksums: Mapping[int, int]
) -> subscribe_pb2.SubscribeRequest:
    """An ack with digests of the replica's rows, by slot."""
    message = ack(received_bytes, applied)
    message.ack.sums.extend(checksums_to_message(checksums))
    return message


def follow(
    service: Reachable,
    consumer: str,
    replica: str,
    target: Any,
    checksums: Callable[[ReadableTarget], TargetChecksums] = TargetChecksums,
    **fields: Any,
) -> Subscriber:
    options = SubscriberOptions(service=service.grpc, consumer=consumer, replica=replica, **fields)
    return Subscriber(options, target, checksums=checksums)


def without_sweep(target: ReadableTarget) -> TargetChecksums:
    """Checksums that change only with releases and verifications."""
    return TargetChecksums(target, sweeps=False)


def in_small_steps(target: ReadableTarget) -> TargetChecksums:
    """Checksums of blocks of four rows, of which a verification reads one at a time."""
    return TargetChecksums(target, block_rows=4, read_seconds=0.0, sweeps=False)


@contextmanager
def lost(subscriber: Subscriber) -> Iterator[Subscriber]:
    """A replica that ends after the block without a goodbye, like a killed process, and so counts as away."""
    try:
        yield subscriber
    finally:
        requests, subscriber._requests = subscriber._requests, None
        assert requests
        subscriber._closing.set()
        requests.put(None)
        subscriber._thread.join(WAIT)
        subscriber._known = False
        subscriber.close()


def wait_for_lag(service: Reachable, consumer: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait until the lag of a consumer fulfils a condition; returns the lag."""
    deadline = time.monotonic() + WAIT
    while True:
        lag: dict[str, Any] = service.get_json(f"/consumers/{consumer}")
        if wanted(lag):
            return lag
        assert time.monotonic() < deadline, lag
        time.sleep(0.002)


def wait_until_in_sync(service: Reachable, consumer: str, head: Position, replicas: int = 1) -> dict[str, Any]:
    """Wait until this number of replicas are connected and all are in sync; returns the lag."""
    return wait_for_lag(
        service,
        consumer,
        lambda lag: lag["head"] >= head.number and lag["state"] == "in sync" and len(lag["replicas"]) >= replicas,
    )


def wait_until_delivered(service: Reachable, consumer: str, head: Position) -> dict[str, Any]:
    """Wait until all replicas have received everything, for replicas that cannot prove it."""
    # A version that is sealed and not applied yet is one that they lack, although no row of it is known.
    return wait_for_lag(
        service,
        consumer,
        lambda lag: (
            lag["head"] >= head.number
            and lag["state"] == "delivered"
            and lag["lag"]["versions"] == lag["lag"]["rows"] == 0
        ),
    )


def admin_of(service: Reachable) -> Admin:
    return Admin(Endpoint(service.http, TOKEN))


# Rows that an earlier release left out are released without delay, and what failed is tried again soon.
AT_ONCE = ReleaseOptions(shortest_seconds=0.001, longest_seconds=0.002, retry_seconds=0.02)

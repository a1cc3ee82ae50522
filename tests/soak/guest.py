"""A model that the soak itself publishes and follows, there for one fault."""

import time
from collections.abc import Mapping
from typing import Self

import numpy as np
from tests.soak.schedule import Fault
from tests.soak.world import SoakFailed, World

from deltasync.base.errors import DeltasyncError
from deltasync.client import (
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
from deltasync.core.policy import Policy

ROWS, _DIM = 100, 4
_SECONDS = 120.0


class GuestTarget(NumpyTarget):
    """Arrays, and the largest number that they ever had."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0.0

    def apply(self, release: Release) -> None:
        super().apply(release)
        self.largest = max([self.largest, *(float(rows.max()) for rows in self.tables.values())])


class Guest:
    """A model of this name, a consumer of the same name, and its replica. Used in one thread.

    Each run publishes its number as all values of the first rows of its tables, and nothing else.
    """

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self._world = world
        self._runs = 0
        self._wanted: dict[str, int] = {}
        self._held = Position()
        self._service = world.open_link(name)
        self.follow()

    def follow(self) -> None:
        """Make the consumer, and have a replica."""
        self._world.call(lambda admin: admin.create_consumer(self.name, self.name, Policy()))
        self.join()

    def join(self) -> None:
        """Have a replica that holds nothing, whose name the one before has had, too."""
        self.target = GuestTarget()
        options = SubscriberOptions(service=self._service, consumer=self.name, replica="guest")
        self.subscriber = Subscriber(options, self.target)

    def publish(self, value: float | None = None, *, start_over: bool = False, **rows: int) -> None:
        """Publish a run's number, or another value, in this number of rows of each table, and end the run.

        After a rollback, the run must `start_over`, because it has no state.
        """
        self._runs += 1
        shards = [Shard(TableSpec(name, ROWS, _DIM), 0, ROWS, 0, _DIM) for name in rows]
        options = PublisherOptions(
            service=self._service,
            model=self.name,
            run=f"{self.name}-{self._runs}",
            run_started_unix_ns=time.time_ns(),
            start_over=start_over,
        )
        values = {name: np.full((count, _DIM), value or self._runs, np.float32) for name, count in rows.items()}
        batches = [RowBatch(each, np.arange(rows[each.table.name]), values[each.table.name]) for each in shards]
        part = Part(step=self._runs, step_end_unix_ns=time.time_ns(), rows=batches, full=True)
        with Publisher(options, [each.table for each in shards], shards) as publisher:
            self._held = publisher.publish(part).result(_SECONDS)
        self._wanted = rows

    def expect(self) -> None:
        """Wait until the replica holds what was published last, and see whether it holds just that."""
        self.subscriber.wait_for(self._held, _SECONDS)
        self.subscriber.check()
        if found := self._differs(self._runs, self._wanted):
            raise SoakFailed(f"{self.name} was published {self._wanted}, and its replica holds {found}")

    def expect_run(self, number: int, **rows: int) -> None:
        """Wait until the replica holds just what an earlier run has published, in so many rows of these tables."""
        what = f"{self.name}: what run {number} has published, {rows}"
        self._world.await_there(lambda: not self._differs(number, rows), what)
        self.subscriber.check()

    def _differs(self, run: int, rows: Mapping[str, int]) -> str:
        """What the replica holds if that is not just what a run has published; else empty."""
        found = {name: int((held == run).all(axis=1).sum()) for name, held in self.target.tables.items()}
        rest = {name: int((held == 0).all(axis=1).sum()) for name, held in self.target.tables.items()}
        if found == rows and all(rest[name] == ROWS - found[name] for name in found):
            return ""
        return f"{found}, {rest} zeros"

    def leave(self) -> None:
        """Have no replica, no consumer, and no model any more."""
        self.subscriber.close()
        self._world.settle(lambda admin: admin.delete_consumer(self.name))
        self._world.settle(lambda admin: admin.delete_model(self.name))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            self.leave()
        except DeltasyncError:
            if kind is None:  # Else what has failed first is to be told.
                raise
        finally:
            self._world.links[self.name].close()


def guest_of(world: World, fault: Fault) -> Guest:
    """A guest for a fault, with a name of its own."""
    return Guest(world, f"guest-{round(fault.at * 1000)}")

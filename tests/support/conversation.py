"""What trainers, replicas and operators have to say to a service, with the public names of any client's version.

    python conversation.py GRPC HTTP TOKEN FOLDER STATE

Writes what the replicas hold, what the trainer has, and which files the client is made of, into FOLDER. STATE is
what the service calls consumers whose replicas have everything. It imports nothing of the tests, so that an
earlier client can be put under it.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from deltasync import client
from deltasync.client import (
    Admin,
    CallbackTarget,
    Contradiction,
    Mode,
    NotFound,
    NotPermitted,
    NumpyTarget,
    Part,
    Policy,
    Position,
    Publisher,
    PublisherOptions,
    Release,
    RowBatch,
    Shard,
    Subscriber,
    SubscriberOptions,
    TableSpec,
    ValueType,
)
from deltasync.client.status import fetch_lag

WAIT = 60.0
TABLES = [TableSpec("user", 60, 8), TableSpec("item", 40, 16, np.dtype("<f2"))]
RANKED = Policy(top_k=7, value_type=ValueType.INT8)


class Trainer:
    """Two ranks, of which each holds one table whole."""

    def __init__(self, service: str, run: str, started: int, rows: dict[str, Any], held: Position) -> None:
        self.rows = rows
        self._random = np.random.default_rng(started)
        self._ranks = [
            Publisher(
                PublisherOptions(
                    service=service,
                    model="clicks",
                    run=run,
                    run_started_unix_ns=started,
                    rank=rank,
                    world_size=len(TABLES),
                    continues=held,
                ),
                TABLES,
                [Shard.whole(table)],
            )
            for rank, table in enumerate(TABLES)
        ]

    def publish(self, step: int, *, full: bool = False) -> Position:
        """A cut with all rows of every table, or with some that have changed."""
        sealed = []
        for rank, table in zip(self._ranks, TABLES, strict=True):
            some = self._random.choice(table.rows, table.rows if full else 12, replace=False)
            ids, values = np.sort(some), self._random.normal(size=(len(some), table.dim))
            self.rows[table.name][ids] = values
            rows = [RowBatch(Shard.whole(table), ids, self.rows[table.name][ids])]
            sealed.append(rank.publish(Part(step=step, step_end_unix_ns=step, rows=rows, full=full)))
        positions = {each.result(WAIT) for each in sealed}
        assert len(positions) == 1, positions
        return positions.pop()

    def close(self) -> None:
        for rank in self._ranks:
            rank.close()


class Replica(NumpyTarget):
    """Remembers whether it was given anything anew."""

    resynced = 0

    def apply(self, release: Release) -> None:
        super().apply(release)
        self.resynced += release.resync


class Conversation:
    """One after the other: consumers, cuts, replicas, a replica that was away, a second run."""

    def __init__(self, grpc: str, http: str, token: str, state: str) -> None:
        self._grpc, self._http, self._token, self._state = grpc, http, token, state
        self._admin = self._admin_of(token)
        self.rows = {table.name: np.zeros((table.rows, table.dim), table.dtype) for table in TABLES}
        self.targets = {"plain": Replica(), "late": Replica(), "ranked-0": Replica(), "ranked-1": Replica()}
        self._changed: set[int] = set()

    def hold(self) -> None:
        self._manage_consumers()
        trainer = Trainer(self._grpc, "first", 1, self.rows, Position())
        head = trainer.publish(1, full=True)
        late = self._follow("plain", "late")
        late.wait_for(head, WAIT)
        late.close()
        followers = [self._follow("plain", "plain"), *(self._follow("ranked", f"ranked-{n}") for n in range(2))]
        counter = Subscriber(self._options("counted", "counter"), CallbackTarget(self._count))
        for step in (2, 3):
            head = trainer.publish(step)
        trainer.close()
        trainer = Trainer(self._grpc, "second", 2, self.rows, head)
        head = trainer.publish(4)  # Not in full: it continues the first.
        late = self._follow("plain", "late", late.held)
        for follower in (*followers, late, counter):
            follower.wait_for(head, WAIT)
        for consumer in ("plain", "ranked"):
            self._wait_until_served(consumer, head)
        assert self._changed == set(range(TABLES[0].rows))
        for follower in (*followers, late, counter):
            follower.close()
        trainer.close()
        assert self.targets["late"].resynced == 1, "what it held was enough to go on from"
        self._delete_consumers()

    def _manage_consumers(self) -> None:
        wanted = {
            "plain": Policy(),
            "ranked": RANKED,
            "counted": Policy(mode=Mode.IDS, tables=("user",)),
        }
        for name, policy in wanted.items():
            self._admin.create_consumer(name, "clicks", policy if name != "ranked" else Policy(top_k=3))
            self._admin.update_consumer(name, policy)
            self._admin.create_consumer(name, "clicks", policy)
        found = {consumer.name: consumer for consumer in self._admin.consumers()}
        assert wanted.keys() <= found.keys(), found
        assert (found["ranked"].model, found["ranked"].policy.top_k) == ("clicks", 7), found
        refused(Contradiction, self._admin.create_consumer, "plain", "clicks", RANKED)
        refused(NotPermitted, self._admin_of("wrong").delete_consumer, "plain")

    def _delete_consumers(self) -> None:
        for name in ("plain", "ranked", "counted"):
            self._admin.delete_consumer(name)
            refused(NotFound, self._admin.delete_consumer, name)
            refused(NotFound, fetch_lag, self._http, name)

    def _wait_until_served(self, consumer: str, head: Position) -> None:
        deadline = time.monotonic() + WAIT
        while True:
            lag = fetch_lag(self._http, consumer)
            if (lag["head"], lag["state"], lag["lag"]["rows"]) == (head.number, self._state, 0):
                break
            assert time.monotonic() < deadline, lag
            time.sleep(0.01)
        # Checksums are others now: neither side takes those of the other for its own.
        assert not any(each["checked"] for each in lag["replicas"]), lag

    def _admin_of(self, token: str) -> Admin:
        if not hasattr(client, "Endpoint"):
            return Admin(self._grpc, token)  # type: ignore[call-arg]  # as it was at first
        return Admin(client.Endpoint(self._grpc, token))

    def _follow(self, consumer: str, replica: str, held: Position | None = None) -> Subscriber:
        return Subscriber(self._options(consumer, replica, held), self.targets[replica])

    def _options(self, consumer: str, replica: str, held: Position | None = None) -> SubscriberOptions:
        return SubscriberOptions(service=self._grpc, consumer=consumer, replica=replica, held=held or Position())

    def _count(self, release: Release) -> None:
        for rows in release.rows:
            assert rows.norms is not None
            assert len(rows.norms) == len(rows.ids)
            self._changed.update(rows.ids.tolist())


def refused(kind: type[Exception], call: Any, *arguments: Any) -> None:
    try:
        call(*arguments)
    except kind:
        return
    raise AssertionError(f"{call.__name__}{arguments}: expected {kind.__name__}")


def main(grpc: str, http: str, token: str, folder: str, state: str) -> None:
    conversation = Conversation(grpc, http, token, state)
    conversation.hold()
    np.savez(Path(folder) / "model.npz", allow_pickle=False, **conversation.rows)
    for name, target in conversation.targets.items():
        np.savez(Path(folder) / f"{name}.npz", allow_pickle=False, **target.tables)
    loaded = {name: module.__file__ for name, module in sys.modules.items() if name.startswith("deltasync.")}
    (Path(folder) / "files.json").write_text(json.dumps(loaded))


if __name__ == "__main__":
    main(*sys.argv[1:])

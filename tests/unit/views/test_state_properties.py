"""A model's whole state against plain dictionaries: lookups, evictions, deletes, full cuts, restarts, joins.

A row of the embedding table says in its first value whose it is: the raw id that its slot held when it was
written. So whoever looks an id up in what a replica holds sees whether the row is that id's.
"""

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tests.support.folders import fast_folder
from tests.support.local_model import LocalModel
from tests.support.releases import deleted_rows, live_rows

from deltasync.core.digests import checksum_of
from deltasync.core.policy import Policy
from deltasync.core.position import NOWHERE, Position
from deltasync.core.rows import RowBatch, Values
from deltasync.core.tables import Shard, TableKind, TableSpec
from deltasync.core.value_types import ValueType
from deltasync.model.feed import Feed
from deltasync.model.releases import FrozenRelease
from deltasync.views.view import View

Step = tuple[str, Any]

ROWS, DIM = 8, 3
USER = TableSpec("user", ROWS, DIM)
MAP = TableSpec("user.raw_ids", ROWS, 1, np.dtype("<i8"), TableKind.ID_MAP, "user")
MEAN = TableSpec("norm.mean", 1, 2, np.dtype("<f8"), TableKind.BUFFER)
TABLES = [USER, MAP, MEAN]
REPLICAS = 2
NOT_FED = np.nan

slots = st.integers(0, ROWS - 1)
STEPS = st.one_of(
    st.tuples(st.just("lookup"), st.sets(slots, min_size=1, max_size=4)),
    st.tuples(st.just("evict"), slots),
    st.tuples(st.just("free"), slots),
    st.tuples(st.just("delete"), st.sets(slots, min_size=1, max_size=3)),
    st.tuples(st.just("cut"), st.booleans()),
    st.tuples(st.just("release"), st.none()),
    st.tuples(st.just("serve"), st.integers(0, REPLICAS - 1)),
    st.tuples(st.just("join"), st.integers(0, REPLICAS - 1)),
    st.tuples(st.just("restart"), st.none()),
)
POLICIES = st.sampled_from(
    [
        Policy(tables=("user", "norm*")),
        Policy(top_k=1),
        Policy(top_k=1, max_bytes=30),
        Policy(top_k=0.3, value_type=ValueType.INT8),
        Policy(tables=("user",), value_type=ValueType.FP16, max_bytes=30),
    ]
)


@dataclass
class Trainer:
    """The trainer's state, in plain dictionaries: what is not in one is not there."""

    rows: dict[int, tuple[float, ...]] = field(default_factory=dict)
    ids: dict[int, int] = field(default_factory=dict)
    mean: tuple[float, float] = (0.0, 0.0)
    changed: set[int] = field(default_factory=set)
    clock: int = 0

    def train(self, slot: int) -> None:
        self.clock += 1
        self.rows[slot] = (float(self.ids.get(slot, 0)), float(self.clock % 7), self.clock / 2)
        self.mean = (self.clock / 3, NOT_FED)
        self.changed.add(slot)

    def hand_over(self, slot: int) -> None:
        self.clock += 1
        self.ids[slot] = self.clock
        self.train(slot)

    def delete(self, slot: int) -> None:
        self.rows.pop(slot, None)
        self.changed.add(slot)

    def free(self, slot: int) -> None:
        self.ids.pop(slot, None)
        self.delete(slot)

    def tables(self) -> dict[str, Values]:
        """As who has everything holds it."""
        user, ids = np.zeros((ROWS, DIM), np.float32), np.zeros((ROWS, 1), np.int64)
        for slot, row in self.rows.items():
            user[slot] = row
        for slot, raw in self.ids.items():
            ids[slot] = raw + 1
        return {"user": user, MAP.name: ids, MEAN.name: np.array([self.mean])}


@dataclass
class Replica:
    """What a replica was told to hold, by table; and which rows it knows to be there."""

    position: Position = field(default_factory=Position)
    tables: dict[str, Values] = field(default_factory=dict)
    there: set[int] = field(default_factory=set)


class Play:
    """A model, a view of it, and replicas of both; what they hold is held against the trainer."""

    def __init__(self, local: LocalModel, policy: Policy, folder: Path) -> None:
        self.local, self.policy, self.folder = local, policy, folder
        self.view: View = local.view()
        self.trainer = Trainer()
        self.published: dict[int, dict[str, Values]] = {}
        self.there: dict[int, set[int]] = {}
        self.replicas = {True: [Replica() for _ in range(REPLICAS)], False: [Replica() for _ in range(REPLICAS)]}

    async def lookup(self, looked_up: set[int]) -> None:
        for slot in looked_up:
            self.trainer.train(slot)

    async def evict(self, slot: int) -> None:
        self.trainer.hand_over(slot)

    async def free(self, slot: int) -> None:
        self.trainer.free(slot)

    async def delete(self, deleted: set[int]) -> None:
        for slot in deleted:
            self.trainer.delete(slot)

    async def cut(self, full: bool) -> None:
        """Full: deletes are left unsaid; else only what has changed is named."""
        named = set(range(ROWS)) if full or not self.published else self.trainer.changed
        tables, there = self.trainer.tables(), self.trainer.rows.keys()
        batches = self.local.batches(
            {
                "user": {slot: tables["user"][slot] for slot in named & there},
                MAP.name: {slot: tables[MAP.name][slot] for slot in named},
                MEAN.name: {0: tables[MEAN.name][0]},
            }
        )
        gone = np.array(sorted(named - there), np.int64)
        if not full:
            batches.append(RowBatch.deletes(Shard.whole(USER), gone))
        await self.local.cut_batches(batches, ["user"] if full else [])
        self.trainer.changed.clear()
        version = self.local.model.position.number
        self.published[version], self.there[version] = tables, set(there)
        await self.view.prepare(self.policy)

    async def release(self, _: None) -> None:
        await self.view.make_release(self.policy, 0)
        await self.serve(0)

    async def serve(self, number: int) -> None:
        for feed in (self.local.model, self.view):
            await self._serve(feed, self.replicas[feed is self.view][number])

    async def join(self, number: int) -> None:
        for replicas in self.replicas.values():
            replicas[number] = Replica()
        await self.serve(number)

    async def restart(self, _: None) -> None:
        await self.local.close()
        self.local = await LocalModel.opened(self.folder)
        assert self.local.lost == {}
        self.view = self.local.view()
        await self.view.prepare(self.policy)

    async def _serve(self, feed: Feed, replica: Replica) -> None:
        if not feed.position.number:
            return
        decision, after = feed.continue_from(replica.position, NOWHERE)
        specs = {each.spec.name: each.spec for each in feed.forms}
        if not decision.yes or not replica.tables:
            replica.tables = {name: np.zeros((each.rows, each.dim), each.dtype) for name, each in specs.items()}
            replica.there = set()
        release = await feed.release(after.number)
        assert isinstance(release, FrozenRelease)
        for slot, batch in (*live_rows(release).items(), *deleted_rows(release).items()):
            form = feed.forms[slot]
            values = batch.values if batch.deleted else form.decode(batch.values)
            replica.tables[form.spec.name][batch.ids] = 0 if batch.deleted else values
            if form.spec == USER:
                ids = set(batch.ids.tolist())
                replica.there = replica.there - ids if batch.deleted else replica.there | ids
        assert release.head
        replica.position = Position(feed.history, release.head.number)
        sums = [checksum_of(np.arange(len(rows)), rows) for rows in replica.tables.values()]
        assert list(release.checksums) == sums
        self._check(replica, release.head.version, exact=feed is self.local.model)

    def _check(self, replica: Replica, version: int, *, exact: bool) -> None:
        wanted = self.published[version]
        for name in replica.tables.keys() & {MAP.name, MEAN.name}:
            assert replica.tables[name].tobytes() == wanted[name].tobytes(), name
        # Deletes are never held back, and no row that was never there is made up.
        assert replica.there <= self.there[version]
        user = replica.tables["user"]
        assert not user[sorted(set(range(ROWS)) - self.there[version])].any()
        if exact:
            assert user.tobytes() == wanted["user"].tobytes()
            assert replica.there == self.there[version]
        for slot in replica.there if self.policy.value_type is ValueType.FP32 or exact else ():
            assert user[slot, 0] == wanted["user"][slot, 0], "a row of another id than the map says"


@given(POLICIES, st.lists(STEPS, min_size=3, max_size=14))
def test_what_every_replica_holds_is_the_trainers_state_at_its_version(policy: Policy, steps: list[Step]) -> None:
    async def main(folder: Path) -> None:
        play = Play(LocalModel(folder), policy, folder)
        await play.local.add(*TABLES)
        operations: list[Step] = [("evict", 1), ("lookup", {2, 3}), ("cut", False), *steps]
        try:
            for name, argument in [*operations, ("cut", False), ("release", None), ("serve", 1), ("join", 0)]:
                await getattr(play, name)(argument)
        finally:
            await play.local.close()

    with fast_folder() as folder:
        asyncio.run(main(Path(folder)))

"""A process that owns models, in memory, with a clock that only the test advances."""

import asyncio

from tests.support.memory_bucket import MemoryBucket, MemoryLog, MemoryStore

from deltasync.base.errors import NotOwner, Owner, StorageFailed
from deltasync.base.events import Event, Events
from deltasync.cluster.bucket import ClusterOptions, Member
from deltasync.cluster.shared_owners import SharedOwners

LEASE_SECONDS = 6.0
SECOND = 10**9


class World:
    """The brokers and the clock."""

    def __init__(self) -> None:
        self.store = MemoryStore()
        self.logs = dict[str, MemoryLog]()
        self.now_ns = 0
        self.starts = 0

    def log(self, model: str) -> MemoryLog:
        return self.logs.setdefault(model, MemoryLog())


class FakeModels:
    """The service's side: fences a log when it takes it over."""

    def __init__(self, world: World, name: str) -> None:
        self.opened = dict[str, int]()  # The last sequence that this process knows of each open log.
        self.consumers = dict[str, list[str]]()
        self.refuses = False
        self.slow: asyncio.Event | None = None
        self.said = list[tuple[str, ...]]()
        self.ownership: SharedOwners | None = None
        self._world, self._name = world, name

    async def take(self, model: str, owner: Owner) -> None:
        if self.slow:
            await self.slow.wait()
        if self.refuses:
            raise StorageFailed("no space")
        log = self._world.log(model)
        assert log.append(self._name, "fence", len(log.records))
        self.opened[model] = len(log.records)
        for consumer in self.consumers.get(model, ()):
            assert self.ownership
            await self.ownership.reserve_consumer(consumer, model)
        self.said.append(("take", model))

    async def forget(self, model: str) -> None:
        self.opened.pop(model, None)
        self.said.append(("forget", model))

    async def give_up(self, model: str, reason: str) -> None:
        self.opened.pop(model, None)
        self.said.append(("give_up", model, reason))

    async def save(self, model: str) -> None:
        self.said.append(("save", model))

    async def models_with_log(self) -> set[str]:
        return set(self._world.logs)


class Process:
    """One process; `beat` does its periodic work."""

    def __init__(self, world: World, name: str) -> None:
        world.starts += 1
        self.name, self.world = name, world
        self.bucket = MemoryBucket(world.store)
        self.models = FakeModels(world, name)
        self.events = list[Event]()
        self.ownership = SharedOwners(
            ClusterOptions(lease_seconds=LEASE_SECONDS),
            Member(name, f"{name}:1", f"http://{name}", run=str(world.starts), started=world.starts),
            self.bucket,
            self.models,
            Events(self.events.append),
            lambda: world.now_ns,
        )
        self.models.ownership = self.ownership

    async def begin(self) -> "Process":
        """Do the same as `start`, but without periodic work."""
        await self.beat()
        return self

    async def beat(self) -> None:
        await self.ownership.step()
        await idle()

    async def append(self, model: str) -> bool:
        """Append a cut; a process whose append is refused gives up the model."""
        log, last = self.world.log(model), self.models.opened[model]
        if log.append(self.name, "cut", last):
            self.models.opened[model] = last + 1
            return True
        await self.ownership.lost(model, "its log is fenced")
        return False

    def answers(self, model: str) -> bool:
        try:
            self.ownership.check(model)
        except NotOwner:
            return False
        return model in self.models.opened

    def die(self) -> None:
        self.bucket.cut = True
        self.world.store.networks.remove(self.bucket)


async def idle() -> None:
    """Wait until no work is in progress."""
    while others := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(others)


async def pass_time(world: World, processes: "list[Process]", seconds: float) -> None:
    """Advance the clock, and let all processes do their periodic work every two seconds."""
    for _ in range(max(1, round(seconds / 2))):
        world.now_ns += 2 * SECOND
        for process in processes:
            await process.beat()

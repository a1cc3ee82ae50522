"""Random stories of a canary and of a fleet that follows it: the fleet gets only what the canary truly held."""

import asyncio
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.examples import examples
from tests.support.local_service import SetClock
from tests.support.memory_store import MemoryDisk, MemoryStore
from tests.support.seals import sealed

from deltasync.base.events import Event, EventKind, Events
from deltasync.checkpoints.kept_version import KeptVersion
from deltasync.consumers.follow import Follow, RolloutDelay
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.policy import Policy
from deltasync.core.position import Position
from deltasync.core.seal import SealHistory
from deltasync.log.log_store import EmbeddedLogs
from deltasync.service.following import Following
from deltasync.service.serving_history import Histories

BEHIND = 6.0  # Seconds.
REPLICAS = ("a", "b", "c")
DAY = 86_400
Process = tuple[str, int]
Step = tuple[str, Any]


@dataclass(frozen=True)
class Look:
    """What was true when the service looked.

    Attributes:
        seconds: since it looked before, without a restart; at most 5.
        connected: the processes that were connected.
        held: the versions that each process had held since one was lost, or an objection was withdrawn.
        objections: how many objections had been raised and how many withdrawn.
    """

    seconds: float
    connected: frozenset[Process]
    held: dict[Process, frozenset[int]]
    objections: tuple[int, int]


class World:
    """A service without tables, its canary, and an oracle that remembers what was true."""

    def __init__(self) -> None:
        self.disk, self.clock = MemoryDisk(), SetClock()
        self.seals, self.kept = SealHistory(), list[KeptVersion]()
        self.running, self.begun = dict[str, int](), 0  # Processes, by replica.
        self.at = defaultdict[Process, int](int)  # The version that each process holds.
        self.held = defaultdict[Process, set[int]](set)  # See `Look`.
        self.paused, self.raised, self.withdrawn = False, 0, 0
        self.looks, self.failures = list[Look](), list[Event]()
        self.out = set[str]()  # The ids of versions that were kept before an objection was withdrawn.

    async def begin(self) -> None:
        self.start()
        for name in ("canary", "fleet"):
            await self.registry.create(name, "m", Policy())
        self.publish()
        self.keep()
        distance = RolloutDelay("canary", BEHIND)
        await self.registry.follow("fleet", Follow(self.kept[0], 0, "me", distance))

    def start(self) -> None:
        """Start the service, perhaps again: only the log is left of the one before."""
        log = MemoryStore(self.disk, 1 << 30)
        events = Events(self.hear)
        self.registry = ConsumerRegistry(EmbeddedLogs(log), 3600.0, events)
        feed = SimpleNamespace(
            history="h",
            seals=self.seals,
            seal_of=self.seals.checksum_of,
            version_of=lambda number: number,
            head_of=lambda _: None,
        )
        checkpoints = SimpleNamespace(known_kept=self.kept)
        model: Any = SimpleNamespace(name="m", log=log, seals=self.seals, checkpoints=checkpoints)
        models: Any = Models(model, log)
        consumers: Any = SimpleNamespace(feed=lambda _: feed, get=self.registry.get)
        self.checkpoints = checkpoints
        self.histories = Histories(models, self.registry, consumers, DAY, events, self.clock)
        views: Any = Views()
        self.following = Following(models, self.registry, consumers, views, self.histories, events, self.clock)
        self.streams = dict[str, asyncio.Event]()
        self.looked = False

    def hear(self, event: Event) -> None:
        if event.kind is EventKind.FAILED:
            self.failures.append(event)

    # What happens.

    def publish(self) -> None:
        version = self.seals.newest_version + 1
        self.seals.append(replace(sealed(version), checksum=1000 + version))

    def keep(self) -> None:
        seal, number = self.seals[-1], len(self.kept)
        self.kept.append(
            KeptVersion(
                model="m",
                name="",
                id=f"{number:09d}",
                seal=seal,
                bytes=1,
                kept_unix_ns=self.clock().unix_ns,
                by="",
            )
        )

    def connect(self, name: str) -> None:
        """Let a replica connect; its process starts if it does not run."""
        if name not in self.running:
            self.begun += 1
            self.running[name] = self.begun
        if name not in self.streams:
            consumer, process = self.registry.get("canary"), (name, self.running[name])
            self.streams[name] = asyncio.Event()
            replica = self.registry.connect(consumer, name, self.streams[name], instance=str(process[1]))
            replica.checked = False
            self.registry.acknowledge(consumer, replica, self.position(self.at[process]))

    def back(self) -> None:
        """Let all replicas connect whose processes run."""
        for name in list(self.running):
            self.connect(name)

    def disconnect(self, name: str, *, dies: bool = False, goodbye: bool = False) -> None:
        if dies or goodbye:
            self.running.pop(name, None)
        if stream := self.streams.pop(name, None):
            consumer = self.registry.get("canary")
            replica = consumer.replicas[name]
            self.registry.disconnect(consumer, replica, stream, "it left", forget=goodbye, expected=not goodbye)

    def deliver(self, name: str) -> None:
        """Let a replica apply and prove the newest version, whichever it skips."""
        if name not in self.streams or self.paused:
            return
        consumer, version = self.registry.get("canary"), self.seals.newest_version
        replica, process = consumer.replicas[name], (name, self.running[name])
        self.at[process] = version
        self.held[process].add(version)
        replica.checked = True
        replica.note_held(self.seals.checksum_of(version))
        self.registry.acknowledge(consumer, replica, self.position(version))

    async def object(self) -> None:
        self.raised = self.withdrawn + 1
        await self.following.object("canary", "its AUC fell")

    async def withdraw(self) -> None:
        if self.withdrawn < self.raised:
            self.withdrawn = self.raised
            self.held.clear()
            self.out = {each.id for each in self.kept}
            self.checkpoints.newest_id = self.kept[-1].id
            await self.following.withdraw("canary")

    def restart(self) -> None:
        self.registry.write_offsets()
        self.start()

    async def look(self, seconds: float) -> None:
        """Some time passes, then the service looks; checks what it gives to the fleet."""
        self.clock.wait(seconds)
        await self.histories.look()
        connected = frozenset((name, self.running[name]) for name in self.streams)
        if self.looks and self.looks[-1].connected - connected:
            self.held.clear()
        for process in connected:
            self.held[process].add(self.at[process])
        held = {process: frozenset(versions) for process, versions in self.held.items()}
        seen = min(seconds, 5.0) if self.looked else 0.0
        self.looks.append(Look(seen, connected, held, (self.raised, self.withdrawn)))
        self.looked = True
        before = self.given
        await self.following.heed()
        await self.following.go_on()
        if self.given != before:
            self.check(self.given)

    # What is true.

    @property
    def given(self) -> KeptVersion:
        follows = self.registry.get("fleet").follows
        assert follows
        return follows.kept

    def check(self, given: KeptVersion) -> None:
        """Check a version that the fleet was given."""
        now, seconds, was_held, counts = self.looks[-1], 0.0, False, False
        assert now.connected, "nobody serves it"
        assert now.objections[0] == now.objections[1], "an objection is in force"
        assert given.id not in self.out, "it was kept before an objection was withdrawn"
        for look in self.looks:
            if not look.connected <= now.connected:  # One was lost since.
                seconds, was_held, counts = 0.0, False, False
            same = look.connected == now.connected and look.objections == now.objections
            was_held |= same and all(given.version in look.held.get(each, ()) for each in now.connected)
            seconds += look.seconds if counts and same else 0.0
            counts = same and was_held
        assert seconds >= BEHIND, f"{given.description} was given after {seconds} s"

    def position(self, version: int) -> Position:
        return Position("h", version, self.seals.checksum_of(version))


class Models(dict[str, Any]):
    """One model, and the locks of a service."""

    def __init__(self, model: Any, log: MemoryStore) -> None:
        super().__init__(m=model)
        self.storage = SimpleNamespace(logs=EmbeddedLogs(log))
        self.changing, self.lock = asyncio.Lock(), asyncio.Lock()

    def model(self, name: str) -> Any:
        return self[name]

    def releasing(self, _: str) -> asyncio.Lock:
        return self.lock


class AtOnce(ThreadPoolExecutor):
    """Does what is for a thread at once."""

    def submit(self, work: Any, /, *arguments: Any, **named: Any) -> Future[Any]:
        done = Future[Any]()
        try:
            done.set_result(work(*arguments, **named))
        except Exception as error:  # noqa: BLE001
            done.set_exception(error)
        return done


class Views:
    """No consumer has one."""

    async def follow(self, *_: object) -> None:
        pass

    def get(self, _: object) -> None:
        return None


async def play(steps: list[Step]) -> World:
    world = World()
    await world.begin()
    for kind, value in steps:
        match kind:
            case "look":
                await world.look(value)
            case "connect" | "deliver" | "disconnect":
                getattr(world, kind)(value)
            case "die":
                world.disconnect(value, dies=True)
            case "goodbye":
                world.disconnect(value, goodbye=True)
            case "pause":
                world.paused = value
            case "clock":
                world.clock.set_ahead(value)
            case "restart":
                world.clock.wait(value)
                world.restart()
            case "object" | "withdraw":
                await getattr(world, kind)()
            case _:
                getattr(world, kind)()
    return world


async def quiet(world: World) -> None:
    """Nothing goes wrong any more: the fleet gets the next version."""
    world.paused = False
    await world.withdraw()
    world.connect("a")
    world.publish()
    for name in REPLICAS:
        world.deliver(name)
    world.keep()
    for _ in range(5):
        await world.look(2.0)
    assert world.given.version == world.seals.newest_version, world.registry.get("fleet").waits


def looks(least: int, most: int) -> st.SearchStrategy[list[Step]]:
    return st.lists(st.tuples(st.just("look"), st.just(2.0)), min_size=least, max_size=most)


def together(*parts: st.SearchStrategy[list[Step]]) -> st.SearchStrategy[list[Step]]:
    return st.tuples(*parts).map(lambda steps: [each for part in steps for each in part])


replicas = st.sampled_from(REPLICAS)
delivered = st.lists(st.tuples(st.just("deliver"), replicas), max_size=2)
to_all = st.just([("deliver", each) for each in REPLICAS])
published, kept = st.just([("publish", None)]), st.just([("keep", None)])
nothing, back = st.just(list[Step]()), st.just([("back", None)])
joined = st.lists(st.tuples(st.just("connect"), replicas), min_size=1, max_size=2)
release = st.one_of(
    together(published, to_all, kept, looks(0, 3)),
    together(published, kept, to_all, looks(0, 3)),
    together(published, delivered, kept, looks(0, 2), delivered, looks(0, 2)),
    together(published, delivered, looks(0, 1)),
    together(published, kept, published, to_all, looks(0, 4)),
    together(published, kept, to_all, published, to_all, looks(0, 4)),
)
trouble = st.one_of(
    together(
        st.lists(st.tuples(st.sampled_from(["disconnect", "die", "goodbye"]), replicas), min_size=1, max_size=2)
    ),
    st.tuples(st.tuples(st.just("pause"), st.booleans())).map(list),
    st.tuples(st.tuples(st.just("clock"), st.sampled_from([0, 100, -100, 2 * DAY, -2 * DAY]))).map(list),
    together(st.tuples(st.tuples(st.just("restart"), st.sampled_from([0.1, 36.0]))).map(list), looks(0, 1)),
    st.tuples(st.tuples(st.just("look"), st.sampled_from([0.5, 40.0]))).map(list),
    together(
        st.just([("object", None)]),
        delivered,
        looks(0, 1),
        st.just([("withdraw", None)]),
        st.one_of(nothing, kept),
    ),
    st.just([("object", None)]),
    st.just([("withdraw", None)]),
)
troubles = together(trouble, st.one_of(nothing, back, joined), looks(0, 4))
chapters = st.lists(st.one_of(release, troubles), max_size=10)
stories = together(joined, chapters.map(lambda some: [step for chapter in some for step in chapter]))
STORIES = 10_000 if examples() >= 200 else 5 * examples()


@settings(max_examples=STORIES)
@given(stories)
def test_a_fleet_is_given_only_what_all_of_the_canary_held_for_long_enough(story: list[Step]) -> None:
    async def main() -> None:
        asyncio.get_running_loop().set_default_executor(AtOnce())
        world = await play(story)
        await quiet(world)
        assert not world.failures

    asyncio.run(main())

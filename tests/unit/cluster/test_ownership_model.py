"""Processes that crash, sleep, are cut off and forget, in any order: appends are fenced, and all ends well."""

import asyncio

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from tests.support.examples import stateful
from tests.support.owning_process import LEASE_SECONDS, Process, World, pass_time

from deltasync.base.errors import DeltasyncError, NotFound, NotOwner

MODELS = ["ads", "feed"]
NAMES = "abcd"


class Owning(RuleBasedStateMachine):
    """Each rule does something to one process, or to the brokers; nobody waits for anybody."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.processes = dict[str, Process]()
        self.asleep = set[str]()
        self.copies = [self.world.store.copy()]

    def teardown(self) -> None:
        try:
            self.loop.run_until_complete(self._end())
        finally:
            self.loop.close()

    def awake(self) -> list[Process]:
        return [process for name, process in self.processes.items() if name not in self.asleep]

    @initialize()
    def begin(self) -> None:
        self.loop = asyncio.new_event_loop()
        for name in "ab":
            self.start(name)
        for model in MODELS:
            self.world.log(model)

    @rule(name=st.sampled_from(NAMES))
    def start(self, name: str) -> None:
        if name not in self.processes:
            self.processes[name] = self.loop.run_until_complete(Process(self.world, name).begin())

    @precondition(lambda self: len(self.processes) > 1)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.processes)))
        self.processes.pop(name).die()
        self.asleep.discard(name)

    @rule(data=st.data())
    def sleep_or_wake(self, data: st.DataObject) -> None:
        self.asleep ^= {data.draw(st.sampled_from(sorted(self.processes)))}

    @rule(data=st.data())
    def cut_or_heal(self, data: st.DataObject) -> None:
        bucket = self.processes[data.draw(st.sampled_from(sorted(self.processes)))].bucket
        bucket.cut = not bucket.cut

    @rule()
    def copy(self) -> None:
        self.copies.append(self.world.store.copy())

    @rule(data=st.data())
    def put_back(self, data: st.DataObject) -> None:
        self.world.store.put_back(data.draw(st.sampled_from(self.copies)))

    @rule(data=st.data())
    def refuse(self, data: st.DataObject) -> None:
        models = self.processes[data.draw(st.sampled_from(sorted(self.processes)))].models
        models.refuses = not models.refuses

    @rule(seconds=st.sampled_from([2, 4, 8, 14]))
    def go_on(self, seconds: int) -> None:
        self.loop.run_until_complete(pass_time(self.world, self.awake(), seconds))

    @rule(data=st.data(), model=st.sampled_from(MODELS), to=st.sampled_from(NAMES))
    def move(self, data: st.DataObject, model: str, to: str) -> None:
        if self.awake():
            process = data.draw(st.sampled_from(self.awake()))
            self.loop.run_until_complete(_tried(process, model, to))

    @rule()
    def append(self) -> None:
        """Everybody who has a log open appends, also who has just woken up: one of them can."""
        for model in MODELS:
            found = [process for process in self.processes.values() if model in process.models.opened]
            accepted = [self.loop.run_until_complete(each.append(model)) for each in found]
            assert sum(accepted) <= 1

    async def _end(self) -> None:
        """All is mended: each model has one owner, which can append, and of which all know."""
        self.asleep.clear()
        for process in self.processes.values():
            process.bucket.cut = process.models.refuses = False
        everybody = list(self.processes.values())
        await pass_time(self.world, everybody, 6 * LEASE_SECONDS)
        for model in self.world.logs:
            for process in everybody:
                if model in process.models.opened:
                    await process.append(model)
        await pass_time(self.world, everybody, 6 * LEASE_SECONDS)
        for model in self.world.logs:
            _check(model, everybody, self.world)
            owner = next(process for process in everybody if process.answers(model))
            assert await owner.append(model)


async def _tried(process: Process, model: str, to: str) -> None:
    try:
        await process.ownership.move(model, to)
    except (NotOwner, NotFound):
        return
    except DeltasyncError as error:
        raise AssertionError("a move is refused in these words alone") from error


def _check(model: str, everybody: list[Process], world: World) -> None:
    owners = {process.name for process in everybody if process.answers(model)}
    assert len(owners) == 1
    for process in everybody:
        owner = process.ownership.owner_of(model)
        assert owner
        assert {owner.process} == owners
    fence = ""
    for who, what in world.log(model).records:
        fence = who if what == "fence" else fence
        assert who == fence


TestOwning = Owning.TestCase
TestOwning.settings = stateful(stateful_step_count=30)

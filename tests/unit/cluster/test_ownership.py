import asyncio
import subprocess
import sys
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.support.owning_process import LEASE_SECONDS, SECOND, Process, World, idle, pass_time
from tests.unit.support.async_tests import as_test

from deltasync.base.errors import Contradiction, DeltasyncError, NotFound, NotOwner, StorageFailed
from deltasync.base.events import Event, EventKind, EventLog, event_text
from deltasync.cluster.bucket import Member
from deltasync.cluster.owners import Owners
from deltasync.cluster.placement import heir_of

MODEL = "ads"


def run(_: Path, scenario: Callable[[World], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario(World()))


in_world = partial(as_test, run)


async def started(world: World, names: str = "abc") -> list[Process]:
    processes = [await Process(world, name).begin() for name in names]
    await pass_time(world, processes, 4)
    return processes


def by_heir(processes: list[Process], model: str = MODEL) -> tuple[Process, list[Process]]:
    """Who is to have a model, and the others."""
    heir = heir_of(model, [each.ownership.me for each in processes])
    assert heir
    return next(each for each in processes if each.name == heir.name), [
        p for p in processes if p.name != heir.name
    ]


async def owned(world: World) -> tuple[Process, list[Process]]:
    processes = await started(world)
    owner, others = by_heir(processes)
    await owner.ownership.claim(MODEL)
    await pass_time(world, processes, 2)
    assert owner.answers(MODEL)
    return owner, others


def kinds(process: Process) -> list[EventKind]:
    return [event.kind for event in process.events]


@in_world()
async def test_a_new_model_is_claimed_by_its_heir_and_others_say_so(world: World) -> None:
    processes = await started(world)
    owner, others = by_heir(processes)
    with pytest.raises(NotOwner) as refused:
        await others[0].ownership.claim(MODEL)
    assert refused.value.owner
    assert refused.value.owner.process == owner.name
    claimed = await owner.ownership.claim(MODEL)
    assert claimed == others[0].ownership.owner_of(MODEL) == others[1].ownership.owner_of(MODEL)
    with pytest.raises(NotOwner) as refused:
        others[1].ownership.check(MODEL)
    assert refused.value.owner == claimed
    owner.ownership.check(MODEL)


@in_world()
async def test_two_that_claim_at_once_are_told_who_was_first(world: World) -> None:
    (a,) = await started(world, "a")
    # It has not heard of the other: it is alone.
    b = Process(world, "b")
    b.bucket.cut = True
    with pytest.raises(NotOwner):
        await b.ownership.claim(MODEL)
    await a.ownership.claim(MODEL)
    b.bucket.cut = False
    await b.beat()
    with pytest.raises(NotOwner):
        await b.ownership.claim(MODEL)
    assert world.log(MODEL).records == [("a", "fence")]


@in_world()
async def test_models_of_a_dead_process_move_within_two_leases(
    world: World,
) -> None:
    owner, others = await owned(world)
    kept = {other.name: dict(other.models.opened) for other in others}
    owner.die()
    await pass_time(world, others, 2 * LEASE_SECONDS)
    heir, rest = by_heir(others)
    assert heir.answers(MODEL)
    assert EventKind.MODEL_TAKEN_OVER in kinds(heir)
    assert not any(other.answers(MODEL) for other in rest)
    assert [member.name for member in heir.ownership.gone()] == [owner.name]
    assert all(kept[other.name].items() <= other.models.opened.items() for other in others)


@in_world()
async def test_a_process_that_overslept_its_lease_cannot_append(
    world: World,
) -> None:
    owner, others = await owned(world)
    await pass_time(world, others, 2 * LEASE_SECONDS)
    # It wakes, and has not looked at anything yet.
    with pytest.raises(NotOwner):
        owner.ownership.check(MODEL)
    assert not await owner.append(MODEL)
    await owner.beat()
    heir, _ = by_heir(others)
    assert await heir.append(MODEL)
    await pass_time(world, [owner, *others], 2)
    found = owner.ownership.owner_of(MODEL)
    assert found
    assert found.process == heir.name


@in_world()
async def test_a_process_without_brokers_gives_up_its_models_and_regains_them(
    world: World,
) -> None:
    owner, others = await owned(world)
    for each in [owner, *others]:
        each.bucket.cut = True
    await pass_time(world, [owner, *others], LEASE_SECONDS)
    assert MODEL not in owner.models.opened
    assert EventKind.PROCESS_UNCONFIRMED in kinds(owner)
    assert any("lease" in event.text for event in owner.events if event.kind is EventKind.MODEL_GIVEN_UP)
    for each in [owner, *others]:
        each.bucket.cut = False
    await pass_time(world, [owner, *others], LEASE_SECONDS)
    assert sum(each.answers(MODEL) for each in [owner, *others]) == 1


@in_world()
async def test_an_entry_that_cannot_be_written_yet_is_no_error_of_the_program(world: World) -> None:
    """While brokers make the bucket, or others write the entry: the log has no traceback."""
    process = Process(world, "a")
    process.bucket.refuses = True
    await process.beat()
    (event,) = [each for each in process.events if each.kind is EventKind.PROCESS_UNCONFIRMED]
    assert isinstance(event.error, DeltasyncError)
    process.bucket.refuses = False
    await pass_time(world, [process], 2)
    assert EventKind.PROCESS_CONFIRMED in kinds(process)


@pytest.mark.parametrize("earlier", [True, False], ids=["put back to an earlier copy", "lost"])
@in_world()
async def test_a_bucket_that_forgets_moves_no_model(world: World, earlier: bool) -> None:
    owner, others = await owned(world)
    await owner.ownership.reserve_consumer("fleet", MODEL)
    early = world.store.copy()
    await owner.ownership.move(MODEL, others[0].name)
    await pass_time(world, [owner, *others], 4)
    others[0].models.consumers[MODEL] = ["fleet"]
    await others[0].ownership.reserve_consumer("fleet", MODEL)
    if earlier:
        world.store.put_back(early)
    else:
        world.store.lose()
    await pass_time(world, [owner, *others], LEASE_SECONDS)
    assert others[0].answers(MODEL)
    assert [who for who, what in world.log(MODEL).records if what == "fence"] == [owner.name, others[0].name]
    fresh = await Process(world, "z").begin()
    found = fresh.ownership.owner_of(MODEL)
    assert found
    assert found.process == others[0].name
    assert fresh.ownership.model_of("fleet") == MODEL


@in_world()
async def test_one_that_cannot_take_a_model_gives_it_back_and_another_tries(world: World) -> None:
    processes = await started(world)
    owner, others = by_heir(processes)
    owner.models.refuses = True
    with pytest.raises(NotOwner, match="no space"):
        await owner.ownership.claim(MODEL)
    assert EventKind.MODEL_NOT_TAKEN in kinds(owner)
    await pass_time(world, processes, 4)
    assert sum(each.answers(MODEL) for each in others) == 1


@in_world()
async def test_a_model_that_nobody_can_take_is_logged_once_for_each_reason(world: World) -> None:
    (process,) = await started(world, "a")
    process.models.refuses = True
    lines = list[str]()

    def note(event: Event, _repeats: int) -> None:
        if event.kind is EventKind.MODEL_NOT_TAKEN:
            lines.append(event_text(event))

    log = EventLog(lambda: 0.0, note)
    world.log(MODEL)
    await pass_time(world, [process], 60)
    tries = [each for each in process.events if each.kind is EventKind.MODEL_NOT_TAKEN]
    assert len(tries) > 2
    for each in tries:
        log(each)
    assert lines == ["its takeover failed and will be retried: no space"]
    log(replace(tries[0], error=StorageFailed("no brokers")))
    assert lines[1:] == ["its takeover failed and will be retried: no brokers"]


@in_world()
async def test_a_model_is_moved_to_where_it_is_to_be_and_stays_there(world: World) -> None:
    owner, others = await owned(world)
    with pytest.raises(NotFound, match="nobody"):
        await owner.ownership.move(MODEL, "nobody")
    with pytest.raises(NotOwner):
        await others[1].ownership.move(MODEL, others[0].name)
    await owner.ownership.move(MODEL, others[1].name)
    assert [word for word, *_ in owner.models.said] == ["take", "save", "give_up"]
    with pytest.raises(NotOwner) as refused:
        owner.ownership.check(MODEL)
    assert refused.value.owner
    assert refused.value.owner.process == others[1].name
    await pass_time(world, [owner, *others], 2 * LEASE_SECONDS)
    assert others[1].answers(MODEL)


@in_world()
async def test_who_has_given_a_model_away_takes_it_at_once_when_it_is_given_back(world: World) -> None:
    owner, others = await owned(world)
    for giver, taker in ((owner, others[1]), (others[1], owner), (owner, others[1])):
        await giver.ownership.move(MODEL, taker.name)
        for process in [owner, *others] * 2:  # No time goes by.
            await process.beat()
        assert taker.answers(MODEL)


@in_world()
async def test_one_that_drains_gives_all_away_and_takes_nothing_more(world: World) -> None:
    for number in range(12):
        world.log(f"model-{number}")
    processes = await started(world)
    leaving, staying = processes[0], processes[1:]
    had = list(leaving.models.opened)
    assert had
    await leaving.ownership.drain()
    assert not leaving.models.opened
    assert [word for word, *_ in leaving.models.said if word != "take"] == ["save", "give_up"] * len(had)
    await pass_time(world, processes, LEASE_SECONDS)
    assert not leaving.models.opened
    assert all(sum(each.answers(model) for each in staying) == 1 for model in had)
    with pytest.raises(NotFound):
        await staying[0].ownership.move(next(iter(staying[0].models.opened)), leaving.name)


@in_world()
async def test_one_that_ends_is_followed_at_once(world: World) -> None:
    owner, others = await owned(world)
    await owner.ownership.close()
    for other in others:
        await other.beat()
    assert sum(other.answers(MODEL) for other in others) == 1
    assert [member.name for member in others[0].ownership.processes()] == sorted(o.name for o in others)
    assert not others[0].ownership.gone()


@in_world()
async def test_one_that_is_started_again_has_its_models_at_once(world: World) -> None:
    owner, others = await owned(world)
    owner.die()
    again = await Process(world, owner.name).begin()
    await pass_time(world, [again, *others], 2)
    assert again.answers(MODEL)


@in_world()
async def test_of_two_with_one_name_the_earlier_one_gives_way(world: World) -> None:
    owner, others = await owned(world)
    again = await Process(world, owner.name).begin()
    await pass_time(world, [owner, again, *others], 4)
    assert not owner.ownership.confirmed
    assert not owner.models.opened
    assert "use different names" in str([event.error for event in owner.events if event.error])
    assert again.answers(MODEL)


@in_world()
async def test_names_of_consumers_are_unique_among_all_models(world: World) -> None:
    owner, others = await owned(world)
    await owner.ownership.reserve_consumer("fleet", MODEL)
    await owner.ownership.reserve_consumer("fleet", MODEL)
    assert others[0].ownership.model_of("fleet") == MODEL
    with pytest.raises(Contradiction, match="another model"):
        await others[0].ownership.reserve_consumer("fleet", "other")
    await owner.ownership.forget_consumer("fleet")
    await others[0].ownership.reserve_consumer("fleet", "other")
    assert owner.ownership.model_of("fleet") == "other"


@in_world()
async def test_a_consumer_that_its_owner_does_not_have_any_more_is_freed(world: World) -> None:
    owner, others = await owned(world)
    await owner.ownership.reserve_consumer("fleet", MODEL)
    owner.die()
    await pass_time(world, others, 3 * LEASE_SECONDS)
    assert others[0].ownership.model_of("fleet") is None


@in_world()
async def test_a_deleted_model_is_taken_by_nobody(world: World) -> None:
    owner, others = await owned(world)
    del world.logs[MODEL]
    await owner.models.give_up(MODEL, "deleted")
    await owner.ownership.forget(MODEL)
    await pass_time(world, [owner, *others], 2 * LEASE_SECONDS)
    assert MODEL not in world.logs
    assert MODEL not in others[0].ownership.models()


@in_world()
async def test_a_process_that_slept_deletes_no_log_of_another_one(world: World) -> None:
    owner, others = await owned(world)
    await pass_time(world, others, 3 * LEASE_SECONDS)
    with pytest.raises(NotOwner):
        await owner.ownership.forget(MODEL)
    assert ("forget", MODEL) not in owner.models.said
    assert any(each.answers(MODEL) for each in others)


@in_world()
async def test_an_entry_that_is_not_understood_is_said_and_hinders_nothing(world: World) -> None:
    owner, others = await owned(world)
    await others[0].bucket.put("model.other", b"{", 0)
    await others[0].bucket.put("consumer.x", b"[]", 0)
    await others[0].bucket.put("something else", b"1", 0)
    await pass_time(world, [owner, *others], 2)
    assert kinds(owner).count(EventKind.FAILED) == 3
    assert owner.answers(MODEL)


@in_world()
async def test_a_claim_that_is_given_up_meanwhile_says_so(world: World) -> None:
    (alone,) = await started(world, "a")
    alone.models.slow = asyncio.Event()
    claiming = asyncio.ensure_future(alone.ownership.claim(MODEL))
    while not world.store.entries.keys() & {f"model.{MODEL}"}:
        await asyncio.sleep(0)
    world.now_ns += int(2 * LEASE_SECONDS * SECOND)
    alone.bucket.cut = True
    await alone.ownership.step()
    with pytest.raises(NotOwner):
        await claiming
    await idle()
    assert MODEL not in alone.models.opened


@in_world()
async def test_a_process_that_starts_before_brokers_answer_waits_for_them(world: World) -> None:
    process = Process(world, "a")
    process.bucket.cut = True
    starting = asyncio.ensure_future(process.ownership.start())
    while not process.events:
        await asyncio.sleep(0.001)
    assert kinds(process) == [EventKind.FAILED]
    process.bucket.cut = False
    await starting
    await process.ownership.close()


ME = Member("a", "a:1", "http://a")


def test_whoever_is_alone_owns_everything_and_can_give_nothing_away() -> None:
    async def scenario(owners: Owners) -> None:
        owners.check("ads")
        assert owners.confirmed
        assert await owners.claim("ads") == owners.owner_of("ads") == ME.owner()
        assert list(owners.processes()) == [ME]
        assert not owners.gone()
        await owners.reserve_consumer("fleet", "ads")
        with pytest.raises(NotFound, match="this process is not in a cluster"):
            await owners.move("ads", "b")
        await owners.drain()
        owners.check("ads")

    asyncio.run(scenario(Owners(ME)))


def test_it_needs_no_client_of_brokers() -> None:
    code = "import sys, deltasync.cluster.owners, deltasync.cluster.shared_owners; sys.exit('nats' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

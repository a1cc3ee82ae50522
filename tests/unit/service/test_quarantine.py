"""A model of which a version is in quarantine: who follows it, from when on, until operators let it go on."""

from pathlib import Path

from tests.support.local_service import join, opened, publish
from tests.unit.support.async_tests import in_loop, in_service

from deltasync.consumers.consumer import ConsumerOptions
from deltasync.consumers.registry import ConsumerRegistry
from deltasync.core.events import EventKind
from deltasync.core.policy import Policy
from deltasync.service.brake import Brake
from deltasync.service.removals import Removals
from deltasync.service.service import Service

WHY = "row 7 has norm 1e6"


async def is_held(service: Service, name: str, model: str = "clicks") -> bool:
    consumer = await service.create_consumer(name, model, Policy())
    written = ConsumerRegistry(service.logs, 1.0, service.events).get(name)
    assert written.pause == consumer.pause
    return consumer.pause is not None


@in_loop()
async def test_a_consumer_is_held_from_its_beginning_also_after_a_restart(tmp_path: Path) -> None:
    async with opened(tmp_path) as service:
        await join(service)
        assert not await is_held(service, "other", "another")
        await service.registry.hold_back("clicks", 2, WHY)
        await service.configuration.take([ConsumerOptions("configured", "clicks", Policy(top_k=1))], "SIGHUP")
        held = service.registry.get("configured").pause
        assert held
        assert (held.by, held.why) == ("the service itself", f"version 2 is in quarantine: {WHY}")
        assert service.views.by_consumer() == {}  # A view would take the rows as they are.
        assert not await is_held(service, "third", "clicks2")
    async with opened(tmp_path) as service:
        assert await is_held(service, "late")
        await service.delete_consumer("late", "anna")
        assert await is_held(service, "late")
        await Brake(service).release("late", "anna")
        assert await is_held(service, "later")  # Of "configured" nobody has said that it may go on.
        await Brake(service).release("configured", "anna")
        await Brake(service).release("later", "anna")
        assert not await is_held(service, "last")


@in_service()
async def test_a_pause_of_an_operator_keeps_no_other_consumer(service: Service) -> None:
    for name in ("mine", "theirs"):
        await service.create_consumer(name, "clicks", Policy())
    await service.registry.hold_back("clicks", 2, WHY)
    await Brake(service).release("theirs", "anna")
    await Brake(service).pull("theirs", "a look", "anna")
    await Brake(service).release("mine", "anna")
    assert service.registry.get("theirs").pause
    assert not await is_held(service, "late")


@in_service()
async def test_many_versions_in_quarantine_are_one_pause_and_one_event(service: Service) -> None:
    for name in ("a", "b"):
        await service.create_consumer(name, "clicks", Policy())
    await Brake(service).pull("b", "mine", "anna")
    for version in range(2, 30):
        await service.registry.hold_back("clicks", version, WHY)
    words = f"28 versions from 2 to 29 are in quarantine: {WHY}"
    assert reasons(service) == {"a": words, "b": f"{words}; mine"}
    assert service.event_counts[EventKind.CONSUMER_PAUSED] == 3  # That of anna, and each for the quarantine.


def reasons(service: Service) -> dict[str, str]:
    return {name: each.pause.why for name, each in service.registry.consumers.items() if each.pause}


@in_service()
async def test_with_a_model_its_quarantine_goes(service: Service) -> None:
    (await publish(service)).end("it has ended")
    await service.registry.hold_back("clicks", 2, WHY)
    await Removals(service).delete_model("clicks", "anna")
    assert not await is_held(service, "late")

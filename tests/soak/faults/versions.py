"""Versions that operators keep, follow and go back to."""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from tests.soak.faults.choice import NotDone, everywhere, plain_model
from tests.soak.guest import ROWS, Guest, guest_of
from tests.soak.schedule import Fault
from tests.soak.world import SERVICE, World

from deltasync.base.errors import Contradiction, NotFound
from deltasync.consumers.follow import LIVE
from deltasync.core.policy import Policy

_MOST_KEPT, _BEHIND_SECONDS = 2, 0.5


def keep_version(world: World, fault: Fault) -> Sequence[str]:
    """A version of a model is kept, and an old one released, while it is trained."""
    model = plain_model(world, fault).name
    with world.alone:  # A backup that is put back takes the version away.
        _keep(world, model, f"kept-{round(fault.at * 1000)}")
        release(world, model, world.call(lambda admin: admin.kept_versions(model))[:-_MOST_KEPT])
    return [model]


def release(world: World, model: str, kept: Sequence[Mapping[str, Any]]) -> None:
    """Release kept versions of a model."""
    for each in kept:
        with suppress(NotFound):  # It was released, and the answer lost.
            world.call(lambda admin, name=each["name"]: admin.release_version(model, name))  # type: ignore[misc]


def follow_version(world: World, fault: Fault) -> Sequence[str]:
    """A consumer goes back to a kept version and stays there, also after a kill, until it goes live."""
    with world.alone, guest_of(world, fault) as guest:
        if fault.pick < 0.5:  # Else it has no view before.
            world.call(lambda admin: admin.update_consumer(guest.name, Policy(max_bytes=1 << 20)))
        _publish_two(world, guest)
        world.call(lambda admin: admin.follow_version(guest.name, "one"))
        guest.expect_run(1, a=ROWS)
        guest.publish(a=ROWS)
        world.crew.kill([SERVICE])
        world.await_there(lambda: world.state(guest.name) == "in sync", "a consumer that follows a kept version")
        guest.expect_run(1, a=ROWS)
        world.call(lambda admin: admin.follow_version(guest.name, LIVE))
        guest.expect()
    return everywhere(world)


def object_to_version(world: World, fault: Fault) -> Sequence[str]:
    """A consumer goes on to a version that another one has proven, and back once that objects."""
    with world.alone, guest_of(world, fault) as guest:
        name = f"{guest.name}-behind"
        guest.publish(a=ROWS)
        guest.expect()
        world.call(lambda admin: admin.create_consumer(name, guest.name, Policy()))
        try:
            _keep(world, guest.name, "one")
            world.call(lambda admin: admin.follow_consumer(name, guest.name, _BEHIND_SECONDS, "back", "one"))
            guest.publish(a=ROWS // 2)
            guest.expect()
            _keep(world, guest.name, "two")
            _await_follows(world, name, "(two)")
            if fault.pick < 0.5:
                world.crew.kill([SERVICE])
            world.call(lambda admin: admin.object(guest.name, "a fault of the soak"))
            _await_follows(world, name, "(one)")
        finally:
            world.settle(lambda admin: admin.delete_consumer(name))
    return everywhere(world)


def roll_back(world: World, fault: Fault) -> Sequence[str]:
    """A model is rolled back to a kept version, and trained on from there, by its own ranks or by a guest."""
    if fault.pick < 0.5:
        return _roll_guest_back(world, fault)
    model, name = plain_model(world, replace(fault, pick=2 * fault.pick - 1)), f"back-{round(fault.at * 1000)}"
    with world.alone:
        run = model.runs[-1].number
        version = _keep(world, model.name, name)
        try:
            time.sleep(1 + fault.seconds)

            def do() -> None:
                world.call(lambda admin: admin.roll_back(model.name, name, 30.0))

            if not model.roll_back(run, version, do):
                raise NotDone(
                    f"{model.name} was not rolled back: another run has begun, or no rank had the version"
                )
        finally:
            with suppress(NotFound):
                world.call(lambda admin: admin.release_version(model.name, name))
    return [model.name]


def _roll_guest_back(world: World, fault: Fault) -> Sequence[str]:
    with world.alone, guest_of(world, fault) as guest:
        _publish_two(world, guest)
        if fault.pick < 0.25:
            world.crew.kill([SERVICE])
        world.call(lambda admin: admin.roll_back(guest.name, "one", 30.0))
        guest.expect_run(1, a=ROWS)
        world.crew.kill([SERVICE])
        guest.publish(a=ROWS // 2, start_over=True)
        guest.expect()
    return everywhere(world)


def _publish_two(world: World, guest: Guest) -> None:
    """Two versions, of which the first is kept."""
    guest.publish(a=ROWS)
    guest.expect()
    _keep(world, guest.name, "one")
    guest.publish(a=ROWS // 2)
    guest.expect()


def _keep(world: World, model: str, name: str) -> int:
    """Keep the newest version of a model; its number."""
    with suppress(Contradiction):  # It was kept, and the answer lost.
        world.call(lambda admin: admin.keep_version(model, name, 30.0))
    kept = world.call(lambda admin: admin.kept_versions(model))
    return next(int(each["version"]) for each in kept if each["name"] == name)


def _await_follows(world: World, consumer: str, words: str) -> None:
    world.await_there(
        lambda: words in world.call(lambda admin: admin.consumer(consumer))["follows"],
        f"{words} for consumer {consumer}",
    )

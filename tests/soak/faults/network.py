"""Connections that are cut, stand still, or are slow."""

import time
from collections.abc import Sequence

from tests.soak.faults.choice import followers, model_of, one_of
from tests.soak.schedule import Fault
from tests.soak.world import World

_SLOW_BYTES_PER_SECOND = 50
_LONGEST_DELAY_SECONDS = 0.3


def cut(world: World, fault: Fault) -> Sequence[str]:
    """Connections end, with what is under way."""
    name, models = _link_of(world, fault)
    world.links[name].cut()
    return models


def half_open(world: World, fault: Fault) -> Sequence[str]:
    """Nothing passes for a while, and nobody is told."""
    name, models = _link_of(world, fault)
    world.links[name].stall()
    time.sleep(2 * fault.seconds)
    world.links[name].go_on()
    return models


def delay(world: World, fault: Fault) -> Sequence[str]:
    """Everything arrives later for a while."""
    name, models = _link_of(world, fault)
    world.links[name].delay_seconds = _LONGEST_DELAY_SECONDS * fault.pick
    time.sleep(fault.seconds)
    world.links[name].delay_seconds = 0.0
    return models


def slow_reader(world: World, fault: Fault) -> Sequence[str]:
    """A replica is sent a few bytes a second for a while."""
    name = one_of(followers(world), fault)
    world.links[name].bytes_per_second = _SLOW_BYTES_PER_SECOND
    time.sleep(2 * fault.seconds)
    world.links[name].bytes_per_second = None
    return model_of(world, name)


def _link_of(world: World, fault: Fault) -> tuple[str, list[str]]:
    """A replica's, or that of a trainer's ranks; and whose replicas it touches."""
    name = one_of([*followers(world), *world.plain], fault)
    return name, [name] if name in world.plain else model_of(world, name)

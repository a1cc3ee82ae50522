"""Connections that are cut, stand still, are dead behind a proxy, or are slow; also those to object storage."""

import time
from collections.abc import Sequence

from tests.soak.faults.choice import NotDone, everywhere, followers, model_of, one_of
from tests.soak.schedule import Fault
from tests.soak.world import SERVICE, SoakFailed, World, comes
from tests.support.grpc_proxy import GrpcProxy

_CONNECT_SECONDS = 60.0
# Less than the service waits for an answer of its storage.
_HANGING_SECONDS = 40.0
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


def dead_proxy(world: World, fault: Fault) -> Sequence[str]:
    """Nothing passes through a proxy any more, which still answers pings. Clients then open new connections."""
    name, models = _link_of(world, fault)
    link = world.links[name]
    with GrpcProxy(world.grpc) as proxy:
        try:
            link.forward_to(proxy.address)
            link.cut()
            if not comes(lambda: bool(proxy.open), _CONNECT_SECONDS):
                raise NotDone(f"{name} has not connected")
            time.sleep(fault.seconds)
        finally:
            link.forward_to(world.grpc)
        proxy.fall_silent(for_good=True)
        world.await_there(lambda: not proxy.open, f"the end of a connection of {name} that is dead behind a proxy")
    return models


def hang_storage(world: World, fault: Fault) -> Sequence[str]:
    """Object storage accepts requests but answers none for a while. Lag, /readyz and cuts do not wait for it."""
    if world.storage is None:
        raise NotDone("there is no object storage")
    if not comes(lambda: bool(world.heads()), _CONNECT_SECONDS):
        raise NotDone("the service was away")
    starts, before = world.crew.starts[SERVICE], dict[str, int]()

    def goes_on() -> bool:
        if world.crew.starts[SERVICE] != starts:  # A start waits for storage: a copy may have what the disk lost.
            return True
        heads = world.heads()
        before.update(() if before else heads)
        return any(head > before.get(model, head) for model, head in heads.items()) and world.answers()

    world.storage.stall()
    try:
        time.sleep(4 * fault.seconds)  # A checkpoint is due meanwhile.
        if not comes(goes_on, _HANGING_SECONDS):
            raise SoakFailed(f"while object storage hangs, no version was sealed in {_HANGING_SECONDS:.0f} s")
    finally:
        world.storage.go_on()
    return everywhere(world)


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

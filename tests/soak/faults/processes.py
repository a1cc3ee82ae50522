"""Processes that are killed, frozen, or away for a while: what is done, and to whom."""

import signal
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

from tests.soak.faults.choice import NotDone, everywhere, followers, model_of, one_of, plain_model, ranks
from tests.soak.fleet import CLICKS
from tests.soak.schedule import Fault
from tests.soak.world import SERVICE, World

# Processes, and the models whose replicas are to recover.
Chosen: TypeAlias = Callable[[World, Fault], tuple[Sequence[str], Sequence[str]]]


def service(world: World, _: Fault) -> tuple[Sequence[str], Sequence[str]]:
    return [SERVICE], everywhere(world)


def rank(world: World, fault: Fault) -> tuple[Sequence[str], Sequence[str]]:
    """One of a plain trainer."""
    model = plain_model(world, fault)
    return [one_of(model.ranks, fault)], [model.name]


def all_ranks(world: World, _: Fault) -> tuple[Sequence[str], Sequence[str]]:
    """Those of plain trainers."""
    return ranks(world), list(world.plain)


def torchrec_rank(world: World, fault: Fault) -> tuple[Sequence[str], Sequence[str]]:
    """Its others end with it."""
    return [f"{CLICKS}-rank-{int(fault.pick * world.fleet.clicks)}"], [CLICKS]


def replica(world: World, fault: Fault) -> tuple[Sequence[str], Sequence[str]]:
    name = one_of(followers(world), fault)
    return [name], model_of(world, name)


def replicas(world: World, fault: Fault) -> tuple[Sequence[str], Sequence[str]]:
    """All of a consumer."""
    subscription = one_of(world.fleet.subscriptions, fault)
    return [each.name for each in subscription.replicas], [subscription.model]


def everything(world: World, _: Fault) -> tuple[Sequence[str], Sequence[str]]:
    return world.crew.names(), everywhere(world)


def kill(chosen: Chosen, world: World, fault: Fault) -> Sequence[str]:
    """They are killed at once, and started again."""
    names, models = chosen(world, fault)
    world.crew.kill(names)
    return models


def freeze(chosen: Chosen, world: World, fault: Fault) -> Sequence[str]:
    """They stand still for a while."""
    names, models = chosen(world, fault)
    for number in (signal.SIGSTOP, signal.SIGCONT):
        for name in names:
            world.crew.send(name, number)
        if number == signal.SIGSTOP:
            time.sleep(fault.seconds)
    return models


def leave(chosen: Chosen, world: World, fault: Fault) -> Sequence[str]:
    """One ends in order: a replica says goodbye. It comes back after a while."""
    (name,), models = chosen(world, fault)
    try:
        world.crew.restart(name, between=lambda: time.sleep(fault.seconds))
    except KeyError as error:
        raise NotDone(f"{name} has ended before") from error
    return models


def restart_service(world: World, _: Fault) -> Sequence[str]:
    """The service ends in order, and is started again at once."""
    world.crew.restart(SERVICE)
    return everywhere(world)


def service_away(world: World, fault: Fault) -> Sequence[str]:
    """The service is killed, and comes back only after a while."""
    world.crew.restart(SERVICE, signal.SIGKILL, lambda: time.sleep(2 * fault.seconds))
    return everywhere(world)

"""Processes that are killed, frozen, or away for a while."""

import signal
import time
from collections.abc import Sequence

from tests.soak.faults.choice import (
    NotDone,
    everywhere,
    followers,
    model_of,
    one_of,
    plain_model,
    ranks,
)
from tests.soak.fleet import CLICKS
from tests.soak.schedule import Fault
from tests.soak.world import SERVICE, World


def kill_service(world: World, _: Fault) -> Sequence[str]:
    world.crew.kill([SERVICE])
    return everywhere(world)


def kill_rank(world: World, fault: Fault) -> Sequence[str]:
    model = plain_model(world, fault)
    world.crew.kill([one_of(model.ranks, fault)])
    return [model.name]


def kill_ranks(world: World, _: Fault) -> Sequence[str]:
    """All ranks of plain trainers are killed at once."""
    world.crew.kill(ranks(world))
    return list(world.plain)


def kill_torchrec_rank(world: World, fault: Fault) -> Sequence[str]:
    """A rank of the TorchRec trainer is killed, and its others with it."""
    world.crew.kill([f"{CLICKS}-rank-{int(fault.pick * world.fleet.clicks)}"])
    return [CLICKS]


def kill_replica(world: World, fault: Fault) -> Sequence[str]:
    name = one_of(followers(world), fault)
    world.crew.kill([name])
    return model_of(world, name)


def kill_replicas(world: World, fault: Fault) -> Sequence[str]:
    """All replicas of a consumer are killed at once."""
    subscription = one_of(world.fleet.subscriptions, fault)
    world.crew.kill(each.name for each in subscription.replicas)
    return [subscription.model]


def kill_everything(world: World, _: Fault) -> Sequence[str]:
    world.crew.kill(world.crew.names())
    return everywhere(world)


def freeze_service(world: World, fault: Fault) -> Sequence[str]:
    """The service stands still for a while."""
    _freeze([SERVICE], world, fault)
    return everywhere(world)


def freeze_rank(world: World, fault: Fault) -> Sequence[str]:
    """A rank of a plain trainer stands still for a while."""
    model = plain_model(world, fault)
    _freeze([one_of(model.ranks, fault)], world, fault)
    return [model.name]


def freeze_ranks(world: World, fault: Fault) -> Sequence[str]:
    """All ranks of plain trainers stand still for a while."""
    _freeze(ranks(world), world, fault)
    return list(world.plain)


def freeze_replica(world: World, fault: Fault) -> Sequence[str]:
    """A replica reads nothing for a while."""
    name = one_of(followers(world), fault)
    _freeze([name], world, fault)
    return model_of(world, name)


def _freeze(names: Sequence[str], world: World, fault: Fault) -> None:
    for name in names:
        world.crew.send(name, signal.SIGSTOP)
    time.sleep(fault.seconds)
    for name in names:
        world.crew.send(name, signal.SIGCONT)


def restart_service(world: World, _: Fault) -> Sequence[str]:
    """The service ends in order, and is started again at once."""
    world.crew.restart(SERVICE)
    return everywhere(world)


def service_away(world: World, fault: Fault) -> Sequence[str]:
    """The service is killed, and comes back only after a while."""
    world.crew.restart(SERVICE, signal.SIGKILL, lambda: time.sleep(2 * fault.seconds))
    return everywhere(world)


def rank_leaves(world: World, fault: Fault) -> Sequence[str]:
    """A rank of a plain trainer ends in order, and comes back after a while."""
    model = plain_model(world, fault)
    _leave(one_of(model.ranks, fault), world, fault)
    return [model.name]


def replica_leaves(world: World, fault: Fault) -> Sequence[str]:
    """A replica says goodbye, and comes back after a while."""
    name = one_of(followers(world), fault)
    _leave(name, world, fault)
    return model_of(world, name)


def _leave(name: str, world: World, fault: Fault) -> None:
    try:
        world.crew.restart(name, between=lambda: time.sleep(fault.seconds))
    except KeyError as error:
        raise NotDone(f"{name} has ended before") from error

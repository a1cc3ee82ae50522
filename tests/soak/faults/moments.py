"""Processes that are killed at a named step, before or after what is done there."""

from collections.abc import Callable, Sequence

from tests.soak.faults.backups import make_and_restore
from tests.soak.faults.choice import NotDone, everywhere, followers, one_of, ranks
from tests.soak.faults.trainers import add_table
from tests.soak.fuse import RANK_STEPS, REPLICA_STEPS, SERVICE_STEPS
from tests.soak.schedule import Fault
from tests.soak.world import SERVICE, World

_SERVICE_SECONDS, _OTHERS_SECONDS, _TRIES = 80.0, 20.0, 4

Provocation = Callable[[World, Fault], object]


def kill_service_at(step: str, world: World, fault: Fault) -> Sequence[str]:
    """The service is killed at one of `SERVICE_STEPS`, to which it is brought where it does not come by itself."""
    provoke, moment = _PROVOKED.get(step, _nothing), _moment(step, fault)
    if not world.burn(SERVICE, moment, _SERVICE_SECONDS, lambda: provoke(world, fault)):
        raise NotDone(f"the service was not killed {moment}")
    return everywhere(world)


def kill_rank_at(step: str, world: World, fault: Fault) -> Sequence[str]:
    """A rank of a plain trainer is killed at one of `RANK_STEPS`."""
    return _kill_one(lambda: one_of(ranks(world), fault), _moment(step, fault), world)


def kill_replica_at(step: str, world: World, fault: Fault) -> Sequence[str]:
    """A replica is killed at one of `REPLICA_STEPS`."""
    return _kill_one(lambda: one_of(followers(world), fault), _moment(step, fault), world)


def _moment(step: str, fault: Fault) -> str:
    return f"{'before' if fault.pick < 0.5 else 'after'} {step}"


def _kill_one(process: Callable[[], str], moment: str, world: World) -> Sequence[str]:
    for _ in range(_TRIES):  # Each time another process, where one has ended meanwhile.
        if world.burn(process(), moment, _OTHERS_SECONDS):
            return everywhere(world)
    raise NotDone(f"nothing was killed {moment}")


def _nothing(_: World, __: Fault) -> None:
    pass


def _kill(world: World, _: Fault) -> None:
    world.crew.kill([SERVICE])


# What does not come by itself.
_PROVOKED: dict[str, Provocation] = {
    "table record": add_table,
    "recovery": _kill,
    "loading": _kill,
    "backup": make_and_restore,
}

KILLS = {
    **{f"kill service: {step}": (kill_service_at, step) for step in SERVICE_STEPS},
    **{f"kill rank: {step}": (kill_rank_at, step) for step in RANK_STEPS},
    **{f"kill replica: {step}": (kill_replica_at, step) for step in REPLICA_STEPS},
}

"""What is done to a model of the soak's own, whose replica is looked at at once."""

from collections.abc import Sequence

from tests.soak.faults.choice import everywhere
from tests.soak.guest import ROWS, Guest, guest_of
from tests.soak.schedule import Fault
from tests.soak.world import SoakFailed, World

from deltasync.base.errors import Contradiction
from deltasync.client import Subscriber

_POISON = 1e30


def delete_model(world: World, fault: Fault) -> Sequence[str]:
    """A model is deleted, and one of the same name begins anew."""
    with world.alone, guest_of(world, fault) as guest:
        guest.publish(a=ROWS, b=ROWS)
        guest.expect()
        guest.leave()
        guest.follow()
        guest.publish(a=ROWS // 2)
        guest.expect()
    return []


def delete_table(world: World, fault: Fault) -> Sequence[str]:
    """A table is deleted, and one of the same name begins anew: no row of the one before is left."""
    with world.alone, guest_of(world, fault) as guest:
        guest.publish(a=ROWS, b=ROWS)
        guest.expect()
        world.settle(lambda admin: admin.delete_table(guest.name, "b"))
        guest.publish(a=ROWS)
        guest.expect()
        guest.publish(a=ROWS, b=ROWS // 2)
        guest.expect()
    return []


def quarantine(world: World, fault: Fault) -> Sequence[str]:
    """Rows whose norms explode are sealed, and kept from replicas until an operator resumes their consumer."""
    with world.alone, world.poisoning, guest_of(world, fault) as guest:
        guest.publish(a=ROWS)
        guest.expect()
        world.serve("--poisoned", "quarantine")
        try:
            _publish_poison(world, guest)
        finally:
            world.serve()
    return everywhere(world)


def _publish_poison(world: World, guest: Guest) -> None:
    guest.publish(_POISON, a=ROWS)
    world.await_there(lambda: world.state(guest.name) == "paused", "the quarantine of rows that explode")
    guest.publish(a=ROWS)  # As a trainer does that has put it right.
    world.call(lambda admin: admin.resume_consumer(guest.name))
    guest.expect()
    if guest.target.largest >= _POISON:
        raise SoakFailed(f"a replica was given rows of {_POISON}, which were in quarantine")


def two_of_one_name(world: World, fault: Fault) -> Sequence[str]:
    """Two replicas have one name: the one that connected first ends with an error, and the other goes on."""
    with world.alone, guest_of(world, fault) as guest:
        guest.publish(a=ROWS)
        guest.expect()
        other, target = guest.subscriber, guest.target
        guest.join()
        try:
            pair = (other, guest.subscriber)
            world.await_there(lambda: any(map(_is_refused, pair)), "the end of one of two replicas of one name")
            if _is_refused(guest.subscriber):  # The service was restarted, and the older one connected last.
                other, guest.subscriber, guest.target = guest.subscriber, other, target
        finally:
            other.close()
        guest.publish(a=ROWS)
        guest.expect()
    return []


def forget_replica(world: World, fault: Fault) -> Sequence[str]:
    """A replica vanishes without a goodbye, and an operator says that it does not come back."""
    with world.alone, guest_of(world, fault) as guest:
        guest.publish(a=ROWS)
        guest.expect()
        world.links[guest.name].close()
        world.settle(lambda admin: admin.forget_replica(guest.name, "guest"))
        lag = world.lag(guest.name)
        if lag is not None and lag["replicas"]:
            raise SoakFailed(f"a replica that was forgotten is in the lag: {lag['replicas']}")
    return []


def _is_refused(replica: Subscriber) -> bool:
    try:
        replica.check()
    except Contradiction:
        return True
    return False

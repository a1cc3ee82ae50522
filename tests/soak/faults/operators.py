"""What operators do, and clocks."""

import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.soak.faults.choice import everywhere, one_of
from tests.soak.fleet import CHANGING, LONE, PAIR, POLICIES, Subscription
from tests.soak.fuse import clock_file
from tests.soak.journal import replace_file
from tests.soak.schedule import Fault
from tests.soak.world import CONFIGURED, SERVICE, SoakFailed, World, comes

from deltasync.core.policy import Policy

_RELOAD_SECONDS, _POLL_SECONDS = 60.0, 0.1
_DELETED_ROWS = 20
# A clock that is more behind than five minutes keeps later runs out, which its error says.
_CLOCKS_SECONDS = (3600.0, -240.0)


def change_policy(world: World, fault: Fault) -> Sequence[str]:
    now = world.policies()[CHANGING]
    policy = one_of([policy for policy in POLICIES if policy != now], fault)
    world.call(lambda admin: admin.update_consumer(CHANGING, policy))
    return [PAIR]


def reload(world: World, fault: Fault) -> Sequence[str]:
    """The configuration has another policy, and the service is sent SIGHUP."""
    policy = Policy(top_k=1 + int(fault.pick * 1000))
    world.configure(policy)
    world.policies()  # Once it answers, it listens to signals.
    world.crew.send(SERVICE, signal.SIGHUP)
    if not comes(lambda: world.policies().get(CONFIGURED) == policy, _RELOAD_SECONDS):
        raise SoakFailed(f"a policy that was reloaded is not in force: {policy.description}")
    return []


def passing_consumer(world: World, fault: Fault) -> Sequence[str]:
    """A consumer is made, followed for a while, and deleted."""
    subscription = Subscription(f"passing-{round(fault.at * 1000)}", PAIR, Policy(top_k=50))
    with world.alone:
        world.pass_by(subscription, 2 + fault.seconds)
    return [PAIR]


def pause(world: World, fault: Fault) -> Sequence[str]:
    subscription = one_of(world.fleet.subscriptions, fault)
    world.call(lambda admin: admin.pause_consumer(subscription.name, "a fault of the soak"))
    time.sleep(fault.seconds)
    world.call(lambda admin: admin.resume_consumer(subscription.name))
    return [subscription.model]


def delete_rows(world: World, fault: Fault) -> Sequence[str]:
    name = LONE if LONE in world.plain else PAIR
    first = int(fault.pick * 1000)
    world.call(lambda admin: admin.delete_rows(name, "users", range(first, first + _DELETED_ROWS)))
    return [name]


def look_at_all_rows(world: World, _: Fault) -> Sequence[str]:
    """`deltasync fsck` while the service runs."""
    world.call(lambda admin: admin.fsck())
    return []


def set_clock(world: World, fault: Fault) -> Sequence[str]:
    """The service's clock is set, and set right again after a while; no lag has a figure below 0 meanwhile."""
    file = clock_file(world.fuse(SERVICE))
    replace_file(file, str(one_of(_CLOCKS_SECONDS, fault)))
    deadline = time.monotonic() + fault.seconds
    try:
        while time.monotonic() < deadline:
            for each in world.fleet.subscriptions:
                if wrong := list(negative(world.lag(each.name) or {})):
                    raise SoakFailed(f"lag of {each.name} with another clock: {', '.join(wrong)} is below 0")
            time.sleep(_POLL_SECONDS)
    finally:
        file.unlink(missing_ok=True)  # Another fault of this kind may have been there.
    return everywhere(world)


def negative(found: Any, path: str = "") -> Iterator[str]:
    """Where JSON has a number below 0."""
    if isinstance(found, Mapping):
        for name, each in found.items():
            yield from negative(each, f"{path}/{name}")
    elif isinstance(found, list):
        for number, each in enumerate(found):
            yield from negative(each, f"{path}/{number}")
    elif isinstance(found, int | float) and found < 0:
        yield path

"""To whom a fault is done."""

from collections.abc import Sequence
from typing import TypeVar

from tests.soak.fleet import CLICKS
from tests.soak.plain_model import PlainModel
from tests.soak.schedule import Fault
from tests.soak.world import World

T = TypeVar("T")


class NotDone(Exception):
    """A fault did not come about, and is not counted."""


def everywhere(world: World) -> list[str]:
    return [*world.plain, *([CLICKS] if world.fleet.clicks else [])]


def one_of(them: Sequence[T], fault: Fault) -> T:
    return them[int(fault.pick * len(them))]


def followers(world: World) -> list[str]:
    return [follower.name for follower in world.fleet.followers]


def model_of(world: World, follower: str) -> list[str]:
    found = next(each for each in world.fleet.followers if each.name == follower)
    return [world.fleet.subscription(found.consumer).model]


def plain_model(world: World, fault: Fault) -> PlainModel:
    return one_of(list(world.plain.values()), fault)


def ranks(world: World) -> list[str]:
    return [rank for model in world.plain.values() for rank in model.ranks]

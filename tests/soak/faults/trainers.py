"""Trainers that begin again otherwise than they ended, and rows that must not be taken."""

from collections.abc import Mapping, Sequence

from tests.soak.faults.choice import NotDone, one_of, plain_model
from tests.soak.fleet import PAIR
from tests.soak.journal import replace_file
from tests.soak.rank import poison_file
from tests.soak.schedule import Fault
from tests.soak.world import World, comes

_POISON_SECONDS = 60.0
_BEHIND = 40
_GROWTH = 100
_MOST_ROWS, _MOST_TABLES = 6000, 12


def rewind(world: World, fault: Fault) -> Sequence[str]:
    """A run begins from a checkpoint that is behind what is published."""
    model = plain_model(world, fault)
    model.restart(behind=1 + int(_BEHIND * fault.pick))
    return [model.name]


def take_over(world: World, fault: Fault) -> Sequence[str]:
    """A run begins while the one before lives on."""
    model = plain_model(world, fault)
    model.restart(behind=int(_BEHIND * fault.pick) % 3, beside=True)
    return [model.name]


def resize(world: World, fault: Fault) -> Sequence[str]:
    """A run begins with another number of ranks."""
    model = world.plain[PAIR]
    model.restart(behind=int(fault.pick * 2), ranks=1 + model.runs[-1].ranks % 3)
    return [PAIR]


def add_table(world: World, fault: Fault) -> Sequence[str]:
    """A run begins with one more table."""

    def more(tables: Mapping[str, int]) -> Mapping[str, int]:
        return {**tables, f"extra{len(tables)}": 300} if len(tables) < _MOST_TABLES else tables

    model = plain_model(world, fault)
    model.restart(tables=more)
    return [model.name]


def grow_table(world: World, fault: Fault) -> Sequence[str]:
    """A run begins with more rows of a table."""

    def larger(tables: Mapping[str, int]) -> Mapping[str, int]:
        name = one_of(sorted(tables), fault)
        return {**tables, name: min(_MOST_ROWS, tables[name] + _GROWTH)}

    model = plain_model(world, fault)
    model.restart(tables=larger)
    return [model.name]


def poison(value: float, world: World, fault: Fault) -> Sequence[str]:
    """A rank publishes rows of a value that has to be refused."""
    model = plain_model(world, fault)
    with world.poisoning:
        asked = poison_file(world.crew.folder, model.name)
        replace_file(asked, str(value))
        if not comes(lambda: not asked.exists(), _POISON_SECONDS):
            asked.unlink(missing_ok=True)
            raise NotDone(f"{model.name} has published nothing")
    return [model.name]

"""What a soak is asked for, and which faults come when: a pure function of a seed, a length and their kinds."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.5, 4.0
_SHORTEST_GAP, _LONGEST_GAP = 0.2, 1.8  # Shares of the mean: some faults begin before others are over.


@dataclass(frozen=True, kw_only=True)
class SoakOptions:
    """What to run."""

    seconds: float = 300.0
    seed: int = 0
    mean_gap: float = 3.5
    small: bool = False
    keep: bool = False


@dataclass(frozen=True)
class Fault:
    """A fault of the schedule.

    Attributes:
        at: seconds after the first replicas were in sync.
        kind: what is done.
        pick: from 0 to below 1: which of those that it can be done to.
        seconds: how long it lasts, where it lasts.
    """

    at: float
    kind: str
    pick: float
    seconds: float


def schedule(seed: int, seconds: float, kinds: Sequence[str], mean_gap: float) -> list[Fault]:
    """The faults of a run.

    Every kind comes once before one comes twice, each time in another order: none is left out of a run that is
    1.8 times as long as a mean gap for each of them.
    """
    rng = random.Random(seed)  # to be repeated, not to be secret
    at, faults = 0.0, list[Fault]()
    for kind in _decks(rng, kinds):
        at += mean_gap * rng.uniform(_SHORTEST_GAP, _LONGEST_GAP)
        if at > seconds:
            break
        faults.append(Fault(at, kind, rng.random(), rng.uniform(_SHORTEST_SECONDS, _LONGEST_SECONDS)))
    return faults


def _decks(rng: random.Random, kinds: Sequence[str]) -> Iterator[str]:
    while True:
        yield from rng.sample(kinds, len(kinds))

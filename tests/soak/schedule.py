"""Which faults come when: a pure function of a seed, a length and the kinds there are."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

_SHORTEST_SECONDS, _LONGEST_SECONDS = 0.5, 4.0
_SHORTEST_GAP, _LONGEST_GAP = 0.2, 1.8  # Shares of the mean: some faults begin before others are over.


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

    Args:
        seed: of the schedule; the same arguments give the same schedule.
        seconds: how long faults come.
        kinds: their names, each once.
        mean_gap: seconds from one to the next.
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

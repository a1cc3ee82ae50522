"""The models that a process owns, takes or gives up."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum

from deltasync.core.backoff import backoff
from deltasync.core.owner import Owner
from deltasync.ownership.claim import Claim


class State(Enum):
    """How far a process is with a model."""

    CLAIMING = "claiming"
    TAKING = "taking"
    TAKEN = "taken"
    LEAVING = "leaving"


@dataclass
class Hold:
    """A model that a process owns, takes or gives up.

    Attributes:
        claim: with which claim.
        state: how far it is.
        taking: the task that takes it.
        leaving: the task that gives it up, once it does.
    """

    claim: Claim
    state: State = State.CLAIMING
    taking: "asyncio.Task[Owner] | None" = None
    leaving: "asyncio.Task[None] | None" = None


@dataclass
class _Wait:
    until_ns: int = 0
    seconds: Iterator[float] = field(default_factory=backoff)


class Holds:
    """What a process holds, and what it could not take lately."""

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self._clock_ns = clock_ns
        self._holds = dict[str, Hold]()
        self._waits = dict[str, _Wait]()

    def get(self, model: str) -> Hold | None:
        """The hold of a model, if there is one."""
        return self._holds.get(model)

    def add(self, model: str, hold: Hold) -> None:
        """Hold a model."""
        self._holds[model] = hold

    def drop(self, model: str) -> None:
        """Hold it no more."""
        self._holds.pop(model, None)

    def names(self) -> list[str]:
        """All models held."""
        return sorted(self._holds)

    def claims(self) -> dict[str, Claim]:
        """All models held, with their claims."""
        return {model: hold.claim for model, hold in self._holds.items()}

    def is_taken(self, model: str) -> bool:
        """Whether a model is open here."""
        hold = self._holds.get(model)
        return hold is not None and hold.state is State.TAKEN

    def wait(self, model: str, least_seconds: float = 0.0) -> None:
        """A model could not be taken: not to be tried again for a while, each time for longer."""
        waiting = self._waits.setdefault(model, _Wait())
        seconds = max(next(waiting.seconds), least_seconds)
        waiting.until_ns = self._clock_ns() + int(seconds * 1e9)

    def forgive(self, model: str) -> None:
        """It was taken."""
        self._waits.pop(model, None)

    def waiting(self) -> set[str]:
        """The models not to be tried again yet."""
        now_ns = self._clock_ns()
        return {model for model, wait in self._waits.items() if wait.until_ns > now_ns}

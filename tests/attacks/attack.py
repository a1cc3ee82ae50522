"""What an attack is."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from tests.attacks.target import Target


@dataclass(frozen=True)
class Attack:
    """One attack.

    Attributes:
        name: its name on the command line.
        says: what it does, in words.
        run: does it, and says how that went.
        slow_disk: whether the service's disk is to take 10 ms for each flush, as many do.
        descriptors: how many files the service may have open; None = as many as this process.
        volume_bytes: the size of a volume of its own that the service is to have; None = it has the common one.
        consumers: how many consumers there are, beside that of the honest replica.
    """

    name: str
    says: str
    run: Callable[[Target], str]
    slow_disk: bool = False
    descriptors: int | None = None
    volume_bytes: int | None = None
    consumers: int = 0


@dataclass
class Family:
    """Attacks of one kind."""

    attacks: list[Attack] = field(default_factory=list)

    def attack(self, says: str, **conditions: Any) -> Callable[[Callable[[Target], str]], Callable[[Target], str]]:
        """Make a function an attack of its name."""

        def added(run: Callable[[Target], str]) -> Callable[[Target], str]:
            self.attacks.append(Attack(run.__name__.replace("_", "-"), says, run, **conditions))
            return run

        return added


@dataclass
class Answers:
    """What the service has answered, counted."""

    counts: Counter[str] = field(default_factory=Counter)
    longest: str = ""

    def add(self, code: str, text: str = "") -> None:
        self.counts[code] += 1
        self.longest = max(self.longest, text, key=len)

    def take(self, responses: Iterable[Any]) -> None:
        """Take what a call answers, to its end."""
        try:
            for _ in responses:
                self.counts["answers"] += 1
        except grpc.RpcError as error:
            self.refused(error)

    def refused(self, error: grpc.RpcError) -> None:
        """A call was refused."""
        call: Any = error
        self.add(call.code().name, call.details() or "")

    def __str__(self) -> str:
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.most_common())
        said = f"; {len(self.longest.encode())} bytes: {self.longest[:160]!r}" if self.longest else ""
        return (counts or "no answer") + said


def until(seconds: float) -> Iterator[int]:
    """Numbers from 0 on, for so long."""
    deadline, number = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        yield number
        number += 1

"""What an attack is."""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import grpc
from tests.attacks.target import Target


@dataclass(frozen=True)
class Outcome:
    """How an attack went, and what harm it knows to have done; empty if it knows of none."""

    said: str
    harm: str = ""


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
    run: Callable[[Target], Outcome]
    slow_disk: bool = False
    descriptors: int | None = None
    volume_bytes: int | None = None
    consumers: int = 0


_Run: TypeAlias = Callable[[Target], Outcome]
# Longer refusals may not reach whoever they are for: gRPC bounds what it carries beside messages.
LONGEST_REFUSAL = 2_000


@dataclass
class Family:
    """Attacks of one kind."""

    attacks: list[Attack] = field(default_factory=list)

    def attack(self, says: str, **conditions: Any) -> Callable[[_Run], _Run]:
        def added(run: _Run) -> _Run:
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
        call: Any = error
        self.add(call.code().name, call.details() or "")

    @property
    def outcome(self) -> Outcome:
        """All of it in words, and whether a refusal was too long."""
        size = len(self.longest.encode())
        counts = ", ".join(f"{count} {name}" for name, count in self.counts.most_common())
        said = f"; {size} bytes: {self.longest[:160]!r}" if self.longest else ""
        harm = f"a refusal of {size:,} bytes" if size >= LONGEST_REFUSAL else ""
        return Outcome((counts or "no answer") + said, harm)


def until(seconds: float) -> Iterator[int]:
    """Numbers from 0 on, for so long."""
    deadline, number = time.monotonic() + seconds, 0
    while time.monotonic() < deadline:
        yield number
        number += 1

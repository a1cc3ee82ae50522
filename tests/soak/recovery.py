"""How long replicas took to go on after each fault. Pure functions of what was written down."""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Happened:
    """A fault that came about.

    Attributes:
        kind: what was done.
        begun_unix_ns: when that began, nanoseconds since 1970.
        ended_unix_ns: when it was undone: what was killed may be started again, what was cut connect.
        replicas: who is to recover from it.
    """

    kind: str
    begun_unix_ns: int
    ended_unix_ns: int
    replicas: Sequence[str]


def steps_back(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Where a replica's journal goes back to an earlier version than it held before, in the same history."""
    newest, found = dict[str, int](), list[str]()
    for line in lines:
        history, version = line["history"], line["version"]
        if version < newest.get(history, 0):
            found.append(f"number {line['number']}: version {version} after {newest[history]}")
        newest[history] = max(version, newest.get(history, 0))
    return found


@dataclass(frozen=True)
class Receipts:
    """The releases that a replica has applied, in order: when, and when their step had ended; nanoseconds."""

    applied_unix_ns: Sequence[int]
    step_end_unix_ns: Sequence[int]

    @classmethod
    def of_journal(cls, lines: Sequence[Mapping[str, Any]]) -> "Receipts":
        """Those that a replica's journal tells."""
        return cls([line["unix_ns"] for line in lines], [line["step_end_unix_ns"] for line in lines])

    def first_since(self, unix_ns: int) -> int | None:
        """When it first held a version whose step had ended after some time; None if it never did."""
        newest = np.maximum.accumulate(np.array(self.step_end_unix_ns, np.int64))
        at = bisect_right(newest.tolist(), unix_ns)
        return self.applied_unix_ns[at] if at < len(newest) else None


@dataclass(frozen=True)
class Recovery:
    """What came after a fault.

    Attributes:
        seconds: from when the fault was undone until all replicas that it touches held a version whose step had
            ended after it began; 0 if they did before, None if one never did. Other faults may come meanwhile:
            their time is in it.
        last: the replica that was the last to do so, or never did.
    """

    seconds: float | None
    last: str


def recovery(fault: Happened, receipts: Mapping[str, Receipts]) -> Recovery:
    """How replicas went on after a fault, as their receipts tell."""
    last, last_unix_ns = "", fault.ended_unix_ns
    for name in fault.replicas:
        first = receipts[name].first_since(fault.begun_unix_ns)
        if first is None:
            return Recovery(None, name)
        if first > last_unix_ns:
            last, last_unix_ns = name, first
    return Recovery((last_unix_ns - fault.ended_unix_ns) / 1e9, last)

"""What it costs to be watched: ten pages that are open, and 20 scrapes a second, while cuts come at a pace.

Turns without and with them alternate. What watching costs by itself, while no cut comes, is taken off.
"""

import os
import statistics
import time
from pathlib import Path
from typing import Protocol

STREAMS, PER_SECOND = 10, 20
CUTS, ROUNDS, WARM_UP = 20, 8, 1
_PACE_SECONDS = 0.1
_TICKS = os.sysconf("SC_CLK_TCK")


class Published(Protocol):
    """Publishes a cut, and returns once it is sealed."""

    def publish(self, rows: int) -> int:
        """Publish so many rows of each table."""


class Asked(Protocol):
    """A process that does what it is told."""

    def ask(self, line: str) -> str:
        """Its answer."""


def measure(cuts: Published, rows: int, watcher: Asked, pid: int) -> list[dict[str, float]]:
    """Of each round: the median seconds from publish to sealed and the service's seconds of CPU of a cut, without
    and with watchers, and what these take while there is no cut.
    """
    return [_round(cuts, rows, watcher, pid) for _ in range(WARM_UP + ROUNDS)][WARM_UP:]


def _round(cuts: Published, rows: int, watcher: Asked, pid: int) -> dict[str, float]:
    alone, alone_cpu = _turn(cuts, rows, pid)
    watcher.ask(f"watch {STREAMS}")
    watcher.ask(f"start {PER_SECOND} /metrics")
    begun = _cpu(pid)
    time.sleep(CUTS * _PACE_SECONDS)
    own = (_cpu(pid) - begun) / CUTS
    watched, watched_cpu = _turn(cuts, rows, pid)
    watcher.ask("stop")
    watcher.ask("look away")
    return {
        "alone": alone,
        "watched": watched,
        "alone_cpu": alone_cpu,
        "watched_cpu": max(0.0, watched_cpu - own),
        "own_cpu": own,
    }


def _turn(cuts: Published, rows: int, pid: int) -> tuple[float, float]:
    """The median seconds of a cut, and the mean of the service's CPU, at a pace."""
    begun, due, took = _cpu(pid), time.perf_counter(), list[float]()
    for _ in range(CUTS):
        time.sleep(max(0.0, due - time.perf_counter()))
        due += _PACE_SECONDS
        started = time.perf_counter()
        cuts.publish(rows)
        took.append(time.perf_counter() - started)
    time.sleep(max(0.0, due - time.perf_counter()))
    return statistics.median(took), (_cpu(pid) - begun) / CUTS


def _cpu(pid: int) -> float:
    """Seconds of CPU that a process has taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS

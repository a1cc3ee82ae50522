"""The wall clock of a process, which others may set."""

import time
from pathlib import Path
from typing import Any


def clock_file(fuse: Path) -> Path:
    """Where a process with a fuse is told by how many seconds its clock is off, while that is there."""
    return fuse.with_suffix(".clock")


def follow_clock_file(file: Path) -> None:
    """Have what this process takes for the time be off as a file says. Before others import it."""
    wall, wall_ns = time.time, time.time_ns

    def off() -> float:
        try:
            return float(file.read_text())
        except FileNotFoundError:
            return 0.0

    shifted: dict[str, Any] = {
        "time": lambda: wall() + off(),
        "time_ns": lambda: wall_ns() + int(off() * 1e9),
    }
    for name, clock in shifted.items():
        setattr(time, name, clock)

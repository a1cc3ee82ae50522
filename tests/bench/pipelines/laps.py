"""What each step of a turn took."""

import time
from itertools import pairwise
from typing import Protocol

import torch


class Laps(Protocol):
    """A watch on some steps, one after the other."""

    def note(self) -> None:
        """Note the time: once before the first step, and after each."""

    def seconds(self) -> list[float]:
        """What each step took; once the device has done all of them."""


class HostLaps:
    """By the clock of the host, which has done a step when it returns from it."""

    def __init__(self) -> None:
        self._times: list[float] = []

    def note(self) -> None:
        self._times.append(time.perf_counter())

    def seconds(self) -> list[float]:
        return [end - start for start, end in pairwise(self._times)]


class GpuLaps:
    """By events on the stream that trains: the host only launches a step, and is further by the time it runs."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.current_stream(device)
        self._events: list[torch.cuda.Event] = []

    def note(self) -> None:
        """Have the stream note the time when it gets here."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._events.append(self._stream.record_event(event))

    def seconds(self) -> list[float]:
        return [start.elapsed_time(end) / 1e3 for start, end in pairwise(self._events)]


def laps_on(device: torch.device) -> Laps:
    """A watch on steps that run on a device."""
    return GpuLaps(device) if device.type == "cuda" else HostLaps()

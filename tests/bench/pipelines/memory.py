"""How much memory a part of a process uses, and how much of it only for a while.

On a GPU, its allocator counts bytes. On a CPU, what the C library keeps of freed memory is given back to the
kernel first, so that resident memory is memory in use; the kernel notes the peak (VmHWM), and forgets it when
asked to (/proc/self/clear_refs).
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch

_FORGET_PEAK = "5"  # proc(5)


class Memory(Protocol):
    """Of this process, on one device."""

    source: str

    def held(self) -> int:
        """Bytes in use."""

    def rise(self, work: Callable[[], object]) -> int:
        """By how many bytes more are in use at the peak of some work than before it."""


class HostMemory:
    source = "resident memory (VmHWM)"

    def held(self) -> int:
        """Bytes that are no file's."""
        _give_back_freed()
        return _bytes("RssAnon")

    def rise(self, work: Callable[[], object]) -> int:
        """By how many bytes the peak of some work is higher than what was resident before."""
        _give_back_freed()
        Path("/proc/self/clear_refs").write_text(_FORGET_PEAK)
        before = _bytes("VmRSS")
        work()
        return max(0, _bytes("VmHWM") - before)


class GpuMemory:
    """What PyTorch has allocated on a GPU."""

    source = "allocated on the GPU"

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def held(self) -> int:
        torch.cuda.synchronize(self._device)
        return torch.cuda.memory_allocated(self._device)

    def rise(self, work: Callable[[], object]) -> int:
        """By how many bytes more are allocated at the peak of some work than before it."""
        before = self.held()
        torch.cuda.reset_peak_memory_stats(self._device)
        work()
        return torch.cuda.max_memory_allocated(self._device) - before


def memory_of(device: torch.device) -> Memory:
    """Of this process, on the device that it trains on."""
    return GpuMemory(device) if device.type == "cuda" else HostMemory()


def _give_back_freed() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc has it.
        trim(0)


def _bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) * 1024
    raise ValueError(f"/proc/self/status has no {field}")

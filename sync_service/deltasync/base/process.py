"""Setting up our own processes: logs, memory, and the sockets that they listen on."""

import ctypes
import gc
import os
import resource
import socket
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


def keep_freed_memory() -> bool:
    """Let malloc keep blocks of up to 32 MiB, and 512 MiB at the heap's end, instead of returning them.

    Messages of 1 MiB are otherwise mapped and unmapped one by one, which costs more than half of a gRPC
    stream's throughput. All threads have one heap: others than the first end every 64 MiB, and what is freed there
    is returned whatever was said. It changes the whole process, so that only our own processes call it.

    Returns:
        Whether the C library took it; one that is not glibc is left as it is.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # All or none: the trim threshold alone switches off glibc's own adaptation.
    settings = (_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 512 << 20), (_M_ARENA_MAX, 1)
    return all(mallopt(*each) for each in settings)


def write_no_core() -> None:
    """Have the kernel write no core file of this process, nor hand one to a program: tokens are in it.

    Of 1 byte, for that is what keeps it from handing one to a program; 0 does not. Where not even that may be
    asked for, none is what was asked for already.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    most = 1 if hard == resource.RLIM_INFINITY else min(hard, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h; `fordblks` are the bytes that are free and kept."""

    _fields_ = [
        *((f"other_{number}", ctypes.c_size_t) for number in range(8)),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


def give_back_memory() -> None:
    """Return freed memory to the system, wherever in the heap it is; nothing where the C library is not glibc.

    While that lasts, whoever allocates waits.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(ctypes.c_size_t(0))


class FreedMemory:
    """What malloc keeps of the memory that was freed: no more than so many bytes, wherever in the heap they are.

    What is above `most` is returned to the system, once: malloc counts it as free from then on too, so what counts
    is how much memory the process has.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._least = 0  # That the process had since it was last returned.

    def give_back(self) -> bool:
        """Return it, if it is too much. While that lasts, whoever allocates waits. Any thread, one at a time.

        Returns:
            Whether it was too much; never where the C library is not glibc.
        """
        libc = ctypes.CDLL(None)
        mallinfo = getattr(libc, "mallinfo2", None)
        if mallinfo is None:
            return False
        mallinfo.restype = _Mallinfo
        resident = _private_bytes()
        self._least = min(self._least, resident)
        if too_much := mallinfo().fordblks > self._most and resident > self._least + self._most:
            give_back_memory()
            self._least = _private_bytes()
        return too_much


def _private_bytes() -> int:
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def spare_imports() -> None:
    """Let garbage collection pass over the objects there are: for the most part modules, which are never freed.

    Every thread stands still while it looks at all objects, for 25 ms if all that the service imports is among
    them. It changes the whole process, so that only our own processes call it, at their start.
    """
    gc.collect()
    gc.freeze()


def raise_descriptor_limit() -> int:
    """Take as many file descriptors as this process may have; how many those are."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def this_process() -> str:
    """This process in words, for people at another machine."""
    return f"process {os.getpid()} of {socket.gethostname()[:100]}"


def listening_socket(host: str, port: int) -> socket.socket:
    """A TCP socket that listens already: whoever is told of it can connect at once.

    Args:
        host: an address, of IPv4 or IPv6.
        port: 0 = one that is free.

    Raises:
        OSError: there is no such address here, or the port is taken.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named: asyncio switches Nagle's algorithm off only for sockets that say TCP.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener

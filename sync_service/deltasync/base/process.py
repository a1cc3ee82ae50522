"""This process: its memory, limits and sockets, and the version of deltasync in it."""

import ctypes
import gc
import json
import os
import resource
import shutil
import socket
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from urllib.parse import unquote, urlsplit

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8  # malloc.h


def keep_freed_memory() -> bool:
    """Let malloc keep blocks of up to 32 MiB, and 512 MiB at the heap's end, instead of returning them.

    Otherwise malloc maps and unmaps each message of 1 MiB, which costs a gRPC stream more than half of its
    throughput. All threads share one heap, because malloc always returns memory freed in any other. Only our own
    processes call this, since it changes the whole process. The result tells whether the C library accepted it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # All or none, because the trim threshold alone switches off glibc's own adaptation.
    settings = (_M_MMAP_THRESHOLD, 32 << 20), (_M_TRIM_THRESHOLD, 512 << 20), (_M_ARENA_MAX, 1)
    return all(mallopt(*each) for each in settings)


def write_no_core() -> None:
    """Prevent core files of this process, which would contain tokens.

    The limit is 1 byte, because with 0 the kernel may still pipe the file to a program. A lower hard limit stays.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_CORE)
    most = 1 if hard == resource.RLIM_INFINITY else min(hard, 1)
    resource.setrlimit(resource.RLIMIT_CORE, (most, most))


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of malloc.h; `fordblks` counts free bytes that malloc keeps."""

    _fields_ = [
        *((f"other_{number}", ctypes.c_size_t) for number in range(8)),
        ("fordblks", ctypes.c_size_t),
        ("keepcost", ctypes.c_size_t),
    ]


def give_back_memory() -> None:
    """Return freed memory anywhere in the heap to the system. Does nothing without glibc.

    Allocations wait meanwhile.
    """
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(ctypes.c_size_t(0))


class FreedMemory:
    """Bounds the freed memory that malloc keeps anywhere in the heap.

    malloc counts memory as free even after returning it to the system, so the memory of the process decides
    whether there is more than `most` to return.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._least = 0  # The lowest memory of the process since the last return.

    def give_back(self) -> bool:
        """Return freed memory to the system if it exceeds the limit; say whether it did. One thread at a time.

        Allocations wait meanwhile. Only glibc supports it.
        """
        libc = ctypes.CDLL(None)
        mallinfo = getattr(libc, "mallinfo2", None)
        if mallinfo is None:
            return False
        mallinfo.restype = _Mallinfo
        resident = private_bytes()
        self._least = min(self._least, resident)
        if too_much := mallinfo().fordblks > self._most and resident > self._least + self._most:
            give_back_memory()
            self._least = private_bytes()
        return too_much


def private_bytes() -> int:
    """Private memory of this process in bytes, not backed by files."""
    _, resident, shared, *_ = map(int, Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE")


def spare_imports() -> None:
    """Exclude all current objects from garbage collection: mostly modules, which are never freed.

    A collection stops every thread, for 25 ms if it visits all imports of the service. Only our own processes call
    this, at their start, since it changes the whole process.
    """
    gc.collect()
    gc.freeze()


def raise_descriptor_limit() -> int:
    """Raise the limit of file descriptors as far as permitted, and return it."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def this_process() -> str:
    """A description of this process for readers on other machines."""
    return f"process {os.getpid()} of {socket.gethostname()[:100]}"


def listening_socket(host: str, port: int) -> socket.socket:
    """Open a listening TCP socket, to which peers can connect at once; port 0 = any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches off Nagle's algorithm only for sockets with an explicit protocol.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


_PACKAGE = "deltasync"


@cache
def built_version() -> str:
    """The version of the package; empty if it is not installed."""
    try:
        return version(_PACKAGE)
    except PackageNotFoundError:
        return ""


@cache
def built_commit() -> str:
    """The commit of the package or checkout; empty if unknown.

    Images set DELTASYNC_COMMIT, and pip records the commit that it fetched with git. An editable
    checkout asks git once per process. The result ends in `-dirty` if files have changed since the commit.
    """
    if commit := os.environ.get("DELTASYNC_COMMIT"):
        return commit
    try:
        text = distribution(_PACKAGE).read_text("direct_url.json")
    except PackageNotFoundError:
        return ""
    origin = json.loads(text) if text else {}
    if origin.get("dir_info", {}).get("editable"):
        return _commit_of_checkout(Path(unquote(urlsplit(origin["url"]).path)))
    return str(origin.get("vcs_info", {}).get("commit_id", ""))


def _commit_of_checkout(folder: Path) -> str:
    git = shutil.which("git")
    if git is None or not (folder / ".git").exists():
        return ""
    command = [git, "--no-optional-locks", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        done = subprocess.run([*command, "--exclude=*"], capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):  # For example, git refuses a folder of another user.
        return ""
    return done.stdout.strip()

"""Runs a function in a process that has a small file system in memory."""

import ctypes
import faulthandler
import os
import sys
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest

_NEW_NAMESPACES = 0x10000000 | 0x00020000  # CLONE_NEWUSER and CLONE_NEWNS of <sched.h>.
_NOT_ALLOWED = 75


def in_tmpfs(folder: Path, options: str, work: Callable[[], None]) -> None:
    """Run `work` in a forked process in which `folder` is a tmpfs with these mount options.

    Skips the test where a process may not mount one.
    """

    def run() -> None:
        if not _mounted(folder, options):
            os._exit(_NOT_ALLOWED)
        work()

    if (code := forked(run)) == _NOT_ALLOWED:
        pytest.skip("needs the right to mount a tmpfs in a user namespace")
    assert code == 0


def mount(folder: Path, at: Path) -> None:
    """Show a folder in another place, for a process of `in_tmpfs` only."""
    bind = 4096  # MS_BIND of <sys/mount.h>.
    assert not ctypes.CDLL(None).mount(str(folder).encode(), str(at).encode(), None, bind, None)


def forked(work: Callable[[], None]) -> int | None:
    """Run a function in a forked process; returns its exit code, 1 after an exception."""

    def run() -> None:
        try:
            work()
        except BaseException:  # noqa: BLE001  # pytest's, too
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(1)
        os._exit(0)

    process = get_context("fork").Process(target=run)
    process.start()
    process.join()
    return process.exitcode


def in_new_process(work: Callable[[Path], None], folder: Path) -> int | None:
    """Run an importable function in a process that shares no memory with this one; returns its exit code.

    For work under a limit: a fork would also hold the objects of earlier tests, whose destructors may then crash.
    """
    process = get_context("spawn").Process(target=_with_traceback, args=(work, folder))
    process.start()
    process.join()
    return process.exitcode


def _with_traceback(work: Callable[[Path], None], folder: Path) -> None:
    faulthandler.enable()
    work(folder)


def _mounted(folder: Path, options: str) -> bool:
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(_NEW_NAMESPACES):
        return False
    for file, content in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
        Path(f"/proc/self/{file}").write_text(content)
    return not libc.mount(b"tmpfs", str(folder).encode(), b"tmpfs", 0, options.encode())

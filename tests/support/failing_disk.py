"""Makes some disk calls of a process fail."""

import errno
import shutil
import subprocess
from pathlib import Path

import pytest

# Loaded ahead of the C library. The file that FAILING_DISK names is read at each call: which calls fail, of files
# whose path has what, below which byte, one of how many, and with which error.
_SOURCE = r"""
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define NEXT(name) reinterpret_cast<decltype(&name)>(dlsym(RTLD_NEXT, #name))

static bool fails(int file, long offset, const char *call) {
    char text[512] = "", calls[64], name[256], link[64], path[4096] = "";
    long below;
    int every, error, control = open(getenv("FAILING_DISK"), O_RDONLY | O_CLOEXEC);
    if (control < 0) return false;
    ssize_t size = NEXT(read)(control, text, sizeof text - 1);
    close(control);
    if (size < 0 || sscanf(text, "%63s %255s %ld %d %d", calls, name, &below, &every, &error) != 5)
        return false;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    if (readlink(link, path, sizeof path - 1) < 0) return false;
    static thread_local unsigned seed = 1;
    if (!strstr(calls, call) || !strstr(path, name) || offset >= below || rand_r(&seed) % every) return false;
    errno = error;
    return true;
}

#define POSITIONED(name, buffer, count, call) \
    extern "C" ssize_t name(int file, buffer data, count n, off_t offset) { \
        return fails(file, offset, call) ? -1 : NEXT(name)(file, data, n, offset); \
    }
#define PLAIN(name, buffer, call) \
    extern "C" ssize_t name(int file, buffer data, size_t n) { \
        return fails(file, 0, call) ? -1 : NEXT(name)(file, data, n); \
    }
#define SYNCING(name) \
    extern "C" int name(int file) { return fails(file, 0, "sync") ? -1 : NEXT(name)(file); }

POSITIONED(pwrite, const void *, size_t, "write")
POSITIONED(pwrite64, const void *, size_t, "write")
POSITIONED(pwritev, const iovec *, int, "write")
POSITIONED(pwritev64, const iovec *, int, "write")
POSITIONED(pread, void *, size_t, "read")
POSITIONED(pread64, void *, size_t, "read")
PLAIN(read, void *, "read")
PLAIN(write, const void *, "write")
SYNCING(fsync)
SYNCING(fdatasync)
"""
_EVERYWHERE = 1 << 62


class FailingDisk:
    """The environment that makes a process's disk fail, and when. Skips the test without a C compiler.

    Attributes:
        environment: environment variables for the process.
    """

    def __init__(self, folder: Path) -> None:
        if not (compiler := shutil.which("g++")):
            pytest.skip("needs g++")
        library, self._control = folder / "failing_disk.so", folder / "failing_disk"
        command = [compiler, "-x", "c++", "-shared", "-fPIC", "-O1", "-o", str(library), "-", "-ldl"]
        subprocess.run(command, input=_SOURCE, text=True, check=True)
        self.environment = {"LD_PRELOAD": str(library), "FAILING_DISK": str(self._control)}

    def fail(
        self, calls: str, path: str, *, below: int = _EVERYWHERE, every: int = 1, error: int = errno.EIO
    ) -> None:
        """Make one of `every` calls fail from now on, for files with `path` in their path, below an offset.

        Calls are "read", "write" and "sync", separated by commas. Only calls that start `below` an offset fail.
        """
        new = self._control.with_suffix(".new")
        new.write_text(f"{calls} {path} {below} {every} {error}")
        new.replace(self._control)

    def go_on(self) -> None:
        """Stop failing calls."""
        self._control.unlink()

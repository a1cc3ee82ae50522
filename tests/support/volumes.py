"""Small volumes in memory, which a test may fill."""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_MOUNT = 'mount -t tmpfs -o size="$1" none "$2" && echo ready && exec cat'


@contextmanager
def small_volume(size: int) -> Iterator[Path]:
    """A volume of this size in bytes, accessible to all processes of this user. Skips if mounting fails."""
    if not shutil.which("unshare"):
        pytest.skip("needs unshare")
    with tempfile.TemporaryDirectory() as folder:
        command = ["unshare", "--map-root-user", "--mount", "sh", "-c", _MOUNT, "sh", str(size), folder]
        holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert holder.stdin
        assert holder.stdout
        try:
            if holder.stdout.readline() != b"ready\n":
                pytest.skip("no volume can be mounted here")
            yield Path(f"/proc/{holder.pid}/root{folder}")
        finally:
            holder.stdin.close()
            holder.wait()
            holder.stdout.close()
            if holder.stderr:
                holder.stderr.close()


def remount(volume: Path, option: str) -> None:
    """Make a volume read-only ("ro"), while no file on it is open for writing, or writable again ("rw")."""
    _, _, pid, _, *folder = volume.parts
    inside = ["nsenter", "--target", pid, "--user", "--preserve-credentials", "--mount"]
    subprocess.run([*inside, "mount", "-o", f"remount,{option}", "/" + "/".join(folder)], check=True)


def fill(volume: Path) -> Path:
    """Fill a volume to its last byte; returns the file to remove again."""
    filler = volume / "filler"
    with filler.open("wb", buffering=0) as file:
        size, step = 0, 1 << 20
        while step:
            try:
                os.posix_fallocate(file.fileno(), size, step)
                size += step
            except OSError:
                step //= 2
    return filler

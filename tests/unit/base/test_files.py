"""That a file has changed is noticed, however it was changed."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from deltasync.base.files import FileWatch


def rewritten(path: Path) -> None:
    path.write_text("another, longer")


def replaced(path: Path) -> None:
    """By another with the same size and time."""
    new, found = path.with_suffix(".new"), path.stat()
    new.write_text(path.read_text().upper())
    os.utime(new, ns=(found.st_atime_ns, found.st_mtime_ns))
    new.replace(path)


def linked(path: Path) -> None:
    """As Kubernetes updates what is mounted: a link to a folder leads elsewhere."""
    (path.parent / "second").mkdir()
    (path.parent / "second" / "file").write_text("first")
    path.unlink()
    path.symlink_to(path.parent / "second" / "file")


@pytest.mark.parametrize("change", [rewritten, replaced, linked, Path.unlink])
def test_a_change_is_noticed_once(tmp_path: Path, change: Callable[[Path], None]) -> None:
    path, other = tmp_path / "file", tmp_path / "not-there"
    path.write_text("first")

    async def watched() -> None:
        watch = FileWatch([other, path], seconds=0.001)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(watch.changed(), 0.02)
        change(path)
        await asyncio.wait_for(watch.changed(), 30)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(watch.changed(), 0.02)

    asyncio.run(watched())


def test_a_change_before_anybody_waits_is_noticed(tmp_path: Path) -> None:
    async def watched() -> None:
        watch = FileWatch([tmp_path / "file"], seconds=0.001)
        (tmp_path / "file").write_text("there")
        await asyncio.wait_for(watch.changed(), 30)

    asyncio.run(watched())

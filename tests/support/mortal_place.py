"""Places of checkpoints where any call may fail or end the process."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from deltasync.checkpoints.file_storage import UNFINISHED, Place, PlaceFailed, StoredFile


class Killed(BaseException):
    """Simulates the end of the process."""


class Calls:
    """Counts calls, and fails at one of them.

    Attributes:
        last: number of the call that fails; 0 = none.
        kills: whether the process ends there, instead of only the call failing.
    """

    def __init__(self, last: int = 0, *, kills: bool = False) -> None:
        self.last, self.kills, self.count = last, kills, 0

    def __call__(self, name: str) -> None:
        self.count += 1
        if self.last and self.kills and self.count >= self.last:
            raise Killed(name)  # And no call after it does anything.
        if self.last and self.count == self.last:
            raise PlaceFailed(f"{name}: no more")


class MortalPlace(Place):
    """A folder that counts each call twice: before and after it is done.

    If the process ends before a write, half of the file is left under the name of unfinished files.
    """

    def __init__(self, folder: Path, calls: Calls) -> None:
        super().__init__(str(folder))
        self._path_of, self._calls = folder, calls

    def put(self, name: str, content: bytes | memoryview) -> None:
        try:
            self._calls(name)
        except Killed:
            path = self._path_of / (name + UNFINISHED)
            if self._calls.count == self._calls.last and path.parent.exists():
                path.write_bytes(content[: len(content) // 2])
            raise
        super().put(name, content)
        self._calls(name)

    def get(self, name: str) -> bytes:
        self._calls(name)
        return super().get(name)

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        self._calls(name)
        with super().open(name) as file:
            yield file

    def names(self, folder: str) -> list[StoredFile]:
        self._calls(folder)
        return super().names(folder)

    def remove(self, name: str) -> None:
        self._calls(name)
        super().remove(name)
        self._calls(name)


class PowerCuts:
    """What a disk would have after a power failure: only flushed names and bytes. Recorded at every flush.

    Attributes:
        images: the folder's names and the files' bytes at each flush.
    """

    def __init__(self, patch: pytest.MonkeyPatch, root: Path) -> None:
        self.images: list[dict[Path, dict[str, int]]] = [{}]
        self._contents = dict[int, bytes]()  # By the file's inode.
        self._root, flush = root, os.fsync

        def noting(descriptor: int) -> None:
            flush(descriptor)
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            if path.is_file():
                self._contents[os.fstat(descriptor).st_ino] = path.read_bytes()
            elif path.is_relative_to(root):
                names = {each.name: each.stat().st_ino for each in path.iterdir()}
                self.images.append({**self.images[-1], path: names})

        patch.setattr(os, "fsync", noting)

    def restore(self, image: dict[Path, dict[str, int]], into: Path) -> None:
        """Create a folder from an image."""
        into.mkdir()
        for folder in sorted(image):
            copy = into / folder.relative_to(self._root)
            if not copy.exists():
                continue  # The folder's own name was not flushed.
            for name, inode in image[folder].items():
                if folder / name in image or (folder / name).is_dir():
                    (copy / name).mkdir()
                else:
                    (copy / name).write_bytes(self._contents.get(inode, b""))

"""Whether LMDB's file is whole: pages that are missing at its end would kill the process when they are read.

The file may well be shorter than the environment says: pages that were taken and given back in one transaction
are never written. They are in LMDB's list of free pages, so the file is whole if every page behind its end is in
there. The list is read from the file and not through the map, in the layout of LMDB 0.9 on 64-bit machines.
"""

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

_HEADER_BYTES = 16
_META = struct.Struct(
    "=IIQQ 40sQ 40sQ QQ"
)  # Ends with: root of the free list, tree of all else, last page, transaction.
_MAGIC = 0xBEEFC0DE
_NODE = struct.Struct("=HHHH")
_BRANCH, _LEAF = 1, 2  # Flags of a page.
_OVERFLOW = 1  # Flag of a node: its data is in pages of its own.
_NO_PAGE = 2**64 - 1


def is_truncated(path: Path) -> bool:
    """Whether the file lacks pages at its end that hold something. LMDB has opened it: its head is in order."""
    with path.open("rb") as file:
        pages = _Pages(file)
        behind = range(pages.present, pages.last + 1)
        if not behind:
            return False
        try:
            free = {page for page in pages.free() if page >= pages.present}
        except _MissingPage:
            return True
        return len(free) < len(behind)


class _MissingPage(Exception):
    pass


class _Pages:
    """The pages of a file.

    Attributes:
        last: number of the last page that was ever taken.
        present: how many pages the file has, whole.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._size = _page_size(file)
        metas = [_META.unpack_from(self._page(number), _HEADER_BYTES) for number in (0, 1)]
        *_, self._free_root, _, _, self.last, _ = max(metas, key=lambda meta: meta[-1])
        self.present = file.seek(0, 2) // self._size

    def free(self) -> Iterator[int]:
        """The pages in the list of free ones."""
        if self._free_root != _NO_PAGE:
            yield from self._free_under(self._free_root)

    def _free_under(self, number: int) -> Iterator[int]:
        page = self._page(number)
        flags, lower = struct.unpack_from("=HH", page, 10)
        if not flags & (_BRANCH | _LEAF):
            raise _MissingPage
        for offset in struct.unpack_from(f"={(lower - _HEADER_BYTES) // 2}H", page, _HEADER_BYTES):
            low, high, node_flags, key_bytes = _NODE.unpack_from(page, offset)
            if flags & _BRANCH:
                yield from self._free_under(low | high << 16 | node_flags << 32)
            else:
                data = offset + _NODE.size + key_bytes
                yield from self._numbers(page, data, low | high << 16, node_flags)

    def _numbers(self, page: bytes, offset: int, size: int, flags: int) -> tuple[int, ...]:
        """A list of page numbers, which begins with how many there are."""
        if flags & _OVERFLOW:
            (first,) = struct.unpack_from("=Q", page, offset)
            page, offset = self._page(first, _HEADER_BYTES + size), _HEADER_BYTES
        (count,) = struct.unpack_from("=Q", page, offset)
        return struct.unpack_from(f"={count}Q", page, offset + 8)

    def _page(self, number: int, size: int = 0) -> bytes:
        size = size or self._size
        self._file.seek(number * self._size)
        page = self._file.read(size)
        if len(page) < size:
            raise _MissingPage
        return page


def _page_size(file: BinaryIO) -> int:
    """The first number of the free list's tree, which stands in the first page, whatever a page's size is."""
    head = file.read(_HEADER_BYTES + 28)
    (size,) = struct.unpack_from("=I", head, _HEADER_BYTES + 24)
    return int(size)

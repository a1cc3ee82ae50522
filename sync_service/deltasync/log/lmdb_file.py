"""Checks the size of an LMDB file before LMDB maps it, because reading behind its end kills the process."""

import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from deltasync.base.errors import StorageFailed
from deltasync.log.data_directory import RESTORE

# The layout of LMDB 0.9. A file begins with two heads, one a page; the one with the larger transaction counts.
_PAGE = struct.Struct("<QHHHH")  # Number, padding, flags, lower and upper end of the free space.
# Magic, version, page size, root of the free list, last page, transaction.
_HEAD = struct.Struct("<II16xI36xQ48xQQ")
_NODE = struct.Struct("<HHHH")  # Low and high half of the size or of the page, flags, size of the key.
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_BRANCH, _LEAF, _ON_OTHER_PAGES, _NO_PAGE = 1, 2, 1, 2**64 - 1
_SMALLEST_PAGE = 4096


def check_size(path: Path) -> None:
    """Check that a file has all pages that its head names. LMDB itself checks the rest."""
    if not path.exists():
        return
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        head = _newest_head(file)
        if head is None:
            return
        page_bytes, free_root, last = head
        if size >= (last + 1) * page_bytes:
            return
        # LMDB does not write free pages at the end.
        there = size // page_bytes
        try:
            lost = set(range(there, last + 1)).difference(_free_pages(file, page_bytes, free_root))
        except (struct.error, RecursionError):
            lost = {last}
    if lost:
        needed = (max(lost) + 1) * page_bytes
        raise StorageFailed(f"{path} was cut short: it has {size} bytes, but needs {needed}: {RESTORE}")


def _newest_head(file: BinaryIO) -> tuple[int, int, int] | None:
    """Page size, root of the free list, and last page; None if the file has no head, which LMDB reports."""
    heads = list[tuple[int, int, int, int]]()
    for at in (0, _SMALLEST_PAGE):
        if heads:
            at = heads[0][1]
        file.seek(at + _PAGE.size)
        raw = file.read(_HEAD.size)
        if len(raw) < _HEAD.size:
            break
        magic, version, page_bytes, root, last, transaction = _HEAD.unpack(raw)
        if (magic, version) == (_MAGIC, _VERSION) and page_bytes >= 512:
            heads.append((transaction, page_bytes, root, last))
    return max(heads)[1:] if heads else None


def _free_pages(file: BinaryIO, page_bytes: int, root: int) -> Iterator[int]:
    """The pages in the free list, from a tree of which each leaf has lists of numbers."""
    if root == _NO_PAGE:
        return
    page = _read(file, root * page_bytes, page_bytes)
    _, _, flags, lower, _ = _PAGE.unpack_from(page)
    for (at,) in struct.iter_unpack("<H", page[_PAGE.size : lower]):
        low, high, node_flags, key_bytes = _NODE.unpack_from(page, at)
        content = at + _NODE.size
        if flags & _BRANCH:
            yield from _free_pages(file, page_bytes, low | high << 16 | node_flags << 32)
        elif node_flags & _ON_OTHER_PAGES:
            (first,) = struct.unpack_from("<Q", page, content + key_bytes)
            yield from _numbers(_read(file, first * page_bytes + _PAGE.size, low | high << 16))
        else:
            yield from _numbers(page[content + key_bytes :][: low | high << 16])


def _numbers(raw: bytes) -> Iterator[int]:
    """The numbers of a list, which begins with their count."""
    (count,) = struct.unpack_from("<Q", raw)
    yield from struct.unpack_from(f"<{count}Q", raw, 8)


def _read(file: BinaryIO, at: int, size: int) -> bytes:
    """Read bytes. Too few lead to an error of `struct`."""
    file.seek(at)
    return file.read(size)

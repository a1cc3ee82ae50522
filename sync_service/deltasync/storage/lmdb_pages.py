"""Whether the pages of LMDB's file fit together. LMDB itself trusts them: what has changed in their heads kills
the process when it is read, or leaves records out without a word.

Looked at before LMDB opens the file, in the layout of LMDB 0.9 on 64-bit machines: every page says which one it
is, is used once or free, and the trees have as many pages and entries as is written down of them. Free pages may
be missing at its end: those that were taken and given back in one transaction are never written.
"""

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

_HEAD = struct.Struct("=QHHHH")  # Number, padding, flags, end of the offsets, begin of the nodes.
_HEAD_BYTES = _HEAD.size
_DB = struct.Struct("=IHHQQQQQ")  # Padding, flags, depth, branch, leaf and overflow pages, entries, root.
_META = struct.Struct(f"=IIQQ {_DB.size}s {_DB.size}s QQ")  # Ends with: last page, transaction.
_MAGIC, _VERSION = 0xBEEFC0DE, 1
_NODE = struct.Struct("=HHHH")  # Size or number in three halves, flags among them; bytes of the key.
_NUMBER = struct.Struct("=Q")
_BRANCH, _LEAF, _OVERFLOW, _META_PAGE = 1, 2, 4, 8  # Flags of pages.
_NUMBERS = 8  # Flag of a tree: its keys are numbers.
_APART, _TREE = 1, 2  # Flags of nodes: their data is in pages of its own, or a tree.
_NO_PAGE = 2**64 - 1
_PAGE_SIZES = {1 << shift for shift in range(9, 17)}


class DamagedPages(Exception):
    """What does not fit, in words."""


class MissingPages(DamagedPages):
    """The file ends before pages that hold something."""


@dataclass(frozen=True)
class _Tree:
    """What is written down of a tree."""

    depth: int
    pages: tuple[int, int, int]  # Branch, leaf, overflow.
    entries: int
    root: int

    @classmethod
    def of(cls, record: bytes, flags: int = 0) -> "_Tree":
        _, found, depth, branch, leaf, overflow, entries, root = _DB.unpack(record)
        if found != flags:
            raise DamagedPages(f"a tree has the flags {found}, expected {flags}")
        return cls(depth, (branch, leaf, overflow), entries, root)


def check_pages(path: Path) -> None:
    """Check a file that LMDB has written, if there is one; nobody writes it meanwhile.

    Raises:
        MissingPages: it is cut off.
        DamagedPages: something in it does not fit.
    """
    if not path.exists() or not path.stat().st_size:
        return
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        try:
            if _is_known(content):
                _File(content).check()
        except struct.error as error:
            raise MissingPages from error


def _is_known(content: mmap.mmap) -> bool:
    """Whether it is a file of this version of LMDB, which refuses others by itself."""
    return len(content) >= 2 * min(_PAGE_SIZES) and _META.unpack_from(content, _HEAD_BYTES)[:2] == (
        _MAGIC,
        _VERSION,
    )


class _File:
    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._size = self._page_size()
        metas = [self._meta(number) for number in (0, 1)]
        numbers = [meta[-1] for meta in metas]
        # Each transaction writes the other one.
        if abs(numbers[0] - numbers[1]) > 1 or any(n and n % 2 != page for page, n in enumerate(numbers)):
            raise DamagedPages(f"its heads are of the transactions {numbers[0]} and {numbers[1]}")
        trees = [(_Tree.of(free, _NUMBERS), _Tree.of(main)) for *_, free, main, _, _ in metas]
        newest = numbers.index(max(numbers))
        (self._free, self._main), self._last = trees[newest], metas[newest][-2]
        self._used = bytearray(self._last + 1)
        self._used[:2] = b"\1\1"

    def check(self) -> None:
        """Look at all that is used, and at what is free."""
        lists = list(self._entries(self._free))
        for _, data, flags in self._entries(self._main):
            if flags & _TREE:
                for _ in self._entries(_Tree.of(data)):
                    pass
        for _, data, _ in lists:
            self._use_free(data)

    def _page_size(self) -> int:
        (size,) = struct.unpack_from("=I", self._content, _HEAD_BYTES + 24)
        if size not in _PAGE_SIZES:
            raise DamagedPages(f"its pages have {size} bytes")
        return int(size)

    def _meta(self, number: int) -> tuple[Any, ...]:
        page, _, flags, _, _ = _HEAD.unpack_from(self._content, number * self._size)
        meta = _META.unpack_from(self._content, number * self._size + _HEAD_BYTES)
        if (page, flags, meta[0], meta[1]) != (number, _META_PAGE, _MAGIC, _VERSION):
            raise DamagedPages(f"page {number} is no head")
        return meta

    def _use(self, page: int, count: int = 1) -> None:
        if not 2 <= page <= page + count - 1 <= self._last:
            raise DamagedPages(f"page {page} is outside of it")
        if any(self._used[page : page + count]):
            raise DamagedPages(f"page {page} is used twice")
        self._used[page : page + count] = bytes([1]) * count

    def _use_free(self, data: bytes) -> None:
        """Use the pages of a list of free ones: of a large log that was full once, there are millions."""
        (count,) = _NUMBER.unpack_from(data)
        if len(data) < _NUMBER.size * (count + 1):
            raise MissingPages
        pages, used = np.frombuffer(data, np.uint64, count, _NUMBER.size), np.frombuffer(self._used, np.uint8)
        if count and not 2 <= pages.min() <= pages.max() <= self._last:
            raise DamagedPages("a free page is outside of it")
        if used[pages].any() or len(np.unique(pages)) < count:
            raise DamagedPages("a free page is used twice")
        used[pages] = 1

    def _entries(self, tree: _Tree) -> Iterator[tuple[bytes, bytes, int]]:
        """Key, data and flags of all entries of a tree; of data that is apart, only that of the free lists."""
        counts, entries = [0, 0, 0], 0
        if tree.root != _NO_PAGE:
            for entry in self._under(tree, tree.root, tree.depth, counts):
                entries += 1
                yield entry
        if (tuple(counts), entries) != (tree.pages, tree.entries):
            raise DamagedPages(
                f"a tree has {sum(counts)} pages and {entries} entries, not {sum(tree.pages)} and {tree.entries}"
            )

    def _under(self, tree: _Tree, page: int, depth: int, counts: list[int]) -> Iterator[tuple[bytes, bytes, int]]:
        self._use(page)
        is_leaf = depth == 1
        counts[is_leaf] += 1
        last = b""
        for number, node in enumerate(self._nodes(page, _LEAF if is_leaf else _BRANCH)):
            if is_leaf:
                yield node.key, self._data(tree, page, node, counts), node.flags
                continue
            least = self._order(tree, node.key) if number else b""  # The first of a branch is none.
            for key, data, flags in self._under(tree, node.number, depth - 1, counts):
                if number and not last < least <= self._order(tree, key):
                    raise DamagedPages(f"a key of page {page} has changed")
                yield key, data, flags
            last = self._order(tree, key)

    def _order(self, tree: _Tree, key: bytes) -> bytes:
        return key[::-1] if tree is self._free else key  # Those of free lists are numbers.

    def _nodes(self, page: int, kind: int) -> Iterator["_Node"]:
        start = page * self._size
        number, _, flags, lower, upper = _HEAD.unpack_from(self._content, start)
        if (number, flags) != (page, kind) or not _HEAD_BYTES < lower <= upper <= self._size or lower % 2:
            raise DamagedPages(f"the head of page {page} has changed")
        for offset in struct.unpack_from(f"={(lower - _HEAD_BYTES) // 2}H", self._content, start + _HEAD_BYTES):
            if not upper <= offset <= self._size - _NODE.size:
                raise DamagedPages(f"page {page} has a node outside of it")
            low, high, node_flags, key_bytes = _NODE.unpack_from(self._content, start + offset)
            first = start + offset + _NODE.size
            if first + key_bytes > start + self._size:
                raise DamagedPages(f"page {page} has a key outside of it")
            yield _Node(self._content[first : first + key_bytes], low | high << 16, node_flags, first + key_bytes)

    def _data(self, tree: _Tree, page: int, node: "_Node", counts: list[int]) -> bytes:
        start, size = node.end, node.size
        if not node.flags & _APART:
            if start + size > (page + 1) * self._size:
                raise DamagedPages(f"page {page} has an entry outside of it")
            return self._content[start : start + size]
        (first,) = _NUMBER.unpack_from(self._content, start)
        pages = -(-(_HEAD_BYTES + size) // self._size)
        self._use(first, pages)
        number, _, kind, low, high = _HEAD.unpack_from(self._content, first * self._size)
        if (number, kind, low | high << 16) != (first, _OVERFLOW, pages):
            raise DamagedPages(f"the head of page {first} has changed")
        data = first * self._size + _HEAD_BYTES
        if len(self._content) < data + size:
            raise MissingPages
        counts[2] += pages
        return self._content[data : data + size] if tree is self._free else b""


@dataclass(frozen=True)
class _Node:
    """A node of a page: its data begins at a byte of the file, and has a size, unless it is of a branch."""

    key: bytes
    size: int
    flags: int
    end: int

    @property
    def number(self) -> int:
        """Of the page that a node of a branch leads to."""
        return self.size | self.flags << 32

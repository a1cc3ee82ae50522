"""Object storage in memory that may be silent, refuse calls, or alter what it gets, behind fsspec's interface."""

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fsspec
from fsspec.implementations.memory import MemoryFileSystem

_SCHEME = "controlled"
CALLS = ("put", "get", "list", "look", "remove")


class ControlledStorage:
    """Object storage at a URL of its own.

    Attributes:
        url: its URL.
        calls: number of calls by name, see `CALLS`.
        asked: set by every call.
        refused: names of calls that are refused.
        failing: names of calls for which it cannot be reached.
        alter: what is stored instead of the content of a new object.
        details: details of an object beside its size, such as its ETag.
    """

    def __init__(self, name: str) -> None:
        self.url, self.calls, self.asked = f"{_SCHEME}://{name}", Counter[str](), threading.Event()
        self.refused, self.failing = set[str](), set[str]()
        self.alter: Callable[[bytes], bytes] = lambda content: content
        self.details: Callable[[bytes], dict[str, Any]] = lambda _: {}
        self._answers = threading.Event()
        self._answers.set()
        _named[name] = self

    @contextmanager
    def silent(self) -> Iterator[None]:
        """No call is answered before the end of the block."""
        self.asked.clear()
        self._answers.clear()
        try:
            yield
        finally:
            self._answers.set()

    @contextmanager
    def gone(self, *calls: str) -> Iterator[None]:
        """It cannot be reached inside of the block, or only some calls fail."""
        self.failing = set(calls or CALLS)
        try:
            yield
        finally:
            self.failing = set()

    def ask(self, call: str) -> None:
        self.calls[call] += 1
        self.asked.set()
        self._answers.wait()
        if call in self.refused:
            raise PermissionError(f"no right to {call}")
        if call in self.failing:
            raise ConnectionError(f"{self.url} cannot be reached")


_named = dict[str, ControlledStorage]()


class _Files(MemoryFileSystem):  # type: ignore[misc]
    protocol, pseudo_dirs, cachable = _SCHEME, [""], False
    store: dict[str, Any] = {}  # noqa: RUF012

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(MemoryFileSystem._strip_protocol(path.replace(f"{_SCHEME}://", "memory://")))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        self._ask(path, "put")
        super().pipe_file(path, self._storage(path).alter(value), mode)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self._ask(path, "get")
        content: bytes = super().cat_file(path, start, end)
        return content

    def ls(self, path: str, detail: bool = True, **_: Any) -> Any:
        self._ask(path, "list")
        return super().ls(path, detail)

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self._ask(path, "look")
        found: dict[str, Any] = super().info(path)
        stored = self.store.get(self._strip_protocol(path))
        return found | (self._storage(path).details(stored.getvalue()) if stored else {})

    def rm_file(self, path: str) -> None:
        self._ask(path, "remove")
        super().rm_file(path)

    def _ask(self, path: str, call: str) -> None:
        self._storage(path).ask(call)

    def _storage(self, path: str) -> ControlledStorage:
        return _named[self._strip_protocol(path).strip("/").partition("/")[0]]


fsspec.register_implementation(_SCHEME, _Files, clobber=True)

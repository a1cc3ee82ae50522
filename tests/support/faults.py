"""A service's log and places of checkpoints, whose calls a test replaces, delays or makes fail."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from typing import Any, BinaryIO, cast

from deltasync.checkpoints.file_storage import DEADLINE_SECONDS, Place, StoredFile
from deltasync.log.lmdb_store import LmdbStore
from deltasync.log.log_store import LogOptions, LogStore

Hook = Callable[..., Any]
WAIT = 20


class Calls:
    """Calls by name. In the block of `replaced`, a hook takes the place of a call: it gets the call, then its
    arguments.
    """

    def __init__(self) -> None:
        self.hooks = dict[str, Hook]()

    @contextmanager
    def replaced(self, **hooks: Hook) -> Iterator[None]:
        self.hooks |= hooks
        try:
            yield
        finally:
            for name in hooks:
                self.hooks.pop(name, None)

    def make(self, name: str, call: Hook, *arguments: Any, **named: Any) -> Any:
        hook = self.hooks.get(name)
        return hook(call, *arguments, **named) if hook else call(*arguments, **named)


class Faults:
    """Collaborators of a service whose calls can be replaced.

    Attributes:
        log: calls of the log, by their names in `LogStore`.
        place: calls of places, by their names in `Place`; each has the place as its first argument.
    """

    def __init__(self) -> None:
        self.log, self.place = Calls(), Calls()

    @property
    def collaborators(self) -> dict[str, Any]:
        """Arguments of `Service`."""
        return {"open_log": self.open_log, "open_place": self.open_place}

    def open_log(self, options: LogOptions) -> LogStore:
        return self.wrap(LmdbStore(options))

    def wrap(self, log: LogStore) -> LogStore:
        return cast("LogStore", _Log(log, self.log))

    def open_place(
        self,
        url: str,
        *,
        deadline_seconds: float | None = DEADLINE_SECONDS,
    ) -> Place:
        return _Place(self.place, url, deadline_seconds=deadline_seconds)


class _Log:
    def __init__(self, log: LogStore, calls: Calls) -> None:
        self.__dict__.update(_log=log, _calls=calls)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._log, name)
        if not callable(found):
            return found
        return lambda *arguments, **named: self._calls.make(name, found, *arguments, **named)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._log, name, value)


class _Place(Place):
    def __init__(self, calls: Calls, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._calls = calls

    def put(self, name: str, content: bytes | memoryview) -> None:
        self._make("put", super().put, "written", name, content)

    def get(self, name: str) -> bytes:
        return cast("bytes", self._make("get", super().get, "read", name))

    @contextmanager
    def open(self, name: str) -> Iterator[BinaryIO]:
        self._make("open", lambda _: None, "read", name)
        with super().open(name) as file:
            yield file

    def names(self, folder: str) -> list[StoredFile]:
        return cast("list[StoredFile]", self._make("names", super().names, "listed", folder))

    def remove(self, name: str) -> None:
        self._make("remove", super().remove, "removed", name)

    def _make(self, kind: str, call: Hook, done: str, name: str, *content: Any) -> Any:
        if kind not in self._calls.hooks:
            return call(name, *content)
        with self._failures(name, done):  # An error of the hook is one of the file system.
            return self._calls.make(kind, lambda _, *arguments: call(*arguments), self, name, *content)


def failing(error: BaseException, *words: str) -> Hook:
    """A hook that fails, for calls with all these words in their arguments; other calls are made."""

    def fail(call: Hook, *arguments: Any, **named: Any) -> Any:
        if all(word in described(arguments) for word in words):
            raise error
        return call(*arguments, **named)

    return fail


class Held:
    """A hook that holds up calls with all these words in their arguments until `let_go`, then makes them or fails.

    Attributes:
        begun: set once it holds up a call.
        error: with what the calls fail afterwards; None = they are made.
    """

    def __init__(self, *words: str) -> None:
        self.begun, self.error = threading.Event(), cast("BaseException | None", None)
        self._words, self._go = words, threading.Event()

    def __call__(self, call: Hook, *arguments: Any, **named: Any) -> Any:
        if (self._go.is_set() and not self.error) or not all(word in described(arguments) for word in self._words):
            return call(*arguments, **named)
        self.begun.set()
        return self._hold(partial(call, *arguments, **named))

    def let_go(self) -> None:
        self._go.set()

    async def has_begun(self) -> None:
        while not self.begun.is_set():
            await asyncio.sleep(0.001)

    def _hold(self, call: Callable[[], Any]) -> Any:
        assert self._go.wait(WAIT)
        if self.error:
            raise self.error
        return call()


class HeldWrites(Held):
    """The same for writes of a log, whose callers go on meanwhile."""

    def __init__(self, *words: str) -> None:
        super().__init__(*words)
        self._held = list[tuple[Future[None], Callable[[], Future[None]]]]()

    def let_go(self) -> None:
        super().let_go()
        for future, call in self._held:
            if self.error:
                _finish(future, self.error)
            else:
                call().add_done_callback(partial(_follow, future))
        self._held.clear()

    def _hold(self, call: Callable[[], Any]) -> Any:
        future = Future[None]()
        if self._go.is_set():
            _finish(future, self.error)
        else:
            self._held.append((future, call))
        return future


def refusing(error: Exception, *words: str) -> Hook:
    """A hook that refuses writes of a log with all these words in their arguments."""
    writes = HeldWrites(*words)
    writes.error = error
    writes.let_go()
    return writes


def _follow(future: "Future[None]", done: "Future[None]") -> None:
    _finish(future, done.exception())


def _finish(future: "Future[None]", error: BaseException | None) -> None:
    if error:
        future.set_exception(error)
    else:
        future.set_result(None)


def described(arguments: tuple[Any, ...]) -> str:
    """The texts among the arguments of a call: names, streams, and URLs of places."""
    texts = (each.url if isinstance(each, Place) else each for each in arguments)
    return " ".join(each for each in texts if isinstance(each, str))

"""Threads: which may touch what, work that follows other work, and work in shares on several cores.

A class names the owner of its attributes with `confined`; DELTASYNC_CHECK_THREADS has each access checked.
"""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

C = TypeVar("C", bound=type[Any])

CHECKED = bool(os.environ.get("DELTASYNC_CHECK_THREADS"))
_NAME_LENGTH = 15  # Linux takes no more.
# Begins the names of the threads of models.
MODEL_PREFIX = "model-"

_exempt = threading.local()
_named: "WeakSet[threading.Thread]" = WeakSet()


class WrongThread(RuntimeError):
    """A bug: a thread touched an attribute of another one."""


@dataclass(frozen=True)
class ThreadOwner:
    """The thread that owns an attribute.

    `read_by_all`: other threads may read the attribute, since it is replaced whole and never changed.
    """

    name: str
    is_here: Callable[[], bool]
    read_by_all: bool = False


def _in_event_loop() -> bool:
    return asyncio._get_running_loop() is not None


def _in_model_thread() -> bool:
    return threading.current_thread().name.startswith(MODEL_PREFIX)


EVENT_LOOP = ThreadOwner("the event loop", _in_event_loop)
SET_BY_EVENT_LOOP = ThreadOwner("the event loop", _in_event_loop, read_by_all=True)
MODEL_THREAD = ThreadOwner("the model's thread", _in_model_thread)


@contextlib.contextmanager
def not_shared_yet() -> Iterator[None]:
    """Inside the block, this thread may touch attributes of any owner: it made the object, and no other has it."""
    before = _is_exempt()
    _exempt.now = True
    try:
        yield
    finally:
        _exempt.now = before


def confined(**owners: ThreadOwner) -> Callable[[C], C]:
    """Class decorator: the owners of attributes, from the end of the constructor on."""

    def decorate(kind: C) -> C:
        if CHECKED:
            _guard(kind, owners)
        return kind

    return decorate


def _is_exempt() -> bool:
    return getattr(_exempt, "now", False)


def _guard(kind: Any, owners: dict[str, ThreadOwner]) -> None:
    construct, read, write = kind.__init__, kind.__getattribute__, kind.__setattr__

    def checked_init(self: Any, *arguments: Any, **named: Any) -> None:
        with not_shared_yet():
            construct(self, *arguments, **named)

    def checked_read(self: Any, name: str) -> Any:
        if (owner := owners.get(name)) and not owner.read_by_all:
            _check(kind, name, owner)
        return read(self, name)

    def checked_write(self: Any, name: str, value: Any) -> None:
        if owner := owners.get(name):
            _check(kind, name, owner)
        write(self, name, value)

    kind.__init__, kind.__getattribute__, kind.__setattr__ = checked_init, checked_read, checked_write


def _check(kind: type[Any], name: str, owner: ThreadOwner) -> None:
    if not owner.is_here() and not _is_exempt():
        here = threading.current_thread().name
        raise WrongThread(f"{kind.__name__}.{name} belongs to {owner.name}, touched by thread {here}")


def name_threads() -> None:
    """Give the system the names of all threads, for `top -H`, except the main one: its name is the process's."""
    for thread in set(threading.enumerate()) - set(_named) - {threading.main_thread()}:
        with contextlib.suppress(OSError):  # Linux only; or the thread has ended.
            Path(f"/proc/self/task/{thread.native_id}/comm").write_text(thread.name[:_NAME_LENGTH])
        _named.add(thread)


T = TypeVar("T")


def after(first: "Future[Any]", executor: Executor, function: Callable[[], T]) -> "Future[T]":
    """Call `function` in `executor` as soon as `first` is done, and return the future of its result.

    If `first` fails, the future is cancelled. Callbacks that `first` already has are called earlier.
    """
    following: Future[T] = Future()

    def begin(done: "Future[Any]") -> None:
        if done.cancelled() or done.exception():
            following.cancel()
            return
        try:
            executor.submit(_fulfil, following, function)
        except RuntimeError as error:
            following.set_exception(error)

    first.add_done_callback(begin)
    return following


def _fulfil(future: "Future[T]", function: Callable[[], T]) -> None:
    if future.set_running_or_notify_cancel():
        try:
            future.set_result(function())
        except BaseException as error:  # noqa: BLE001  # it goes to the waiter
            future.set_exception(error)


# Memory limits work on many rows: more cores do not read it faster.
_MOST_SHARES = 4
# With fewer rows, waking a thread takes longer than it saves.
_LEAST_ROWS = 1 << 16


def in_shares(work: Callable[[slice], None], rows: int) -> None:
    """Split rows into shares and work on them on several cores; return when all are done. Any thread.

    `work` must release the interpreter's lock for most of its time.

    Raises:
        the error of the first share that failed; other shares may be done.
    """
    count = max(1, min(rows // _LEAST_ROWS, _cores(), _MOST_SHARES))
    first, *others = (slice(rows * share // count, rows * (share + 1) // count) for share in range(count))
    futures = [_threads().submit(work, share) for share in others]
    try:
        work(first)
    finally:
        errors = [future.exception() for future in futures]
    for error in errors:
        if error:
            raise error


def _cores() -> int:
    return len(os.sched_getaffinity(0))


@lru_cache(1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST_SHARES, thread_name_prefix="rows")

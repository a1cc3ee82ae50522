"""Threads: which may use which attributes, work that follows other work, and work on several cores.

A class names the owners of its attributes with `confined`. DELTASYNC_CHECK_THREADS enables a check of each access.
"""

import asyncio
import contextlib
import contextvars
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

C = TypeVar("C", bound=type[Any])

CHECKED = bool(os.environ.get("DELTASYNC_CHECK_THREADS"))
_NAME_LENGTH = 15  # Linux allows no more.
# Prefix of the names of models' threads.
MODEL_PREFIX = "model-"

_exempt = threading.local()
_named: "WeakSet[threading.Thread]" = WeakSet()


class WrongThread(RuntimeError):
    """A bug: a thread used an attribute that belongs to another one."""


@dataclass(frozen=True)
class ThreadOwner:
    """The thread that owns an attribute.

    `read_by_all`: other threads may read the attribute, since it is replaced and never changed.
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
    """Inside the block, let this thread use attributes of any owner, because it made the object itself."""
    before = _is_exempt()
    _exempt.now = True
    try:
        yield
    finally:
        _exempt.now = before


def confined(**owners: ThreadOwner) -> Callable[[C], C]:
    """Class decorator that names the owners of attributes. The constructor may use all of them."""

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
        raise WrongThread(f"{kind.__name__}.{name} belongs to {owner.name}, but thread {here} used it")


def name_threads() -> None:
    """Set the names of all threads in the system, for `top -H`, except the main one, which names the process."""
    for thread in set(threading.enumerate()) - set(_named) - {threading.main_thread()}:
        with contextlib.suppress(OSError):  # Not on Linux, or the thread has ended.
            Path(f"/proc/self/task/{thread.native_id}/comm").write_text(thread.name[:_NAME_LENGTH])
        _named.add(thread)


T = TypeVar("T")


def after(first: "Future[Any]", executor: Executor, function: Callable[[], T]) -> "Future[T]":
    """Call `function` in `executor` as soon as `first` is done, and return the future of its result.

    If `first` fails, the future is cancelled. Callbacks that `first` already has run earlier.
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
        except BaseException as error:  # noqa: BLE001  # The waiter gets the error.
            future.set_exception(error)


def begin_in_thread(function: Callable[[], T]) -> "Future[T]":
    """Call `function` in a thread of its own, which does not keep the process from ending."""
    future: Future[T] = Future()
    threading.Thread(target=_fulfil, args=(future, function), name="waits", daemon=True).start()
    return future


async def in_own_thread(function: Callable[..., T], *arguments: object, **keywords: object) -> T:
    """Call a function in a thread of its own, because it may wait for storage or a broker.

    What only computes belongs in `asyncio.to_thread`, whose few threads bound the work that peers can ask for.
    """
    return await asyncio.wrap_future(
        begin_in_thread(partial(contextvars.copy_context().run, function, *arguments, **keywords))
    )


# More cores do not help, because memory bandwidth limits work on many rows.
_MOST_SHARES = 4
# With fewer rows, waking a thread takes longer than it saves.
_LEAST_ROWS = 1 << 16


def in_shares(work: Callable[[slice], None], rows: int, cores: int | None = None) -> None:
    """Split rows into shares and process them on several cores. Return when all are done. Any thread.

    `work` must release the GIL most of the time. `cores` defaults to those of this process.
    """
    cores = cores or len(os.sched_getaffinity(0))
    count = max(1, min(rows // _LEAST_ROWS, cores, _MOST_SHARES))
    first, *others = (slice(rows * share // count, rows * (share + 1) // count) for share in range(count))
    futures = [_threads().submit(work, share) for share in others]
    try:
        work(first)
    finally:
        errors = [future.exception() for future in futures]
    for error in errors:
        if error:
            raise error


@lru_cache(1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST_SHARES, thread_name_prefix="rows")

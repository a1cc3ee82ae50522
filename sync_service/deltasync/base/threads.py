"""Which thread may touch what: said beside each attribute, and checked where DELTASYNC_CHECK_THREADS is set."""

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

C = TypeVar("C", bound=type[Any])

CHECKED = bool(os.environ.get("DELTASYNC_CHECK_THREADS"))
_NAME_LENGTH = 15  # That Linux takes.
# How the threads of models are named.
MODEL_PREFIX = "model-"

_exempt = threading.local()
_named: "WeakSet[threading.Thread]" = WeakSet()


class WrongThread(RuntimeError):
    """A mistake of ours: something was touched by a thread that it does not belong to."""


@dataclass(frozen=True)
class Owner:
    """Who an attribute belongs to, and whether others may read it: what is replaced whole, and never changed."""

    name: str
    is_here: Callable[[], bool]
    read_by_all: bool = False


def _in_event_loop() -> bool:
    return asyncio._get_running_loop() is not None


def _in_model_thread() -> bool:
    return threading.current_thread().name.startswith(MODEL_PREFIX)


EVENT_LOOP = Owner("the event loop", _in_event_loop)
SET_BY_EVENT_LOOP = Owner("the event loop", _in_event_loop, read_by_all=True)
MODEL_THREAD = Owner("the model's thread", _in_model_thread)


@contextlib.contextmanager
def not_shared_yet() -> Iterator[None]:
    """What this thread touches inside was made by it, and nobody else has it so far."""
    before = _is_exempt()
    _exempt.now = True
    try:
        yield
    finally:
        _exempt.now = before


def confined(**owners: Owner) -> Callable[[C], C]:
    """Class decorator: these attributes belong to these threads, from the end of the constructor on."""

    def decorate(kind: C) -> C:
        if CHECKED:
            _guard(kind, owners)
        return kind

    return decorate


def _is_exempt() -> bool:
    return getattr(_exempt, "now", False)


def _guard(kind: Any, owners: dict[str, Owner]) -> None:
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


def _check(kind: type[Any], name: str, owner: Owner) -> None:
    if not owner.is_here() and not _is_exempt():
        here = threading.current_thread().name
        raise WrongThread(f"{kind.__name__}.{name} belongs to {owner.name}, touched by thread {here}")


def name_threads() -> None:
    """Tell the system what the threads are called, so that `top -H` shows it; but for the main one, whose name is
    the process's.
    """
    for thread in set(threading.enumerate()) - set(_named) - {threading.main_thread()}:
        with contextlib.suppress(OSError):  # Linux only; or it has ended meanwhile.
            Path(f"/proc/self/task/{thread.native_id}/comm").write_text(thread.name[:_NAME_LENGTH])
        _named.add(thread)


T = TypeVar("T")


def after(first: "Future[Any]", executor: Executor, function: Callable[[], T]) -> "Future[T]":
    """What `function` returns, or raises, called by `executor` as soon as `first` is done.

    It is not called where `first` has failed, and the future is cancelled then; nor by an executor that has ended.
    Who waited for `first` before is told of that before.
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
        except BaseException as error:  # noqa: BLE001  # handed over to whoever waits for it
            future.set_exception(error)

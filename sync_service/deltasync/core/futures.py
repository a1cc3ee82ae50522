"""Work that follows on other work, whatever thread that ends on."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any, TypeVar

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

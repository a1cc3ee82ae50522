"""Work that follows on other work."""

import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

import pytest

from deltasync.core.futures import after

WAIT = 20


@pytest.fixture
def first() -> "Future[None]":
    first: Future[None] = Future()
    first.set_running_or_notify_cancel()
    return first


def test_it_is_done_by_the_executor_once_the_first_is_and_who_waited_before_is_told(first: "Future[None]") -> None:
    told = list[str]()
    first.add_done_callback(lambda _: told.append("waiter"))
    with ThreadPoolExecutor(1, thread_name_prefix="other") as executor:
        following = after(first, executor, lambda: told.append(threading.current_thread().name))
        assert not following.done()
        first.set_result(None)
        following.result(WAIT)
    assert told == ["waiter", "other_0"]


def test_nothing_follows_a_failure(first: "Future[None]") -> None:
    done = list[int]()
    with ThreadPoolExecutor(1) as executor:
        following = after(first, executor, lambda: done.append(1))
        first.set_exception(ZeroDivisionError())
        with pytest.raises(CancelledError):
            following.result(WAIT)
    assert not done


@pytest.mark.parametrize(("ended", "error"), [(False, ZeroDivisionError), (True, RuntimeError)])
def test_its_own_failure_is_told_and_that_the_executor_has_ended(
    first: "Future[None]", ended: bool, error: type[Exception]
) -> None:
    with ThreadPoolExecutor(1) as executor:
        following = after(first, executor, lambda: 1 // 0)
        if ended:
            executor.shutdown()
        first.set_result(None)
        with pytest.raises(error):
            following.result(WAIT)

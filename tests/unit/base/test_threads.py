"""Work on several threads: attributes that belong to one, work that follows on other work, and work in shares."""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from deltasync.base.threads import (
    EVENT_LOOP,
    MODEL_PREFIX,
    MODEL_THREAD,
    SET_BY_EVENT_LOOP,
    WrongThread,
    after,
    confined,
    in_shares,
    name_threads,
    not_shared_yet,
)


@confined(loops=EVENT_LOOP, rows=MODEL_THREAD, head=SET_BY_EVENT_LOOP)
class Guarded:
    def __init__(self) -> None:
        self.loops, self.rows, self.head, self.free = 1, 2, 3, 4


def in_model_thread(function: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1, thread_name_prefix=f"{MODEL_PREFIX}m") as pool:
        return pool.submit(function).result()


def in_event_loop(function: Callable[[], object]) -> object:
    async def main() -> object:
        return function()

    return asyncio.run(main())


def in_another(function: Callable[[], object]) -> object:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result()


@pytest.mark.parametrize(
    ("name", "owner", "others"),
    [
        ("loops", in_event_loop, [in_model_thread, in_another]),
        ("rows", in_model_thread, [in_event_loop, in_another]),
    ],
)
def test_only_its_owner_touches_an_attribute(
    name: str, owner: Callable[..., object], others: list[Callable[..., object]]
) -> None:
    guarded = Guarded()
    owner(lambda: setattr(guarded, name, 10))
    assert owner(lambda: getattr(guarded, name)) == 10
    for other in others:
        with pytest.raises(WrongThread, match=f"Guarded.{name} belongs to the .*, but thread .* used it"):
            other(lambda: getattr(guarded, name))
        with pytest.raises(WrongThread):
            other(lambda: setattr(guarded, name, 11))
    assert owner(lambda: getattr(guarded, name)) == 10


def test_what_is_replaced_whole_is_read_by_all() -> None:
    guarded = Guarded()
    in_event_loop(lambda: setattr(guarded, "head", 10))
    assert in_another(lambda: guarded.head) == in_model_thread(lambda: guarded.head) == 10
    with pytest.raises(WrongThread):
        in_model_thread(lambda: setattr(guarded, "head", 11))
    in_another(lambda: setattr(guarded, "free", 5))


def test_what_is_not_shared_yet_is_used_where_it_is_made() -> None:
    guarded = Guarded()
    with not_shared_yet():
        guarded.rows += 1
        elsewhere = threading.Thread(target=in_event_loop, args=(lambda: guarded.loops,))
        elsewhere.start()
        elsewhere.join()
    with pytest.raises(WrongThread):
        guarded.rows += 1


def test_where_it_is_not_asked_for_nothing_is_checked() -> None:
    program = """
from deltasync.base.threads import MODEL_THREAD, confined
class Plain: ...
before = dict(vars(Plain))
assert dict(vars(confined(x=MODEL_THREAD)(Plain))) == before
"""
    environment = {name: value for name, value in os.environ.items() if name != "DELTASYNC_CHECK_THREADS"}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux is told what threads are called")
def test_the_system_knows_the_names_of_threads() -> None:
    def told() -> str:
        name_threads()
        return Path(f"/proc/self/task/{threading.get_native_id()}/comm").read_text()

    with ThreadPoolExecutor(1, thread_name_prefix="a-long-name-for-a-thread") as pool:
        assert pool.submit(told).result() == "a-long-name-for\n"
    before = Path("/proc/self/comm").read_text()
    name_threads()
    assert Path("/proc/self/comm").read_text() == before


# Work that follows on other work.

WAIT = 20


@pytest.fixture
def first() -> "Future[None]":
    first: Future[None] = Future()
    first.set_running_or_notify_cancel()
    return first


def test_a_following_call_runs_in_the_executor_after_the_first(first: "Future[None]") -> None:
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
def test_failures_of_its_own_are_told(first: "Future[None]", ended: bool, error: type[Exception]) -> None:
    with ThreadPoolExecutor(1) as executor:
        following = after(first, executor, lambda: 1 // 0)
        if ended:
            executor.shutdown()
        first.set_result(None)
        with pytest.raises(error):
            following.result(WAIT)


# Work in shares is done once for each row.


@pytest.mark.parametrize("rows", [0, 1, 65_535, 65_536, 131_072, 400_001])
def test_each_row_is_in_one_share(rows: int) -> None:
    done, some = np.zeros(rows, np.int64), list[slice]()

    def work(share: slice) -> None:
        done[share] += 1
        some.append(share)

    in_shares(work, rows, cores=3)
    assert (done == 1).all()
    assert len(some) == max(1, min(rows // 65_536, 3))


def test_on_one_core_there_is_one_share_on_the_thread_that_asked() -> None:
    ran_on = list[threading.Thread]()
    in_shares(lambda _: ran_on.append(threading.current_thread()), 1 << 20, cores=1)
    assert ran_on == [threading.current_thread()]


@pytest.mark.parametrize("failing", [0, 1])
def test_what_a_share_raises_is_raised_after_the_others(failing: int) -> None:
    done = list[slice]()

    def work(share: slice) -> None:
        if (share.start > 0) == failing:
            raise MemoryError("no room")
        done.append(share)

    with pytest.raises(MemoryError, match="no room"):
        in_shares(work, 1 << 20, cores=2)
    assert len(done) == 1

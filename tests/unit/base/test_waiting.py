"""Waiting for changes, however many wait and give up, and how long many clients wait before they try again."""

import asyncio
import random
import weakref
from collections.abc import Coroutine
from itertools import islice
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deltasync.base.waiting import Signal, backoff, first_of


async def settled() -> None:
    """Let all tasks run until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


async def changed(signal: Signal) -> None:
    await signal.changed()


NUMBERS = st.integers(0, 2)
EVENTS = st.one_of(
    st.tuples(st.just("wait"), st.sets(NUMBERS, min_size=1)),
    st.tuples(st.just("wait for one"), NUMBERS.map(lambda number: {number})),
    st.tuples(st.just("wake"), st.sets(NUMBERS, min_size=1)),
    st.tuples(st.just("give up"), st.sets(st.integers(0, 5), min_size=1)),
)


@given(st.lists(st.tuples(EVENTS, st.booleans()), max_size=30))
def test_a_change_wakes_all_that_wait_for_it_whichever_others_give_up(
    events: list[tuple[tuple[str, set[int]], bool]],
) -> None:
    async def scenario() -> None:
        signals = [Signal() for _ in range(3)]
        tasks, waits = list[asyncio.Task[None]](), list[set[int]]()
        woken, cancelled = set[int](), set[int]()

        def wait(one: Coroutine[Any, Any, None], numbers: set[int]) -> None:
            tasks.append(asyncio.create_task(one))
            waits.append(numbers)

        for (kind, numbers), others_run in events:
            if kind == "wait":
                wait(first_of(*(signals[each].changed() for each in numbers), seconds=None), numbers)
            elif kind == "wait for one":
                wait(changed(signals[min(numbers)]), numbers)
                await settled()  # It waits for a change only from then on.
            elif kind == "wake":
                for each in numbers:
                    signals[each].wake()
                woken |= {at for at, wanted in enumerate(waits) if wanted & numbers}
            else:
                for each in numbers & set(range(len(tasks))):
                    if tasks[each].cancel():
                        cancelled.add(each)
            if others_run:
                await settled()
        await settled()
        assert {at for at, task in enumerate(tasks) if task.done()} == woken | cancelled
        assert {at for at, task in enumerate(tasks) if task.cancelled()} == cancelled
        for task in tasks:
            task.cancel()

    asyncio.run(scenario())


def test_a_wait_for_several_changes_takes_one_task_and_cleans_up() -> None:
    async def scenario() -> None:
        signals = [Signal() for _ in range(3)]
        futures = [each.changed() for each in signals]
        alive = [weakref.ref(each) for each in futures]
        waiting = asyncio.create_task(first_of(*futures, seconds=None))
        futures.clear()
        await settled()
        assert asyncio.all_tasks() == {waiting, asyncio.current_task()}
        signals[0].wake()
        await waiting
        await settled()
        assert [each() for each in alive] == [None] * 3

    asyncio.run(scenario())


@pytest.mark.parametrize("end", ["change", "time", "cancelled"])
def test_a_task_goes_on_when_who_waits_for_it_no_longer_does(end: str) -> None:
    async def scenario() -> None:
        signal, done = Signal(), asyncio.Event()
        task = asyncio.create_task(done.wait())
        seconds = 0 if end == "time" else None
        waiting = asyncio.create_task(first_of(signal.changed(), seconds=seconds, tasks=[task]))
        await settled()
        if end == "change":
            signal.wake()
        if end == "cancelled":
            waiting.cancel()
        await asyncio.wait([waiting])
        await settled()
        assert not task.done()
        again = asyncio.create_task(first_of(signal.changed(), seconds=None, tasks=[task]))
        done.set()
        await again
        assert task.result()

    asyncio.run(scenario())


FLEET = 300


@given(st.integers(0, 2**32), st.floats(0.05, 300))
def test_a_fleet_does_not_come_back_in_step(seed: int, away_seconds: float) -> None:
    """All have lost the service at one moment. Once it is back, all come within the longest pause, and at most a
    quarter of them within 10 ms.
    """
    random.seed(seed)
    returned = sorted(_returned(away_seconds) for _ in range(FLEET))
    assert returned[-1] - away_seconds <= 5.0
    together = max(sum(start <= each < start + 0.01 for each in returned) for start in returned)
    assert together <= FLEET / 4


def _returned(away_seconds: float) -> float:
    """When one that has lost the service at 0 comes first, once that is back."""
    at = 0.0
    for pause in backoff():
        at += pause
        if at >= away_seconds:
            return at
    raise AssertionError


def test_pauses_grow_up_to_a_bound() -> None:
    pauses = [list(islice(backoff(), 20)) for _ in range(300)]
    assert all(0 < each <= 5 for some in pauses for each in some)
    means = [sum(some) / len(some) for some in zip(*pauses, strict=True)]
    assert means[:6] == pytest.approx([0.055 * 2**number for number in range(6)], rel=0.3)
    assert means[-1] > 2

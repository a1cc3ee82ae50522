"""Waiting for the next change, or before the next attempt."""

import asyncio
import random
from collections.abc import Awaitable, Collection, Iterator
from typing import Any

# Bounds of `backoff`.
_FIRST_SECONDS, _LONGEST_SECONDS = 0.1, 5.0


class Signal:
    """A signal for changes, used in one event loop."""

    def __init__(self) -> None:
        self._waiting = set[asyncio.Future[None]]()

    def changed(self) -> asyncio.Future[None]:
        """Return a future for the next change after this call. The caller may cancel it; nobody else has it."""
        future = asyncio.get_running_loop().create_future()
        self._waiting.add(future)
        future.add_done_callback(self._waiting.discard)
        return future

    def wake(self) -> None:
        """Wake all tasks that wait for a change."""
        for each in self._waiting:
            if not each.done():
                each.set_result(None)


async def first_of(
    *events: Awaitable[object], seconds: float | None, tasks: Collection[asyncio.Task[Any]] = ()
) -> None:
    """Wait at most `seconds` for the first of some events or tasks. Then cancel the events, but not the tasks."""
    waiting = [asyncio.ensure_future(each) for each in events]
    try:
        await asyncio.wait([*tasks, *waiting], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()


def backoff(longest_seconds: float | None = None) -> Iterator[float]:
    """Yield the seconds to wait before each further attempt: doubling, with a random factor.

    Many clients fail at the same moment when a service stops. The factor spreads their attempts.
    """
    seconds, longest = _FIRST_SECONDS, longest_seconds or _LONGEST_SECONDS
    while True:
        yield seconds * random.uniform(0.1, 1.0)  # noqa: S311  # not for secrets
        seconds = min(2 * seconds, longest)

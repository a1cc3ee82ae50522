"""Waiting for the next change, or before the next attempt."""

import asyncio
import random
from collections.abc import Awaitable, Coroutine, Iterator
from typing import Any, Literal

# Bounds of `backoff`.
_FIRST_SECONDS, _LONGEST_SECONDS = 0.1, 5.0


class Signal:
    """A signal for changes, used in one event loop."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def changed(self) -> Coroutine[None, None, Literal[True]]:
        """Return an awaitable for the next change after this call."""
        return self._event.wait()

    def wake(self) -> None:
        """Wake all tasks that wait for a change."""
        self._event.set()
        self._event = asyncio.Event()


async def first_of(
    *events: Awaitable[object], seconds: float | None, task: asyncio.Task[Any] | None = None
) -> None:
    """Wait at most `seconds` for the first of some events or for a task, without cancelling the task."""
    waiting = [asyncio.ensure_future(each) for each in events]
    try:
        also = [task] if task else []
        await asyncio.wait([*also, *waiting], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()


def backoff(longest_seconds: float | None = None) -> Iterator[float]:
    """Yield the seconds to wait before each further attempt: doubling, with a random factor.

    Many clients fail at the same moment when a service stops. The factor spreads their attempts.

    Args:
        longest_seconds: upper bound of a pause; None means 5 seconds.
    """
    seconds, longest = _FIRST_SECONDS, longest_seconds or _LONGEST_SECONDS
    while True:
        yield seconds * random.uniform(0.1, 1.0)  # noqa: S311  # not for secrets
        seconds = min(2 * seconds, longest)

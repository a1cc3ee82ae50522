"""Waiting for the next change of something, in one event loop."""

import asyncio
from collections.abc import Awaitable, Coroutine
from typing import Any, Literal


class Signal:
    """Something that changes now and then."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def changed(self) -> Coroutine[None, None, Literal[True]]:
        """To be awaited: the next change from this call on."""
        return self._event.wait()

    def wake(self) -> None:
        """Wake everybody who waits for a change."""
        self._event.set()
        self._event = asyncio.Event()


async def first_of(
    *events: Awaitable[object], seconds: float | None, task: asyncio.Task[Any] | None = None
) -> None:
    """Wait for the first of some events, or for a task to end (it is not cancelled), for at most `seconds`."""
    waiting = [asyncio.ensure_future(each) for each in events]
    try:
        also = [task] if task else []
        await asyncio.wait([*also, *waiting], timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in waiting:
            each.cancel()

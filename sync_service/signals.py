"""Waiting for the next change of something, in one event loop."""

import asyncio
from collections.abc import Coroutine
from typing import Literal


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

"""Polls for a condition."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(look: Callable[[], T], why: Callable[[], object] | str = "", seconds: float = 30.0) -> T:
    """Poll until a value is true, and return it; `why` describes the state for the error on timeout."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, why if isinstance(why, str) else why()
        time.sleep(0.01)
    return found

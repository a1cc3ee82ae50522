"""Waiting for what a test looks at again and again."""

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_for(look: Callable[[], T], why: Callable[[], object] | str = "", seconds: float = 30.0) -> T:
    """What there is once it is something; `why` tells what there was, if it never is."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, why if isinstance(why, str) else why()
        time.sleep(0.01)
    return found

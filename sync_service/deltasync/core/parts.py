"""Work on many rows on several cores: in parts, by functions that let other threads run meanwhile."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

# Memory is what limits such work: more cores do not read it faster.
_MOST_PARTS = 4
# With fewer rows, to wake a thread takes longer than it saves.
_LEAST_ROWS = 1 << 16


def in_parts(work: Callable[[slice], None], rows: int) -> None:
    """Do some work on so many rows, each of which is in one part; returns once all is done. Any thread.

    Raises:
        Whatever a part has raised: others may be done.
    """
    count = max(1, min(rows // _LEAST_ROWS, _cores(), _MOST_PARTS))
    first, *others = (slice(rows * part // count, rows * (part + 1) // count) for part in range(count))
    futures = [_threads().submit(work, part) for part in others]
    try:
        work(first)
    finally:
        errors = [future.exception() for future in futures]
    for error in errors:
        if error:
            raise error


def _cores() -> int:
    return len(os.sched_getaffinity(0))


@lru_cache(1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_MOST_PARTS, thread_name_prefix="rows")

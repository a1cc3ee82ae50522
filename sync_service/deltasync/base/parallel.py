"""Work on many rows on several cores: in shares, by functions that let other threads run meanwhile."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

# Memory is what limits such work: more cores do not read it faster.
_MOST_SHARES = 4
# With fewer rows, to wake a thread takes longer than it saves.
_LEAST_ROWS = 1 << 16


def in_shares(work: Callable[[slice], None], rows: int) -> None:
    """Do some work on so many rows, each of which is in one share; returns once all is done. Any thread.

    Raises:
        Whatever a share has raised: others may be done.
    """
    count = max(1, min(rows // _LEAST_ROWS, _cores(), _MOST_SHARES))
    first, *others = (slice(rows * share // count, rows * (share + 1) // count) for share in range(count))
    futures = [_threads().submit(work, share) for share in others]
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
    return ThreadPoolExecutor(_MOST_SHARES, thread_name_prefix="rows")

"""A log whose disk takes as long as a test likes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from deltasync.storage.log_store import LogStore

_TIMEOUT = 20


@contextmanager
def held_up(log: LogStore) -> Iterator[None]:
    """While the block runs, nothing that is submitted is written."""
    begun, go = threading.Event(), threading.Event()

    def wait(_: object) -> None:
        begun.set()
        assert go.wait(_TIMEOUT)

    log.queue.submit(wait, 0)
    assert begun.wait(_TIMEOUT)
    try:
        yield
    finally:
        go.set()

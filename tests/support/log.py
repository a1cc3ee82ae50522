"""The log of a service, and one whose disk takes as long as a test likes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from deltasync.service.service import Service
from deltasync.storage.log_store import LogStore

_TIMEOUT = 20


def log_of(service: Service) -> LogStore:
    """The one that all models are in."""
    (log,) = service.logs.each()
    return log


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

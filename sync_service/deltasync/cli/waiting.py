"""Saying how far something is that a service has been asked for, and that takes long."""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import click

from deltasync.client.endpoint import Endpoint
from deltasync.client.other_side import http_of
from deltasync.client.route import Route
from deltasync.core.errors import DeltasyncError

_EVERY_SECONDS = 5.0


@contextmanager
def waiting_for(service: Endpoint) -> Iterator[None]:
    """While the block runs, say every few seconds what the service is busy with; not to where answers go."""
    ended, begun = threading.Event(), time.monotonic()

    def say() -> None:
        while not ended.wait(_EVERY_SECONDS):
            for line in _work(service) or ["waiting"]:
                if not ended.is_set():
                    click.echo(f"{time.monotonic() - begun:.0f} s: {line}", err=True)

    thread = threading.Thread(target=say, name="waiting", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()


def _work(service: Endpoint) -> list[str]:
    try:
        status = Route(http_of(service)).get_json("/status")
    except DeltasyncError:  # Whoever may ask for the work need not be allowed to see it.
        return []
    return [line for process in status["processes"] for line in process["work"]]

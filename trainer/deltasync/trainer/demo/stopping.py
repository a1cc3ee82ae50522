"""Playing a stream in a process that may be asked to end in the middle."""

import signal
import threading
from collections.abc import Iterator

from deltasync.trainer.clicks.events import Events
from deltasync.trainer.clicks.stream_options import StreamOptions


class Stop(Exception):
    """The process was asked to end."""


def stop_on_signals() -> threading.Event:
    """Set once the process is asked to end."""
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    return stop


def play(stream: StreamOptions, stop: threading.Event) -> Iterator[Events]:
    """The batches of a stream, each when its last event arrives.

    Raises:
        Stop: `stop` was set while waiting for one.
    """

    def pause(seconds: float) -> None:
        if stop.wait(seconds):
            raise Stop

    return stream.batches(stream.pace(pause), pause)

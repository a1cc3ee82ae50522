"""Commands that are a replica while they run."""

import contextlib
import signal
from collections.abc import Iterator
from typing import NoReturn


@contextlib.contextmanager
def goodbye_on_sigterm() -> Iterator[None]:
    """In the block SIGTERM is what Ctrl-C is: a replica says goodbye then, and is not waited for. Main thread."""

    def end(*_: object) -> NoReturn:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)

"""Whether a replica still takes the release that it is being sent."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from deltasync.core.position import Decision

# A replica that takes nothing of a release for this long is given up, since it holds memory. If its target only
# takes long to apply what came before, it comes back.
QUIET_SECONDS = 120.0


class Sending:
    """Watches one replica's stream while a release is sent on it. Used in the event loop."""

    def __init__(self) -> None:
        self._moved: float | None = None

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """While a release is sent."""
        self._moved = time.monotonic()
        try:
            yield
        finally:
            self._moved = None

    def note_moved(self) -> None:
        """Note that the replica has taken something, is given more, or waits for the service."""
        if self._moved is not None:
            self._moved = time.monotonic()

    @property
    def decision(self) -> Decision:
        """Whether the stream may go on."""
        if self._moved is None:
            return Decision(True, "nothing is being sent")
        quiet = time.monotonic() - self._moved
        if quiet > QUIET_SECONDS:
            return Decision(False, f"it has taken nothing of its release for {quiet:.0f} s")
        return Decision(True, "it takes what it is sent")

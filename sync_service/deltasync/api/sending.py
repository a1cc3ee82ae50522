"""What is just being sent on one replica's stream, and whether the replica still takes it."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from deltasync.core.position import Decision
from deltasync.feeds.frozen_release import FrozenRelease

# A replica that takes nothing of a release for so long is given up, since it holds the room of that. One whose
# target takes long to apply what came before only has to come again.
QUIET_SECONDS = 120.0


class Sending:
    """The release that is being sent, if one is. Used in the event loop."""

    def __init__(self) -> None:
        self._release: FrozenRelease | None = None
        self._moved = 0.0

    @contextmanager
    def of(self, release: FrozenRelease) -> Iterator[None]:
        """While this is being sent."""
        self._release = release
        self.note_moved()
        try:
            yield
        finally:
            self._release = None

    def note_moved(self) -> None:
        """Note that the replica has taken something, or is given more."""
        self._moved = time.monotonic()

    @property
    def decision(self) -> Decision:
        """Whether the stream may go on."""
        now, release = time.monotonic(), self._release
        if release is None:
            return Decision(True, "nothing is being sent")
        sent_for = now - release.made if release.wanted_back else None
        return may_go_on(now - self._moved, sent_for)


def may_go_on(quiet_seconds: float, sent_for_seconds: float | None) -> Decision:
    """Whether a replica may go on to take a release.

    Args:
        quiet_seconds: for how long it has taken nothing.
        sent_for_seconds: for how long the release has been sent that others need the room of; None if none do.
    """
    if quiet_seconds > QUIET_SECONDS:
        return Decision(False, f"it has taken nothing of its release for {quiet_seconds:.0f} s")
    if sent_for_seconds is not None:
        return Decision(
            False, f"its release has been sent for {sent_for_seconds:.0f} s, and others wait for the room of that"
        )
    return Decision(True, "it takes what it is sent")

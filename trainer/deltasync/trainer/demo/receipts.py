"""When a replica has applied which release, and how large it was."""

import json
import time
from collections import deque
from pathlib import Path

from deltasync.client import Release

_MOST = 1_000_000


class Receipts:
    """Of the last 1,000,000 releases."""

    def __init__(self) -> None:
        self._applied: deque[tuple[int, int, int]] = deque(maxlen=_MOST)
        self._received_bytes: deque[int] = deque(maxlen=_MOST)

    def note(self, release: Release) -> None:
        """A release has just been applied."""
        self._applied.append((release.position.number, release.step, time.time_ns()))
        self._received_bytes.append(release.bytes)

    def write(self, file: Path) -> None:
        """Write them as JSON: `applied`, position, step and time (nanoseconds since 1970) of each, and
        `received_bytes`, those of its ids and values.
        """
        facts = {"applied": list(self._applied), "received_bytes": list(self._received_bytes)}
        file.write_text(json.dumps(facts))

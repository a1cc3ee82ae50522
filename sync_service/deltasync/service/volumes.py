"""The volumes that the service writes to: detects refused writes and their end."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from deltasync.base.errors import StorageFailed
from deltasync.base.events import Event, EventKind, Events
from deltasync.base.threads import in_own_thread
from deltasync.log.log_store import Logs
from deltasync.log.records import write_again
from deltasync.log.volume import Refusal, Volume, VolumeFailed


class Volumes:
    """The volumes of logs and of checkpoints. Used in the event loop."""

    def __init__(self, logs: Logs, checkpoints: Path, events: Events) -> None:
        self._logs, self._events = logs, events
        self._checkpoints = Volume("checkpoints", checkpoints)
        self._reported = set[str]()  # Names of volumes that refuse writes.

    @property
    def all(self) -> Sequence[Volume]:
        """All volumes."""
        return (*dict.fromkeys(log.volume for log in self._logs.each()), self._checkpoints)

    @property
    def trouble(self) -> str:
        """Why volumes refuse writes, and what to do; empty if none does."""
        return "; ".join(filter(None, (volume.trouble for volume in self.all)))

    def hear(self, event: Event) -> None:
        """Record the error of an event if it is a refused write."""
        self.record(event.error)

    def record(self, error: BaseException | None) -> None:
        """Record an error if it is a refused write."""
        if isinstance(error, VolumeFailed):
            for volume in self.all:
                if volume.has_file(error.refusal.path):
                    volume.refuse(error.refusal)
                    self._report(volume, error.refusal)

    async def look_after(self) -> None:
        """Report changes, and test whether volumes accept writes again."""
        for volume in self.all:
            if refusal := volume.refusal:
                self._report(volume, refusal)
                if await self._accepts(volume, refusal):
                    volume.recover(refusal)
            elif volume.trouble:  # Of brokers, which refuse no single file.
                self._emit_once(volume, volume.trouble)
            if not volume.trouble and volume.name in self._reported:
                self._reported.remove(volume.name)
                self._events.emit(EventKind.VOLUME_RECOVERED, "it accepts writes again", volume=volume.name)

    def _report(self, volume: Volume, refusal: Refusal) -> None:
        self._emit_once(volume, f"{refusal.path}: {refusal.in_words}")

    def _emit_once(self, volume: Volume, text: str) -> None:
        if volume.name not in self._reported:
            self._reported.add(volume.name)
            self._events.emit(EventKind.VOLUME_FAILED, text, volume=volume.name)

    async def _accepts(self, volume: Volume, refusal: Refusal) -> bool:
        if not await in_own_thread(volume.probe, refusal):
            return False
        try:
            for log in self._logs.each():
                if log.volume is volume:
                    await asyncio.wrap_future(write_again(log))
        except StorageFailed:
            return False
        return True

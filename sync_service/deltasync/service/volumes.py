"""The volumes that the service writes to: which of them refuses writes, and when one takes them again."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

from deltasync.base.errors import StorageFailed
from deltasync.base.events import Event, EventKind, Events
from deltasync.log.log_store import Logs
from deltasync.log.records import write_again
from deltasync.log.volume import Refusal, Volume, VolumeFailed


class Volumes:
    """The volumes of logs, and that of checkpoints. In the event loop."""

    def __init__(self, logs: Logs, checkpoints: Path, events: Events) -> None:
        self._logs, self._events = logs, events
        self._checkpoints = Volume("checkpoints", checkpoints)
        self._told = set[str]()  # Names of volumes.

    @property
    def all(self) -> Sequence[Volume]:
        """The volumes there are."""
        return (*dict.fromkeys(log.volume for log in self._logs.each()), self._checkpoints)

    @property
    def trouble(self) -> str:
        """What is wrong with them, and what to do; empty if nothing is."""
        return "; ".join(filter(None, (volume.trouble for volume in self.all)))

    def hear(self, event: Event) -> None:
        """Note an event's error, if a volume has refused something."""
        self.note(event.error)

    def note(self, error: BaseException | None) -> None:
        """Note an error, if it is that a volume has refused something."""
        if isinstance(error, VolumeFailed):
            for volume in self.all:
                if volume.has_file(error.refusal.path):
                    volume.refuse(error.refusal)
                    self._tell(volume, error.refusal)

    async def look_after(self) -> None:
        """Tell what has changed, and try whether those that refuse writes take them again."""
        for volume in self.all:
            if refusal := volume.refusal:
                self._tell(volume, refusal)
                if await self._takes(volume, refusal):
                    volume.recover(refusal)
            if volume.refusal is None and volume.name in self._told:
                self._told.remove(volume.name)
                self._events.emit(EventKind.VOLUME_RECOVERED, "it takes what is written", volume=volume.name)

    def _tell(self, volume: Volume, refusal: Refusal) -> None:
        if volume.name not in self._told:
            self._told.add(volume.name)
            text = f"{refusal.path}: {refusal.in_words}"
            self._events.emit(EventKind.VOLUME_FAILED, text, volume=volume.name)

    async def _takes(self, volume: Volume, refusal: Refusal) -> bool:
        if not await asyncio.to_thread(volume.probe, refusal):
            return False
        try:
            for log in self._logs.each():
                if log.volume is volume:
                    await asyncio.wrap_future(write_again(log))
        except StorageFailed:
            return False
        return True

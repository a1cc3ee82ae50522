"""The views there are: one for every consumer that ever had a policy."""

import asyncio
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltasync.consumers.consumer import Consumer
from deltasync.core.errors import StorageFailed
from deltasync.feeds.model import Model
from deltasync.storage.log import Log
from deltasync.views.release_loop import ReleaseLoop
from deltasync.views.view import View

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Entry:
    """A view, and what keeps it moving."""

    view: View
    feeding: ReleaseLoop
    task: asyncio.Task[None]


class ViewRegistry:
    """Makes, feeds, flushes and removes views. Views are made and removed by one call at a time."""

    def __init__(self, log: Log, tasks: asyncio.TaskGroup) -> None:
        self._log = log
        self._tasks = tasks
        self._fed: dict[str, _Entry] = {}

    def get(self, consumer: Consumer) -> View | None:
        """The view of a consumer; None if it never had a policy, so that its replicas read the model's tables."""
        fed = self._fed.get(consumer.name)
        return fed.view if fed else None

    async def follow(self, consumer: Consumer, model: Model, directory: Path) -> None:
        """Have a view of a consumer, if it needs one; the one there was before a restart, if there was one.

        Raises:
            StorageFailed: a file is damaged or missing.
        """
        meta = self._log.meta(f"view/{consumer.name}").get("")
        if consumer.name in self._fed or (consumer.policy.sends_everything and meta is None):
            return
        view = await asyncio.to_thread(self._view, consumer.name, model, directory, meta)
        feeding = ReleaseLoop(consumer, view)
        self._fed[consumer.name] = _Entry(view, feeding, self._tasks.create_task(feeding.run()))
        model.signal.wake()  # Streams that read the model's own tables are to end.

    def _view(self, name: str, model: Model, directory: Path, meta: dict[str, Any] | None) -> View:
        """The view there was, or a new one: what replicas hold of one that cannot be read is not known."""
        if meta is not None:
            view = View(name, model, self._log, directory)
            try:
                view.recover(meta)
            except StorageFailed as error:
                logger.error("the view of consumer %s is begun anew, its replicas get everything: %s", name, error)
            else:
                return view
        view = View(name, model, self._log, directory)
        view.discard()  # What a crash may have left of another one, too.
        return view

    async def forget(self, name: str) -> None:
        """Remove the view of a consumer, if it has one."""
        if fed := self._fed.pop(name, None):
            await _stopped(fed)
            await asyncio.to_thread(fed.view.discard)

    async def flush(self, flush_bytes: int) -> None:
        """Flush the views of which the log holds so many bytes."""
        for name, fed in list(self._fed.items()):
            if fed.view.should_flush(flush_bytes):
                await self._flush(name, fed.view)

    async def drain(self) -> None:
        """Finish what is under way and put everything on disk."""
        for name, fed in self._fed.items():
            await _stopped(fed)
            await self._flush(name, fed.view)

    async def _flush(self, name: str, view: View) -> None:
        try:
            await asyncio.to_thread(view.flush)
        except StorageFailed as error:
            logger.error("the view of consumer %s is flushed again later: %s", name, error)


async def _stopped(fed: _Entry) -> None:
    fed.feeding.stop()
    await fed.task

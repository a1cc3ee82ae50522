"""The views there are: one for every consumer that ever had a policy."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deltasync.consumers.consumer import Consumer
from deltasync.core.errors import StorageFailed
from deltasync.core.events import EventKind, Events
from deltasync.feeds.model import Model
from deltasync.storage.data_directory import RESTORE
from deltasync.storage.log_store import LogUnavailable
from deltasync.storage.volume import VolumeFailed
from deltasync.views.records import recorded_view
from deltasync.views.release_loop import ReleaseLoop
from deltasync.views.view import View


@dataclass(frozen=True)
class _Entry:
    """A view, and the task that makes its releases."""

    view: View
    loop: ReleaseLoop
    task: asyncio.Task[None]


class ViewRegistry:
    """Makes, flushes and removes views, in the event loop. They are made and removed by one call at a time."""

    def __init__(self, tasks: asyncio.TaskGroup, events: Events) -> None:
        self._tasks = tasks
        self._events = events
        self._entries: dict[str, _Entry] = {}
        self._swept = dict[str, int]()  # By model, how often one of its views was.

    def get(self, consumer: Consumer) -> View | None:
        """The view of a consumer; None if it never had a policy, so that its replicas read the model's tables."""
        entry = self._entries.get(consumer.name)
        return entry.view if entry else None

    def spilled_bytes(self, model: Model) -> int:
        """Bytes of releases in files, of all views of a model."""
        return sum(each.view.spilled_bytes for each in self._entries.values() if each.view.model is model)

    async def follow(self, consumer: Consumer, model: Model, directory: Path) -> None:
        """Have a view of a consumer, if it needs one: the one there was before a restart, or else a new one.

        A consumer that is paused goes on without one it does not have: see `begin`.

        Raises:
            StorageFailed: the log, or a file, could not be written.
        """
        if consumer.name in self._entries:
            return
        record = recorded_view(model.log, consumer.name)
        if record is None and (consumer.pause or consumer.policy.sends_everything):
            return
        await self._add(consumer, model, directory, record)

    async def begin(self, consumer: Consumer, model: Model, directory: Path) -> None:
        """Have the view that a consumer lacks which got its first policy while it was paused.

        Raises:
            StorageFailed: the log could not be written.
        """
        if consumer.name not in self._entries and not consumer.policy.sends_everything:
            await self._add(consumer, model, directory, None)

    async def _add(
        self, consumer: Consumer, model: Model, directory: Path, record: Mapping[str, Any] | None
    ) -> None:
        view = await self._view(consumer.name, model, directory, record)
        loop = ReleaseLoop(consumer, view, self._events)
        self._entries[consumer.name] = _Entry(view, loop, self._tasks.create_task(loop.run()))
        model.signal.wake()  # Streams that read the model's own tables are to end.

    async def _view(self, name: str, model: Model, directory: Path, record: Mapping[str, Any] | None) -> View:
        """The view there was, or a new one."""
        if record is not None:
            view = View(name, model, directory)
            try:
                await asyncio.to_thread(view.recover, record)
            except (LogUnavailable, VolumeFailed):  # What there is of it is as it was.
                raise
            except StorageFailed as error:
                # What replicas hold is not known any more.
                text = "its view cannot be read, so its replicas get every row, and nothing has to be restored"
                reason = str(error).removesuffix(f": {RESTORE}")
                self._events.emit(EventKind.FAILED, f"{text}: {reason}", consumer=name)
            else:
                return view
        view = View(name, model, directory)
        await asyncio.to_thread(view.discard)  # Removes what an earlier one has left.
        return view

    def by_consumer(self) -> dict[str, View]:
        """All views."""
        return {name: entry.view for name, entry in self._entries.items()}

    async def forget(self, name: str) -> None:
        """Remove the view of a consumer, if it has one."""
        if entry := self._entries.pop(name, None):
            await _stop(entry)
            await asyncio.to_thread(entry.view.discard)

    async def give_up(self, model: Model) -> None:
        """Have the views of a model no more, which stay written down."""
        for name, entry in list(self._entries.items()):
            if entry.view.model is model:
                del self._entries[name]
                await _stop(entry)

    async def look_after_rows(self, model: Model) -> None:
        """Look for damaged rows of one view of a model after another, and mend what there is of all."""
        views = [(name, each.view) for name, each in self._entries.items() if each.view.model is model]
        turn = self._swept[model.name] = self._swept.get(model.name, -1) + 1
        for number, (name, view) in enumerate(views):
            await view.damage.look_after(self._events, sweep=number == turn % len(views), consumer=name)

    async def flush(self, flush_bytes: int) -> None:
        """Flush the views of which the log holds so many bytes."""
        for name, entry in list(self._entries.items()):
            if entry.view.should_flush(flush_bytes):
                await self._flush(name, entry.view)

    async def drain(self) -> None:
        """Finish what is under way and put everything on disk."""
        for name, entry in self._entries.items():
            await _stop(entry)
            await self._flush(name, entry.view)

    async def _flush(self, name: str, view: View) -> None:
        try:
            if await asyncio.to_thread(view.flush):
                self._events.emit(EventKind.FLUSHED, consumer=name)
        except Exception as error:  # noqa: BLE001  # one consumer's trouble is its own
            self._events.emit(EventKind.FAILED, "its view is flushed again later", error, consumer=name)


async def _stop(entry: _Entry) -> None:
    entry.loop.stop()
    await entry.task

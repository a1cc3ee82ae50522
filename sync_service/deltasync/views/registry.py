"""The views there are: one for every consumer that ever had a policy."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from deltasync.consumers.consumer import Consumer
from deltasync.core.errors import StorageFailed
from deltasync.core.events import EventKind, Events
from deltasync.feeds.model import Model
from deltasync.storage.data_directory import RESTORE
from deltasync.storage.log_store import LogUnavailable
from deltasync.storage.volume import VolumeFailed
from deltasync.views.log import ViewLog
from deltasync.views.release_loop import ReleaseLoop
from deltasync.views.view import View


@dataclass(frozen=True)
class _Entry:
    """A view, and the task that makes its releases."""

    view: View
    loop: ReleaseLoop
    task: asyncio.Task[None]


class ViewRegistry:
    """Makes and removes views, in the event loop. They are made and removed by one call at a time."""

    def __init__(self, tasks: asyncio.TaskGroup, events: Events) -> None:
        self._tasks = tasks
        self._events = events
        self._entries: dict[str, _Entry] = {}
        self._recovering: dict[str, View] = {}

    def get(self, consumer: Consumer) -> View | None:
        """The view of a consumer; None if it never had a policy, so that its replicas read the model's tables."""
        entry = self._entries.get(consumer.name)
        return entry.view if entry else None

    def by_consumer(self) -> dict[str, View]:
        """All views."""
        return {name: entry.view for name, entry in self._entries.items()}

    def of_model(self, model: Model) -> list[View]:
        """The views of a model, for its checkpoints. Any thread."""
        return [entry.view for entry in list(self._entries.values()) if entry.view.model is model]

    async def derived(self, model: Model, consumers: Sequence[Consumer]) -> list[View]:
        """The views that a model's consumers have in the log, to be recovered with it: `follow` then goes on.

        Raises:
            StorageFailed: the log cannot be read now.
        """
        views = list[View]()
        for consumer in consumers:
            try:
                record = await asyncio.to_thread(ViewLog(model.log, consumer.name).view)
            except (LogUnavailable, VolumeFailed):
                raise
            except StorageFailed as error:
                self._tell_lost(consumer, str(error))
                await asyncio.to_thread(ViewLog(model.log, consumer.name).discard)
                continue
            if record is not None:
                views.append(View(consumer.name, model, record))
        self._recovering |= {view.owner: view for view in views}
        return views

    async def follow(self, consumer: Consumer, model: Model) -> None:
        """Have a view of a consumer, if it needs one: the one that was recovered with the model, or a new one.

        A consumer that is paused goes on without one it does not have: see `begin`.

        Raises:
            StorageFailed: the log could not be read, or not be written.
        """
        if (entry := self._entries.get(consumer.name)) and entry.view.model is model:
            return
        view = self._recovering.get(consumer.name)
        if view and view.model is model:
            if lost := await view.recovered():
                self._tell_lost(consumer, lost)
                await self._add(consumer, await self._new(consumer, model))
            else:
                await self._add(consumer, view)
        elif not (consumer.pause or consumer.policy.sends_everything):
            await self._add(consumer, await self._new(consumer, model))
        self._recovering.pop(consumer.name, None)

    async def begin(self, consumer: Consumer, model: Model) -> None:
        """Have the view that a consumer lacks which got its first policy while it was paused.

        Raises:
            StorageFailed: the log could not be written.
        """
        if consumer.name not in self._entries and not consumer.policy.sends_everything:
            await self._add(consumer, await self._new(consumer, model))

    async def _new(self, consumer: Consumer, model: Model) -> View:
        view = View(consumer.name, model)
        await asyncio.to_thread(view.discard)  # Removes what an earlier one has left.
        return view

    async def _add(self, consumer: Consumer, view: View) -> None:
        loop = ReleaseLoop(consumer, view, self._events)
        self._entries[consumer.name] = _Entry(view, loop, self._tasks.create_task(loop.run()))
        view.model.signal.wake()  # Streams that read the model's own tables are to end.

    def _tell_lost(self, consumer: Consumer, why: str) -> None:
        text = "its view cannot be made again, so its replicas get every row, and nothing has to be restored"
        reason = why.removesuffix(f": {RESTORE}")
        self._events.emit(EventKind.FAILED, f"{text}: {reason}", consumer=consumer.name)

    async def forget(self, name: str) -> None:
        """Remove the view of a consumer, if it has one."""
        if entry := self._entries.pop(name, None):
            await _stop(entry)
            await asyncio.to_thread(entry.view.discard)

    async def give_up(self, model: Model) -> None:
        """Have the views of a model no more, which stay written down."""
        self._recovering = {name: view for name, view in self._recovering.items() if view.model is not model}
        for name, entry in list(self._entries.items()):
            if entry.view.model is model:
                del self._entries[name]
                await _stop(entry)

    async def drain(self) -> None:
        """Finish the releases that are under way, and make no others."""
        for entry in self._entries.values():
            await _stop(entry)


async def _stop(entry: _Entry) -> None:
    entry.loop.stop()
    await entry.task

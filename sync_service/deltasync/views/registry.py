"""The views of all consumers with a policy, and the tasks that make their releases when due."""

import asyncio
from collections.abc import Sequence

from deltasync.base.errors import StorageFailed
from deltasync.base.events import EventKind, Events
from deltasync.base.threads import in_own_thread
from deltasync.consumers.consumer import Consumer
from deltasync.log.data_directory import RESTORE
from deltasync.log.log_store import LogUnavailable
from deltasync.log.volume import VolumeFailed
from deltasync.model.model import Model
from deltasync.model.recovery import ViewRecovery
from deltasync.views.decision import RELEASE_OPTIONS, ReleaseOptions
from deltasync.views.log import ViewLog
from deltasync.views.view import ReleaseLoop, View


class ViewRegistry:
    """Makes and removes views, in the event loop, one call at a time."""

    def __init__(
        self, tasks: asyncio.TaskGroup, events: Events, options: ReleaseOptions = RELEASE_OPTIONS
    ) -> None:
        self._tasks, self._events, self._options = tasks, events, options
        self._loops, self._recovering = dict[str, ReleaseLoop](), dict[str, View]()

    def get(self, consumer: Consumer) -> View | None:
        """The view of a consumer; None if it never had a policy, so its replicas read the model's tables."""
        loop = self._loops.get(consumer.name)
        return loop.view if loop else None

    def of_model(self, model: Model) -> list[View]:
        """The views of a model, for its checkpoints. Safe to call from any thread."""
        return [loop.view for loop in list(self._loops.values()) if loop.view.model is model]

    async def replays(self, model: Model, consumers: Sequence[Consumer]) -> list[ViewRecovery]:
        """Read the views of consumers from the log, to recover them with their model; then call `follow`."""
        views = list[View]()
        for consumer in consumers:
            try:
                record = await in_own_thread(ViewLog(model.log, consumer.name).view)
            except (LogUnavailable, VolumeFailed):
                raise
            except StorageFailed as error:
                self._report_lost(consumer, str(error))
                await in_own_thread(ViewLog(model.log, consumer.name).discard)
                continue
            if record is not None:
                views.append(View(consumer.name, model, record, self._options))
        self._recovering |= {view.owner: view for view in views}
        return [view.replay for view in views if view.replay]

    async def follow(self, consumer: Consumer, model: Model, *, resumes: bool = False) -> None:
        """Add the view that a consumer needs: its recovered one, or a new one, but none while it is paused."""
        if (present := self.get(consumer)) and present.model is model:
            return
        view = self._recovering.get(consumer.name)
        if view and view.model is model:
            if lost := await view.recover():
                self._report_lost(consumer, lost)
                await self._add(consumer, await self._new(consumer, model))
            else:
                await self._add(consumer, view)
        elif consumer.follows or ((resumes or not consumer.pause) and not consumer.policy.sends_everything):
            await self._add(consumer, await self._new(consumer, model))
        self._recovering.pop(consumer.name, None)

    async def _new(self, consumer: Consumer, model: Model) -> View:
        await in_own_thread(ViewLog(model.log, consumer.name).discard)  # Remove records of an earlier view.
        return View(consumer.name, model, options=self._options)

    async def _add(self, consumer: Consumer, view: View) -> None:
        view.follow(consumer.follows)
        loop = self._loops[consumer.name] = ReleaseLoop(consumer, view, self._events)
        loop.begin(self._tasks)
        view.model.signal.wake()  # This ends streams that read the model's own tables.

    def _report_lost(self, consumer: Consumer, why: str) -> None:
        text = "its view cannot be rebuilt; its replicas get every row, and no restore is necessary"
        reason = why.removesuffix(f": {RESTORE}")
        self._events.emit(EventKind.FAILED, f"{text}: {reason}", consumer=consumer.name)

    async def forget(self, name: str) -> None:
        """Remove the view of a consumer, if it has one."""
        if loop := self._loops.pop(name, None):
            await loop.end()
            await in_own_thread(ViewLog(loop.view.model.log, name).discard)

    async def give_up(self, model: Model) -> None:
        """Stop the views of a model. The log keeps their records."""
        self._recovering = {name: view for name, view in self._recovering.items() if view.model is not model}
        for name, loop in list(self._loops.items()):
            if loop.view.model is model:
                del self._loops[name]
                await loop.end()

    async def drain(self) -> None:
        """Finish the releases under way, and make no others."""
        for loop in list(self._loops.values()):  # Meanwhile consumers may be deleted or models given up.
            await loop.end()

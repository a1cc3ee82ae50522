"""The views of all consumers with a policy, and the tasks that make their releases when they are due."""

import asyncio
import logging
import time
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from deltasync.base.clock import Moment, steady_ns
from deltasync.base.errors import InvalidInput, StorageFailed
from deltasync.base.events import EventKind, Events, error_text
from deltasync.base.waiting import backoff, first_of
from deltasync.consumers.consumer import Consumer
from deltasync.core.policy import Policy
from deltasync.log.data_directory import RESTORE
from deltasync.log.log_store import LogUnavailable
from deltasync.log.volume import VolumeFailed
from deltasync.model.model import Model
from deltasync.model.recovery import ViewRecovery
from deltasync.views.log import ViewLog
from deltasync.views.pacing import PACE_VERSIONS, Situation, due
from deltasync.views.view import View

logger = logging.getLogger(__name__)

# Before all tables of a view are made again.
_PREPARE_AGAIN_SECONDS = 10.0


class ReleaseLoop:
    """Makes the releases of one consumer, in the event loop, until it is stopped."""

    def __init__(self, consumer: Consumer, view: View, events: Events) -> None:
        self._consumer = consumer
        self._view = view
        self._events = events
        self._pauses = backoff()
        self._stopping, self._began_ns = asyncio.Event(), steady_ns()
        self._prepare_at = 0.0
        self._refused: Policy | None = None  # The policy whose tables could not be made.

    def stop(self) -> None:
        """End `run` once what is under way is done."""
        self._stopping.set()

    async def run(self) -> None:
        """Make releases. What goes wrong is told and tried again: one consumer's trouble is its own."""
        while not self._stopping.is_set():
            try:
                seconds = await self._advance()
            except Exception as error:  # noqa: BLE001  # it must not end the service
                text = "its releases cannot be made, which is tried again"
                self._view.failure = f"{text}: {error_text(error)}"
                self._emit(EventKind.FAILED, text, error)
                # Not cut short by what is new: an error at every cut would fill the service's log.
                await first_of(self._stopping.wait(), seconds=next(self._pauses))
                continue
            else:
                self._pauses, self._view.failure = backoff(), ""
            if seconds != 0:
                await self._wait(seconds)

    async def _advance(self) -> float | None:
        """Do what is due. In how many seconds to look again; None = once something changes."""
        self._view.let_go_removed()
        if not self._goes_on() or not self._connected():
            return None
        before = self._view.position
        await self._prepare()
        decision = due(self._consumer.policy, self._situation(), steady_ns())
        if decision.seconds == 0:
            logger.debug("consumer %s: a release is due: %s", self._consumer.name, decision.reason)
            # A pause may come meanwhile, for a version that is then the newest: nobody is to be sent its rows.
            await self._view.make_release(self._consumer.policy, self._overdue_version(), self._goes_on)
        if self._view.position != before:
            self._emit(EventKind.RELEASE_MADE, number=self._view.position.number)
        if self._view.trouble:
            return min(decision.seconds or _PREPARE_AGAIN_SECONDS, _PREPARE_AGAIN_SECONDS)
        return decision.seconds

    async def _prepare(self) -> None:
        """Have the tables that the policy wants. If they cannot be made, go on with the old ones for now."""
        if time.monotonic() < self._prepare_at and self._consumer.policy == self._refused:
            return
        try:
            await self._view.prepare(self._consumer.policy, self._overdue_version(), self._goes_on)
        except (InvalidInput, StorageFailed) as error:
            if not self._view.trouble:  # The log has refused a release.
                raise
            self._refused, self._prepare_at = self._consumer.policy, time.monotonic() + _PREPARE_AGAIN_SECONDS
            self._emit(EventKind.FAILED, "its policy is not in force", error)

    def _emit(self, kind: EventKind, text: str = "", error: Exception | None = None, **subject: object) -> None:
        self._events.emit(kind, text, error, consumer=self._consumer.name, **subject)

    def _goes_on(self) -> bool:
        """Whether it is not paused. Any thread."""
        return self._consumer.pause is None

    def _connected(self) -> bool:
        return any(replica.stream for replica in self._consumer.replicas.values())

    def _situation(self) -> Situation:
        state, seals, position = self._view.state, self._view.model.seals, self._view.position
        oldest, recent = state.oldest_dirty_version, islice(reversed(seals), PACE_VERSIONS)
        replicas, released = self._consumer.replicas.values(), self._view.released
        return Situation(
            newest_version=self._view.model.position.number,
            compared_version=state.compared_version,
            backlog_rows=state.backlog_rows,
            oldest_dirty_ns=self._sealed_ns(oldest) if oldest else 0,
            released_ns=_steady_ns(released) if released else None,
            sealed_ns=[self._sealed_ns(seal.version) for seal in recent][::-1],
            ready=state.newest is not None and any(r.stream and r.applied == position for r in replicas),
        )

    def _overdue_version(self) -> int:
        """The newest version that is older than the policy's maximum age."""
        age = self._consumer.policy.max_age_seconds
        if age is None:
            return 0
        limit = steady_ns() - int(age * 1e9)
        seals = self._view.model.seals
        older = bisect_right(seals, limit, key=lambda seal: self._sealed_ns(seal.version))
        return seals[older - 1].version if older else 0

    def _sealed_ns(self, version: int) -> int:
        """When a version was sealed, by `steady_ns`; one that was there when this began, not later than that."""
        moment = self._view.model.sealed_at(version)
        return _steady_ns(moment) if moment.steady_ns is not None else min(self._began_ns, _steady_ns(moment))

    async def _wait(self, seconds: float | None) -> None:
        events = (self._consumer.signal.changed(), self._view.model.changed(), self._stopping.wait())
        await first_of(*events, seconds=seconds)


def _steady_ns(moment: Moment) -> int:
    """A time by `steady_ns`; where only the wall clock knows it, as that says now."""
    now = Moment.now()
    return steady_ns() - now.after_ns(moment)


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

    async def derived(self, model: Model, consumers: Sequence[Consumer]) -> list[ViewRecovery]:
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
        return [view.replay for view in views if view.replay]

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

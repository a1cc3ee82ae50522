"""The views of all consumers with a policy, and the tasks that make their releases when due."""

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
from deltasync.base.threads import in_own_thread
from deltasync.base.waiting import backoff, first_of
from deltasync.consumers.consumer import Consumer
from deltasync.consumers.follow import Follow
from deltasync.core.policy import Policy
from deltasync.log.data_directory import RESTORE
from deltasync.log.log_store import LogUnavailable
from deltasync.log.volume import VolumeFailed
from deltasync.model.model import Model
from deltasync.model.recovery import ViewRecovery
from deltasync.views.decision import PACE_VERSIONS, Action, Situation, next_action
from deltasync.views.log import ViewLog
from deltasync.views.view import View

logger = logging.getLogger(__name__)

# Pause before the next attempt to make all tables of a view.
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
        self._refused: Policy | None = None  # A policy whose tables could not be made.

    def stop(self) -> None:
        """End `run` after its present step."""
        self._stopping.set()

    async def run(self) -> None:
        """Make releases. Report errors and retry, without affecting other consumers."""
        while not self._stopping.is_set():
            try:
                seconds = await self._advance()
            except Exception as error:  # noqa: BLE001  # it must not end the service
                text = "its releases cannot be made; the service retries"
                self._view.failure = f"{text}: {error_text(error)}"
                self._emit(EventKind.FAILED, text, error)
                # New versions do not shorten this pause: an error at every cut would fill the service's log.
                await first_of(self._stopping.wait(), seconds=next(self._pauses))
                continue
            else:
                self._pauses, self._view.failure = backoff(), ""
            if seconds != 0:
                await self._wait(seconds)

    async def _advance(self) -> float | None:
        """Do what is due. Return the seconds until the next look; None = wait for a change."""
        view, policy = self._view, self._consumer.policy
        view.let_go_removed()
        following, before = view.follows, view.position
        now = next_action(policy, self._situation(policy), steady_ns())
        if now.action is Action.WAIT:
            return now.seconds
        logger.debug("consumer %s: %s: %s", self._consumer.name, now.action.value, now.reason)
        # The consumer may be paused before the newest version is read, and no replica may get its rows then.
        match now.action:
            case Action.WRITE:
                await view.write_refused()
            case Action.FOLLOW if following:
                await view.go_to(following, policy, lambda: self._goes_on_to(following))
            case Action.TABLES:
                await self._prepare(policy)
            case Action.ROWS:
                await view.make_release(policy, self._overdue_version(policy), self._goes_on)
        if view.position != before:
            self._emit(EventKind.RELEASE_MADE, number=view.position.number)
        return 0

    async def _prepare(self, policy: Policy) -> None:
        """Make the tables of the policy. If that fails, keep the old ones for now."""
        try:
            await self._view.prepare(policy, self._overdue_version(policy), self._goes_on)
        except (InvalidInput, StorageFailed) as error:
            if not self._view.trouble:  # The log refused a release.
                raise
            self._refused, self._prepare_at = policy, time.monotonic() + _PREPARE_AGAIN_SECONDS
            self._emit(EventKind.FAILED, "its policy is not in force", error)

    def _emit(self, kind: EventKind, text: str = "", error: Exception | None = None, **subject: object) -> None:
        self._events.emit(kind, text, error, consumer=self._consumer.name, **subject)

    def _goes_on(self) -> bool:
        """Whether the consumer is not paused. Safe to call from any thread."""
        return self._consumer.pause is None

    def _goes_on_to(self, follows: Follow) -> bool:
        return self._goes_on() and self._view.follows is follows and not self._stopping.is_set()

    def _situation(self, policy: Policy) -> Situation:
        view, model = self._view, self._view.model
        state, position, replicas = view.state, view.position, self._consumer.replicas.values()
        oldest, recent = state.oldest_dirty_version, islice(reversed(model.seals), PACE_VERSIONS)
        again = self._prepare_at - time.monotonic() if policy == self._refused else 0.0
        return Situation(
            newest_version=model.position.number,
            # After a kept version, a release is due even if no row differs: replicas still have its name.
            compared_version=0 if state.kept else state.compared_version,
            backlog_rows=state.backlog_rows,
            oldest_dirty_ns=self._sealed_ns(oldest) if oldest else 0,
            released_ns=_steady_ns(view.released) if view.released else None,
            sealed_ns=[self._sealed_ns(seal.version) for seal in recent][::-1],
            ready=state.newest is not None and any(r.stream and r.applied == position for r in replicas),
            paused=not self._goes_on(),
            connected=any(replica.stream for replica in replicas),
            refused=view.refused,
            follows=view.follows.kept.words if view.follows else "",
            arrived=view.arrived(policy),
            fits=not view.trouble and (view.fits(policy) or model.head is None),
            tables_after_seconds=again,
        )

    def _overdue_version(self, policy: Policy) -> int:
        """The newest version older than the policy's maximum age."""
        if policy.max_age_seconds is None:
            return 0
        limit, seals = steady_ns() - int(policy.max_age_seconds * 1e9), self._view.model.seals
        older = bisect_right(seals, limit, key=lambda seal: self._sealed_ns(seal.version))
        return seals[older - 1].version if older else 0

    def _sealed_ns(self, version: int) -> int:
        """When a version was sealed, by `steady_ns`.

        If the time is known only by the wall clock, the version counts as sealed before this loop began.
        """
        moment = self._view.model.seals.sealed_at(version)
        return _steady_ns(moment) if moment.steady_ns is not None else min(self._began_ns, _steady_ns(moment))

    async def _wait(self, seconds: float | None) -> None:
        events = (self._consumer.signal.changed(), self._view.model.changed(), self._stopping.wait())
        await first_of(*events, seconds=seconds)


def _steady_ns(moment: Moment) -> int:
    """A time by `steady_ns`, converted from the wall clock if only that is known."""
    now = Moment.now()
    return steady_ns() - now.after_ns(moment)


@dataclass(frozen=True)
class _Entry:
    """A view, and the task that makes its releases."""

    view: View
    loop: ReleaseLoop
    task: asyncio.Task[None]


class ViewRegistry:
    """Makes and removes views, in the event loop, one call at a time."""

    def __init__(self, tasks: asyncio.TaskGroup, events: Events) -> None:
        self._tasks = tasks
        self._events = events
        self._entries: dict[str, _Entry] = {}
        self._recovering: dict[str, View] = {}

    def get(self, consumer: Consumer) -> View | None:
        """The view of a consumer; None if it never had a policy, so its replicas read the model's tables."""
        entry = self._entries.get(consumer.name)
        return entry.view if entry else None

    def of_model(self, model: Model) -> list[View]:
        """The views of a model, for its checkpoints. Safe to call from any thread."""
        return [entry.view for entry in list(self._entries.values()) if entry.view.model is model]

    async def replays(self, model: Model, consumers: Sequence[Consumer]) -> list[ViewRecovery]:
        """Read the views of a model's consumers from the log, to recover them with the model, then call `follow`.

        Raises:
            StorageFailed: the log cannot be read at present.
        """
        views = list[View]()
        for consumer in consumers:
            try:
                record = await in_own_thread(ViewLog(model.log, consumer.name).view)
            except (LogUnavailable, VolumeFailed):
                raise
            except StorageFailed as error:
                self._tell_lost(consumer, str(error))
                await in_own_thread(ViewLog(model.log, consumer.name).discard)
                continue
            if record is not None:
                views.append(View(consumer.name, model, record))
        self._recovering |= {view.owner: view for view in views}
        return [view.replay for view in views if view.replay]

    async def follow(self, consumer: Consumer, model: Model) -> None:
        """Add the view that a consumer needs: its recovered one, or a new one.

        A paused consumer without a view gets none until `begin`.

        Raises:
            StorageFailed: the log could not be read or written.
        """
        if (entry := self._entries.get(consumer.name)) and entry.view.model is model:
            return
        view = self._recovering.get(consumer.name)
        if view and view.model is model:
            if lost := await view.recover():
                self._tell_lost(consumer, lost)
                await self._add(consumer, await self._new(consumer, model))
            else:
                await self._add(consumer, view)
        elif consumer.follows or not (consumer.pause or consumer.policy.sends_everything):
            await self._add(consumer, await self._new(consumer, model))
        self._recovering.pop(consumer.name, None)

    async def begin(self, consumer: Consumer, model: Model) -> None:
        """Make the view of a consumer that got its first policy while it was paused.

        Raises:
            StorageFailed: the log could not be written.
        """
        if consumer.name not in self._entries and not consumer.policy.sends_everything:
            await self._add(consumer, await self._new(consumer, model))

    async def _new(self, consumer: Consumer, model: Model) -> View:
        await in_own_thread(ViewLog(model.log, consumer.name).discard)  # Remove records of an earlier view.
        return View(consumer.name, model)

    async def _add(self, consumer: Consumer, view: View) -> None:
        view.follow(consumer.follows)
        loop = ReleaseLoop(consumer, view, self._events)
        self._entries[consumer.name] = _Entry(view, loop, self._tasks.create_task(loop.run()))
        view.model.signal.wake()  # This ends streams that read the model's own tables.

    def _tell_lost(self, consumer: Consumer, why: str) -> None:
        text = "its view cannot be rebuilt; its replicas get every row, and no restore is necessary"
        reason = why.removesuffix(f": {RESTORE}")
        self._events.emit(EventKind.FAILED, f"{text}: {reason}", consumer=consumer.name)

    async def forget(self, name: str) -> None:
        """Remove the view of a consumer, if it has one."""
        if entry := self._entries.pop(name, None):
            await _stop(entry)
            await in_own_thread(ViewLog(entry.view.model.log, name).discard)

    async def give_up(self, model: Model) -> None:
        """Stop the views of a model. The log keeps their records."""
        self._recovering = {name: view for name, view in self._recovering.items() if view.model is not model}
        for name, entry in list(self._entries.items()):
            if entry.view.model is model:
                del self._entries[name]
                await _stop(entry)

    async def drain(self) -> None:
        """Finish the releases under way, and make no others."""
        for entry in list(self._entries.values()):  # Meanwhile consumers may be deleted or models given up.
            await _stop(entry)


async def _stop(entry: _Entry) -> None:
    entry.loop.stop()
    await entry.task

"""Making the releases of a consumer's view as they become due."""

import asyncio
import logging
import time
from bisect import bisect_right
from itertools import islice

from deltasync.consumers.consumer import Consumer
from deltasync.core.backoff import backoff
from deltasync.core.errors import InvalidInput, StorageFailed
from deltasync.core.events import EventKind, Events, described
from deltasync.core.policy import Policy
from deltasync.core.signals import first_of
from deltasync.core.steady_clock import Moment, steady_ns
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
                self._view.failure = f"{text}: {described(error)}"
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

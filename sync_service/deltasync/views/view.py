"""A consumer's view: the feed of its replicas, and the loop that makes its releases."""

import asyncio
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any

from deltasync.base.clock import Moment, steady_ns
from deltasync.base.decision import Decision
from deltasync.base.errors import InvalidInput, StorageFailed
from deltasync.base.events import EventKind, Events, error_text
from deltasync.base.threads import EVENT_LOOP, confined, in_own_thread
from deltasync.base.waiting import Signal, backoff, first_of
from deltasync.checkpoints.writing import SourceTable
from deltasync.consumers.consumer import Consumer
from deltasync.consumers.follow import Follow, check_past
from deltasync.core.policy import Policy
from deltasync.core.position import NOWHERE, Position, can_continue, is_discarded, line_of
from deltasync.core.seal import SealHistory
from deltasync.core.stamped_table import StampedTable
from deltasync.core.table_form import TableForm
from deltasync.model.feed import FeedStatus, TableStatus
from deltasync.model.model import Model
from deltasync.model.releases import NO_TABLES, FrozenRelease, Head, Release, Releases
from deltasync.views.decision import (
    PACE_VERSIONS,
    RELEASE_OPTIONS,
    Action,
    ReleaseOptions,
    Situation,
    next_action,
)
from deltasync.views.log import ViewLog, ViewState
from deltasync.views.release_maker import GoesOn, ReleaseMaker, ReleasePlan
from deltasync.views.replay import Replay, sources
from deltasync.views.table import ViewTable


@confined(trouble=EVENT_LOOP, failure=EVENT_LOOP)
class View:
    """The feed of one consumer's replicas. The package's docstring lists which thread may use what.

    Attributes:
        owner: the consumer.
        model: the source of its rows.
        options: how it makes releases.
        maker: makes them.
        seals: the seals of the versions that replicas may get.
        trouble: why it does not have the tables of the policy; empty if it does.
        replay: rebuilds the view with its model; None after that, and for a new view.
        failure: the error that prevents releases and is being retried; empty if there is none.
        follows: the kept version that replicas are to hold; None = the model's newest version.
    """

    def __init__(
        self,
        consumer: str,
        model: Model,
        record: Mapping[str, Any] | None = None,
        options: ReleaseOptions = RELEASE_OPTIONS,
    ) -> None:
        """Make a new view, or one from its record in the log; `Model.recover` then rebuilds it with `replay`."""
        self.owner, self.model, self.options, self.seals = consumer, model, options, model.seals
        self.trouble = self.failure = ""
        self._record = record
        self._log = ViewLog(model.log, consumer)
        history = record["history"] if record else uuid.uuid4().hex
        self._releases = Releases(
            model.on_thread, self._visible, model.release_memory_bytes, model.releases.block_bytes
        )
        self.maker = ReleaseMaker(consumer, model, self._log, history, self._releases, self._changed, options)
        self.replay = Replay(consumer, model, self._log, history, options) if record else None
        self._signal = Signal()
        self.follows: Follow | None = None

    def follow(self, follows: Follow | None) -> None:
        """Set what replicas are to hold. They get nothing until a release has brought the view there."""
        self.follows = follows
        self.seals = SealHistory([follows.kept.seal]) if follows else self.model.seals
        self._releases.forget()
        self._signal.wake()

    def arrived(self, policy: Policy) -> bool:
        """Whether the view holds the kept version that it follows, in the policy's form."""
        state, follows = self.state, self.follows
        return bool(follows and state.kept == follows.kept.id and state.record["policy"] == policy.as_dict())

    @property
    def state(self) -> ViewState:
        """The present state. The returned object never changes; a later state replaces it."""
        return self.maker.state

    # The interface `Feed`, which models also implement.

    @property
    def history(self) -> str:
        """See `Feed`."""
        return self.maker.history.id

    @property
    def model_history(self) -> str:
        """The id of the history of the view's model."""
        return self.model.history

    @property
    def tables(self) -> list[StampedTable]:
        """The tables for replicas, by slot. Empty until something is published."""
        return [table.sent for table in self.state.tables]

    @property
    def forms(self) -> list[TableForm]:
        """The form in which replicas get each table, by slot."""
        return [table.form for table in self.state.tables]

    @property
    def position(self) -> Position:
        """The position of a replica that has every release."""
        head = self.state.head
        return Position(self.history, head.number, head.seal) if head else Position(self.history)

    def release(self, after: int, whole: frozenset[int] = NO_TABLES) -> "asyncio.Future[Release]":
        """See `Feed`."""
        return self._releases.get(after, whole, self.position.number)

    def changed(self) -> asyncio.Future[None]:
        """Wait for a change of head, tables or trouble after this call."""
        return self._signal.changed()

    def continue_from(self, held: Position, acknowledged: Position = NOWHERE) -> tuple[Decision, Position]:
        """See `Feed`."""
        number, first = held.number, self.maker.history.first_version
        seal, of_model = self.seal_of(number), self.model.seal_of(number)
        # Numbers up to the first version are versions of the model, later ones are releases.
        before = can_continue(held, self.model.history, first, of_model, acknowledged=acknowledged)
        if before.yes and number <= first:
            decision = Decision(True, f"the replica holds version {number}, from before the policy")
            return decision, Position(self.history, number, seal)
        newest = self.position.number
        decision = can_continue(held, self.history, newest, seal, unit="release", acknowledged=acknowledged)
        return decision, Position(self.history, number, held.seal) if decision.yes else Position(self.history)

    def discards(self, held: Position, version: Position) -> bool:
        """Whether a replica holds rows of a discarded history, of the view or of the model."""
        ours = line_of(held.history) == line_of(self.history)
        if ours and is_discarded(held, self.history, self.position.number, self.seal_of(held.number)):
            return True
        return self.model.discards(held, version)

    def seal_of(self, number: int) -> int:
        """The checksum of a release's seal; 0 if unknown."""
        return self.maker.history.seal_of(number)

    def version_of(self, number: int) -> int:
        """The version of the rows that a replica at `number` holds, as far as known."""
        return self._version_at(self.state, number)

    def head_of(self, number: int) -> Head | None:
        """The release with a number, or the version from before the first one; None if unknown."""
        return self.maker.history.heads.get(number) or self.model.head_of(self.version_of(number))

    def behind_ns(self, number: int, policy: Policy) -> int:
        """See `Feed`. The time begins when the next release was made, or when one became due for a newer version
        or the backlog: none is made while no replica is connected.
        """
        now_ns, succession = steady_ns(), self.maker.history.succession
        if self.follows:
            since_ns = Moment.now().after_ns(Moment(self.follows.since_unix_ns))
            return succession.behind_ns(number, now_ns) if self.arrived(policy) else max(1, since_ns)
        later_release_ns, age_ns = succession.behind_ns(number, now_ns), succession.age_ns(number, now_ns)
        later_version_ns = self.model.behind_ns(self.version_of(number), policy)
        due_ns = min(later_version_ns, _beyond(policy.min_interval_seconds, age_ns))
        if number == self.position.number and self.state.backlog_rows:
            due_ns = max(due_ns, _beyond(max(policy.min_interval_seconds, self.options.longest_seconds), age_ns))
        return max(later_release_ns, due_ns)

    @property
    def released(self) -> Moment | None:
        """When the newest release was made; None before the first one."""
        if (newest := self.state.statistics) is None:
            return None
        return Moment(newest.made_unix_ns, self.maker.history.succession.since_ns(newest.number))

    def _version_at(self, state: ViewState, number: int) -> int:
        if state.head and number == state.head.number:
            # Nothing that changed since then matters to replicas.
            return max(state.compared_version, state.head.version)
        return self.maker.history.version_of(number)

    def may_serve(self, policy: Policy) -> bool:
        """Whether the tables fit the policy, or have its mode and cannot be replaced by tables that fit."""
        if not self.tables:
            return False
        return self.fits(policy) or (bool(self.trouble) and all(each.mode is policy.mode for each in self.forms))

    def fits(self, policy: Policy) -> bool:
        """Whether it has the tables of the policy, in the policy's form."""
        return self.arrived(policy) if self.follows else self._has_form(policy)

    def _has_form(self, policy: Policy) -> bool:
        if self.state.has_removed:
            return False
        return self.forms == [policy.form_of(table.spec) for table in self.model.tables.followed(policy)]

    def status(self, policy: Policy) -> FeedStatus:
        """See `Feed`. Before the first release, which waits for a replica, it is the model's position."""
        state, of_model, follows = self.state, self.model.status(policy), self.follows
        status = replace(
            of_model,
            history=self.history,
            newest_release=state.head.number if state.head else 0,
            trouble=self.trouble,
            failure=self.failure or of_model.failure,
        )
        if state.head or follows:
            status = replace(
                status,
                tables=partial(_tables, state, self.model, policy),
                version_of=partial(self._version_at, state),
                seal_of=self.maker.history.seal_of,
                release=state.statistics,
                released=self.released,
                compared=state.compared_version == self.model.position.number,
            )
        if follows is None:
            return status
        arrived, since = self.arrived(policy), Moment(follows.since_unix_ns)
        return replace(
            status,
            seals=(follows.kept.seal,),
            newest=f"kept {follows.kept.description}",
            newest_release=status.newest_release if arrived else 0,
            tables=partial(_tables_of_kept, state if arrived else ViewState(), self.model, policy),
            seconds_since=lambda _version: max(0.0, Moment.now().after_ns(since) / 1e9),
            compared=True,
        )

    # Making releases, one call at a time.

    def drop_removed(self) -> None:
        """Drop tables that the model has removed. Replicas then reconnect."""
        if self.state.has_removed:
            self.maker.state = self.state.without_removed()
            self._releases.forget()
            self._signal.wake()

    async def prepare(
        self,
        policy: Policy,
        overdue_version: int = 0,
        goes_on: GoesOn = lambda: True,
        reason: str = "",
    ) -> None:
        """Ensure that the view has the policy's tables in its form. If not, a release creates them with all rows.

        If a table does not fit the policy, or there is no room, the view is unchanged; `trouble` says why.
        """
        await self.maker.finish()  # That release may be the one with these tables.
        if not self.model.head or self._has_form(policy):
            self.trouble = ""
            return
        what = {"policy": policy, "overdue_version": overdue_version, "goes_on": goes_on}
        try:
            forms = [(table, policy.form_of(table.spec)) for table in self.model.tables.followed(policy)]
            for _, form in forms:  # Tables may be newer than the policy.
                form.check()
            plan = await self.maker.plan(reason, forms, **what)
        except (InvalidInput, StorageFailed) as error:
            self.trouble = str(error)
            self._signal.wake()
            raise
        self.trouble = ""
        await self._make(plan)

    async def make_release(
        self, policy: Policy, overdue_version: int, goes_on: GoesOn = lambda: True, reason: str = ""
    ) -> None:
        """Make the next release by the policy, with the present tables; first, one that the log refused."""
        await self.maker.finish()
        if self.state.head:
            await self._make(ReleasePlan(reason, self.state.tables, (), (), policy, overdue_version, goes_on))

    async def go_to(self, follows: Follow, policy: Policy, goes_on: GoesOn, reason: str) -> None:
        """Make the release that brings replicas to a kept version, whatever the policy holds back. Until then, the
        version's tables take as much memory as the model.
        """
        check_past(follows.kept, self.model.seals)
        # Convert every row that replicas may hold first, so that they get only the difference.
        await self.prepare(policy, goes_on=goes_on, reason=reason)
        kept = await in_own_thread(self.model.load_kept, follows.kept.id, policy)
        if self.arrived(policy) or not goes_on():
            return
        what = {"policy": policy, "goes_on": goes_on, "kept": follows.kept, "kept_tables": kept}
        forms = [(table, policy.form_of(table.spec)) for table in kept.values()]
        await self._make(await self.maker.plan(reason, forms, **what))

    async def _make(self, plan: ReleasePlan) -> None:
        await self.maker.make(plan)
        self._signal.wake()  # If there was nothing to release, replicas learn that they are current.

    def _changed(self, release: FrozenRelease | None) -> None:
        """Wake replicas that may wait for a release. Those at the one before get `release`."""
        follows = self.follows
        shown = not follows or self.state.kept == follows.kept.id
        self._releases.have(release if shown else None, self.position.number)
        self._signal.wake()

    # For checkpoints, see `checkpoints.writing.Source`. On the model's thread.

    def checkpoint_tables(self) -> list[SourceTable]:
        """Its tables, including a release that is not on disk yet."""
        return sources(self.owner, self.maker.latest)

    def checkpoint_state(self) -> dict[str, Any] | None:
        """The state for `restore`; None while a release is being written."""
        return self.maker.checkpoint_state()

    async def recover(self) -> str:
        """Continue from the result of `replay`, once the model is loaded. Return why the view cannot continue, so
        that its replicas need every row from a new view; empty if it can.
        """
        replay = self.replay
        if replay is None or not replay.begun:
            return "" if self.state.head else "none of its records was read"
        replay.end(self.model.seals.newest_version)
        if self._record and self._record["model_history"] != self.model.history:
            return "it belongs to another history of the model"
        if not replay.lost:
            await self.maker.resume(replay.state)
        self.replay = None  # It refers to tables.
        return replay.lost

    def truncate_log(self, state: Mapping[str, Any]) -> None:
        """See `ViewStorage.truncate_log`."""
        if state["head"] and line_of(state["history"]) == line_of(self.history):
            kept = self.position.number - self.options.known_releases
            self._log.truncate(state["head"]["number"], kept)

    def _visible(self) -> tuple[list[StampedTable], Head | None] | None:
        """The tables and the head for replicas; None while a release is being written."""
        self.model.tables.check_sound()
        state = self.maker.visible
        if state and self.follows and state.kept != self.follows.kept.id:
            return None
        return ([table.sent for table in state.tables], state.head) if state else None


def _beyond(seconds: float, age_ns: int) -> int:
    return max(0, age_ns - int(seconds * 1e9))


def _tables(state: ViewState, model: Model, policy: Policy) -> list[TableStatus]:
    held = {table.name for table in state.tables}
    missing = [table for table in model.tables.followed(policy) if table.spec.name not in held]
    return [*(_held(table, state) for table in state.tables), *(_missing(table, policy) for table in missing)]


def _tables_of_kept(state: ViewState, model: Model, policy: Policy) -> list[TableStatus]:
    if not state.head:
        return _tables(state, model, policy)
    held = ((table, _held(table, state)) for table in state.tables)
    return [replace(status, lacking=table.lacking_of_kept, backlog=None) for table, status in held]


def _held(table: ViewTable, state: ViewState) -> TableStatus:
    return TableStatus(table.form.spec, table.sent.spec.row_bytes, table.lacking, state.backlog.get(table.name))


def _missing(table: StampedTable, policy: Policy) -> TableStatus:
    return TableStatus(table.spec, policy.row_bytes(table.spec), lambda _number: table.counts.changed)


class ReleaseLoop:
    """Makes the releases of one consumer's view, in the event loop, until it is ended."""

    def __init__(
        self, consumer: Consumer, view: View, events: Events, pauses: Callable[[], Iterator[float]] = backoff
    ) -> None:
        self._consumer, self.view, self._events = consumer, view, events
        self._new_pauses, self._pauses = pauses, pauses()
        self._stopping, self._began_ns = asyncio.Event(), steady_ns()
        self._prepare_at = 0.0
        self._refused: Policy | None = None  # A policy whose tables could not be made.

    def begin(self, tasks: asyncio.TaskGroup) -> None:
        """Begin to make releases, in a task."""
        self._task = tasks.create_task(self._run())

    async def end(self) -> None:
        """End after the present release."""
        self._stopping.set()
        await self._task

    async def _run(self) -> None:
        """Make releases. Report errors and retry, without affecting other consumers."""
        while not self._stopping.is_set():
            try:
                seconds = await self._advance()
            except Exception as error:  # noqa: BLE001  # it must not end the service
                text = "its releases cannot be made; the service retries"
                self.view.failure = f"{text}: {error_text(error)}"
                self._emit(EventKind.FAILED, text, error)
                # New versions do not shorten this pause: an error at every cut would fill the service's log.
                await first_of(self._stopping.wait(), seconds=next(self._pauses))
                continue
            else:
                self._pauses, self.view.failure = self._new_pauses(), ""
            if seconds != 0:
                events = (self._consumer.signal.changed(), self.view.model.changed(), self._stopping.wait())
                await first_of(*events, seconds=seconds)

    async def _advance(self) -> float | None:
        """Do what is due. Return the seconds until the next look; None = wait for a change."""
        view, policy = self.view, self._consumer.policy
        view.drop_removed()
        following, before = view.follows, view.position
        now = next_action(policy, self._situation(policy), steady_ns(), view.options)
        if now.action is Action.WAIT:
            return now.seconds
        # The consumer may be paused before the newest version is read, and no replica may get its rows then.
        match now.action:
            case Action.WRITE:
                await view.maker.finish()
            case Action.FOLLOW if following:
                await view.go_to(following, policy, lambda: self._goes_on_to(following), now.reason)
            case Action.TABLES:
                await self._prepare(policy, now.reason)
            case Action.ROWS:
                await view.make_release(policy, self._overdue_version(policy), self._goes_on, now.reason)
        if view.position != before:
            self._emit(EventKind.RELEASE_MADE, number=view.position.number)
        return 0

    async def _prepare(self, policy: Policy, reason: str) -> None:
        try:
            await self.view.prepare(policy, self._overdue_version(policy), self._goes_on, reason)
        except (InvalidInput, StorageFailed) as error:
            if not self.view.trouble:  # The log refused a release.
                raise
            self._refused, self._prepare_at = policy, time.monotonic() + self.view.options.retry_seconds
            self._emit(EventKind.FAILED, "its policy is not in force", error)

    def _emit(self, kind: EventKind, text: str = "", error: Exception | None = None, **subject: object) -> None:
        self._events.emit(kind, text, error, consumer=self._consumer.name, **subject)

    def _goes_on(self) -> bool:
        """Whether the consumer is not paused. Safe to call from any thread."""
        return self._consumer.pause is None

    def _goes_on_to(self, follows: Follow) -> bool:
        return self._goes_on() and self.view.follows is follows and not self._stopping.is_set()

    def _situation(self, policy: Policy) -> Situation:
        view, model = self.view, self.view.model
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
            ready=state.head is not None and any(r.stream and r.applied == position for r in replicas),
            paused=not self._goes_on(),
            connected=any(replica.stream for replica in replicas),
            refused=view.maker.pending is not None,
            follows=view.follows.kept.description if view.follows else "",
            arrived=view.arrived(policy),
            fits=not view.trouble and (view.fits(policy) or model.head is None),
            tables_after_seconds=again,
        )

    def _overdue_version(self, policy: Policy) -> int:
        """The newest version older than the policy's maximum age."""
        if policy.max_age_seconds is None:
            return 0
        limit, seals = steady_ns() - int(policy.max_age_seconds * 1e9), self.view.model.seals
        older = bisect_right(seals, limit, key=lambda seal: self._sealed_ns(seal.version))
        return seals[older - 1].version if older else 0

    def _sealed_ns(self, version: int) -> int:
        """When a version was sealed, by `steady_ns`; before this loop if only the wall clock's time is known."""
        moment = self.view.model.seals.sealed_at(version)
        return _steady_ns(moment) if moment.steady_ns is not None else min(self._began_ns, _steady_ns(moment))


def _steady_ns(moment: Moment) -> int:
    """A time by `steady_ns`, converted from the wall clock if only that is known."""
    now = Moment.now()
    return steady_ns() - now.after_ns(moment)

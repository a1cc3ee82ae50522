"""A consumer's view: what its replicas hold of a model, and what they can be given of it."""

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

from deltasync.base.clock import Moment, steady_ns
from deltasync.base.decision import Decision
from deltasync.base.errors import InvalidInput, StorageFailed
from deltasync.base.threads import EVENT_LOOP, confined
from deltasync.base.waiting import Signal
from deltasync.checkpoints.writing import SourceTable
from deltasync.core.delivery import Delivery
from deltasync.core.policy import Policy
from deltasync.core.position import NOWHERE, Position, is_discarded, line_of, resume
from deltasync.core.stamped_table import StampedTable
from deltasync.model.feed import Standing, TableStanding
from deltasync.model.model import Model
from deltasync.model.releases import NO_TABLES, Head, Release, Releases
from deltasync.views.log import ViewLog
from deltasync.views.making import ReleasePlan
from deltasync.views.pacing import LONGEST_SECONDS
from deltasync.views.release_maker import ReleaseMaker, Wish
from deltasync.views.replay import Replay, sources
from deltasync.views.state import ViewState
from deltasync.views.table import ViewTable


@confined(trouble=EVENT_LOOP, failure=EVENT_LOOP)
class View:
    """What the replicas of one consumer are fed from. The text of the package says which thread may touch what.

    Attributes:
        model: the model it is a view of.
        trouble: why it does not have the tables that the policy wants; empty if it does.
        replay: brings the view back with its model; None once it is there, and for a new view.
        failure: what keeps releases from being made, which is tried again; empty if nothing does.
    """

    def __init__(self, consumer: str, model: Model, record: Mapping[str, Any] | None = None) -> None:
        """A new view, or the one of a record in the log, which `Model.recover` brings back by its `replay`."""
        self.owner = consumer
        self.model = model
        self.trouble = ""
        self.failure = ""
        self._record = record
        self._log = ViewLog(model.log, consumer)
        self._maker = ReleaseMaker(consumer, model, self._log, record["history"] if record else uuid.uuid4().hex)
        self._releases = Releases(model.on_thread, self._given, model.release_memory_bytes)
        self.replay = Replay(consumer, model, self._log, self.history) if record else None
        self._signal = Signal()

    @property
    def state(self) -> ViewState:
        """Where it is now. The state that is returned does not change; the view goes on to another."""
        return self._maker.state

    # What a replica's stream asks for, of a model as well.

    @property
    def history(self) -> str:
        """The id of the view's history."""
        return self._maker.history.id

    @property
    def model_history(self) -> str:
        """The id of the history of the view's model."""
        return self.model.history

    @property
    def tables(self) -> list[StampedTable]:
        """What replicas are sent; a table's index is its slot. Empty until something is published."""
        return [table.sent for table in self.state.tables]

    @property
    def deliveries(self) -> list[Delivery]:
        """What replicas are sent of each table, by slot."""
        return [table.delivery for table in self.state.tables]

    @property
    def position(self) -> Position:
        """What a replica that has every release holds."""
        head = self.state.head
        return Position(self.history, head.number, head.seal) if head else Position(self.history)

    def release(self, after: int, whole: frozenset[int] = NO_TABLES) -> "asyncio.Future[Release]":
        """What a replica at number `after` lacks, with every row of the tables `whole`."""
        return self._releases.get(after, whole, self.position.number)

    def changed(self) -> Coroutine[None, None, Literal[True]]:
        """To be awaited: a new head, other tables or trouble, from this call on."""
        return self._signal.changed()

    def resume(self, held: Position, acknowledged: Position = NOWHERE) -> tuple[Decision, Position]:
        """Whether a replica that holds `held` can go on from there, and what that position is in this history.

        `acknowledged` is its offset.
        """
        history, model = self._maker.history, self.model
        sealed = model.seal_of(held.number)
        of_model = resume(held, model.history, history.first_version, sealed, acknowledged=acknowledged)
        return history.resume(held, self.position.number, of_model, acknowledged)

    def discards(self, held: Position, version: Position) -> bool:
        """Whether what a replica holds is of a discarded past, or the model's version that it was made of."""
        ours = line_of(held.history) == line_of(self.history)
        if ours and is_discarded(held, self.history, self.position.number, self.seal_of(held.number)):
            return True
        return self.model.discards(held, version)

    def model_position(self, version: int) -> Position:
        """A version as a position of the model's history, with its seal where that is known."""
        return self.model.model_position(version)

    def seal_of(self, number: int) -> int:
        """The checksum of a release's seal; 0 where it is not known."""
        return self._maker.history.seal_of(number)

    def version_of(self, number: int) -> int:
        """The version of the rows that a replica at `number` holds, as far as it is known."""
        return self._version_at(self.state, number)

    def behind_ns(self, number: int, policy: Policy) -> int:
        """For how long a replica at `number` has not held the newest that the policy lets out, nanoseconds.

        Either there is a later release, or one is due, of a later version or of rows that are left, though it may
        not be made yet: none is while no replica is connected. `FOREVER_NS` or more where that is not known.
        """
        now_ns, succession = steady_ns(), self._maker.history.succession
        later_release_ns, age_ns = succession.behind_ns(number, now_ns), succession.age_ns(number, now_ns)
        later_version_ns = self.model.behind_ns(self.version_of(number), policy)
        due_ns = min(later_version_ns, _beyond(policy.min_interval_seconds, age_ns))
        if number == self.position.number and self.state.backlog_rows:
            due_ns = max(due_ns, _beyond(max(policy.min_interval_seconds, LONGEST_SECONDS), age_ns))
        return max(later_release_ns, due_ns)

    def outdated(self, number: int) -> Moment | None:
        """When the version was sealed that comes after the one of which release `number` was made, or None."""
        return self.model.outdated(self.version_of(number))

    @property
    def released(self) -> Moment | None:
        """When the newest release was made; None before the first one."""
        newest = self.state.newest
        if newest is None:
            return None
        return Moment(newest.statistics.made_unix_ns, self._maker.history.succession.since_ns(newest.head.number))

    def event_time_of(self, version: int) -> int | None:
        """The time of the newest event that the model had been trained on at a version, or None."""
        return self.model.event_time_of(version)

    def _version_at(self, state: ViewState, number: int) -> int:
        if state.head and number == state.head.number:
            # What has changed since then was nothing that replicas lack.
            return max(state.compared_version, state.head.version)
        return self._maker.history.version_of(number)

    def may_serve(self, policy: Policy) -> bool:
        """Whether replicas may be given the tables there are: those of the policy or, where these cannot be made,
        older ones of its mode.
        """
        if not self.tables:
            return False
        return self.fits(policy) or (
            bool(self.trouble) and all(each.mode is policy.mode for each in self.deliveries)
        )

    def fits(self, policy: Policy) -> bool:
        """Whether it has the tables that the policy follows, in the form that the policy wants."""
        if self.state.has_removed:
            return False
        return self.deliveries == [policy.delivery_of(table.spec) for table in self.model.followed(policy)]

    def standing(self, policy: Policy) -> Standing:
        """Where the view stands. Until its first release, which waits for a replica, it is where the model is."""
        state, of_model = self.state, self.model.standing(policy)
        standing = replace(
            of_model,
            history=self.history,
            newest_release=state.head.number if state.head else 0,
            trouble=self.trouble,
            failure=self.failure or of_model.failure,
        )
        if state.newest is None:
            return standing
        return replace(
            standing,
            tables=partial(_tables, state, self.model, policy),
            version_of=partial(self._version_at, state),
            seal_of=self._maker.history.seal_of,
            release=state.newest.statistics,
            released=self.released,
            compared=state.compared_version == self.model.position.number,
        )

    # Moving on: one call at a time.

    def let_go_removed(self) -> None:
        """Drop the tables that the model does not have any more, which take memory. Replicas connect again."""
        if self.state.has_removed:
            self._maker.state = self.state.without_removed()
            self._releases.forget()
            self._signal.wake()

    async def prepare(
        self, policy: Policy, overdue_version: int = 0, goes_on: Callable[[], bool] = lambda: True
    ) -> None:
        """Have the tables that the policy follows, in the form that it wants. If the view lacks some, a release
        makes them, whole, and takes of the others what the policy wants; see `make_release`.

        Raises:
            InvalidInput: the policy cannot be kept with a table that has come since; the view is as it was, and in
                `trouble`.
            StorageFailed: there is no room, likewise; or the log could not be written.
        """
        if self._maker.shown is None:  # The log has refused a release, which may be the one that has them.
            await self._make(None)
        plan = None
        try:
            if self.model.head and not self.fits(policy):
                wanted = [(table, policy.delivery_of(table.spec)) for table in self.model.followed(policy)]
                for _, delivery in wanted:  # Of tables that came after the policy, too.
                    delivery.check()
                plan = await self._maker.plan(wanted)
            self.trouble = ""
        except (InvalidInput, StorageFailed) as error:
            self.trouble = str(error)
            self._signal.wake()
            raise
        if plan:
            await self._make(Wish(policy, overdue_version, goes_on), plan)

    async def make_release(
        self, policy: Policy, overdue_version: int, goes_on: Callable[[], bool] = lambda: True
    ) -> None:
        """Make the next release, by the policy, of the tables that the view has.

        Args:
            policy: the consumer's policy.
            overdue_version: rows that are dirty since this version or before are overdue.
            goes_on: whether it is still wanted; asked on the model's thread.

        Raises:
            StorageFailed: the log has refused it. It is tried again before anything else.
            DamagedRows: rows of the model do not fit their digests. The model is loaded again.
        """
        await self._make(Wish(policy, overdue_version, goes_on))

    async def _make(self, wish: Wish | None, plan: ReleasePlan | None = None) -> None:
        try:
            await self._maker.make(wish, plan)
        finally:
            self._releases.have(None, self.position.number)  # Who waits for one may be given it now.
            self._signal.wake()

    def discard(self) -> None:
        """Remove everything that the log has of it. Blocks; any thread."""
        self._log.discard()

    # For checkpoints, see `checkpoints.writing.Source`. On the model's thread.

    def checkpoint_tables(self) -> list[SourceTable]:
        """Its tables, with a release that is not on disk yet."""
        return sources(self.owner, self._maker.made)

    def checkpoint_state(self) -> dict[str, Any] | None:
        """What else `restore` needs; None while a release is on its way to the disk."""
        return self._maker.saved()

    async def recovered(self) -> str:
        """Go on from where `replay` has led to, once the model is there. In the event loop, before any other use.

        Returns:
            Why the view cannot go on: its replicas need every row, by another view. Empty if it can.

        Raises:
            StorageFailed: the log cannot be read.
        """
        replay = self.replay
        if replay is None or not replay.begun:
            return "" if self.state.newest else "nothing of it was read"
        replay.end(self.model.seals.newest_version)
        if self._record and self._record["model_history"] != self.model.history:
            return "it is of another history of the model"
        if not replay.lost:
            await self._maker.go_on_from(replay.state)
        self.replay = None  # It keeps tables in memory.
        return replay.lost

    def cut_log(self, state: Mapping[str, Any]) -> None:
        """See `Derived.cut_log`."""
        if state["head"] and line_of(state["history"]) == line_of(self.history):
            self._log.cut(state["head"]["number"], self.position.number)

    def _given(self) -> tuple[list[StampedTable], Head | None] | None:
        """What replicas can be given, as it is at one moment; None while a release is on its way to the disk."""
        self.model.check_sound()
        state = self._maker.shown
        return ([table.sent for table in state.tables], state.head) if state else None


def _beyond(seconds: float, age_ns: int) -> int:
    """By how much an age is more than so many seconds, nanoseconds."""
    return max(0, age_ns - int(seconds * 1e9))


def _tables(state: ViewState, model: Model, policy: Policy) -> list[TableStanding]:
    held = {table.delivery.spec.name for table in state.tables}
    missing = [table for table in model.followed(policy) if table.spec.name not in held]
    return [*(_held(table, state) for table in state.tables), *(_missing(table, policy) for table in missing)]


def _held(table: ViewTable, state: ViewState) -> TableStanding:
    return TableStanding(
        table.delivery.spec,
        table.sent.spec.row_bytes,
        table.lacking,
        state.backlog.get(table.delivery.spec.name),
    )


def _missing(table: StampedTable, policy: Policy) -> TableStanding:
    """A table that the view is still to get: its replicas lack all there is of it."""
    return TableStanding(table.spec, policy.row_bytes(table.spec), lambda _: table.counts.changed)

"""What every feed has in common."""

from asyncio import Future
from collections.abc import Awaitable, Sequence
from typing import Protocol

from deltasync.core.delivery import Delivery
from deltasync.core.policy import Policy
from deltasync.core.position import NOWHERE, Decision, Position
from deltasync.core.steady_clock import Moment
from deltasync.feeds.frozen_release import NO_TABLES
from deltasync.feeds.releases import Release
from deltasync.feeds.standing import Standing


class Feed(Protocol):
    """What replicas are fed from: a history of numbered releases of some tables. Used in the event loop."""

    @property
    def history(self) -> str:
        """The id of the history that its numbers belong to."""

    @property
    def model_history(self) -> str:
        """The id of the history of the model whose rows these are."""

    @property
    def position(self) -> Position:
        """What a replica that has everything holds."""

    @property
    def deliveries(self) -> Sequence[Delivery]:
        """What replicas are sent of each table, by slot."""

    def may_serve(self, policy: Policy) -> bool:
        """Whether there is something to send to replicas of a consumer with this policy."""

    def resume(self, held: Position, acknowledged: Position = NOWHERE) -> tuple[Decision, Position]:
        """Whether a replica that holds `held` can go on from there, and what that is in this history.

        `acknowledged` is its offset.
        """

    def discards(self, held: Position, version: Position) -> bool:
        """Whether what a replica holds is of a discarded past. `version` is the model's that it was made of, empty
        where the replica does not say it.
        """

    def model_position(self, version: int) -> Position:
        """A version as a position of the model's history, with its seal where that is known."""

    def seal_of(self, number: int) -> int:
        """The checksum of the seal of a number of this history; 0 where it is not known."""

    def version_of(self, number: int) -> int:
        """The version of the model's rows that a replica at `number` holds, as far as it is known."""

    def behind_ns(self, number: int, policy: Policy) -> int:
        """For how long a replica at `number` has not held the newest there is for a consumer with this policy,
        nanoseconds; 0 if it does, `FOREVER_NS` or more where nobody knows.
        """

    def outdated(self, number: int) -> Moment | None:
        """When the version was sealed that comes after the one whose rows a replica at `number` holds, or None."""

    def event_time_of(self, version: int) -> int | None:
        """The time of the newest event that the model had been trained on at a version, nanoseconds since 1970.

        None where it is not known.
        """

    def release(self, after: int, whole: frozenset[int] = NO_TABLES) -> "Future[Release]":
        """What a replica at `after` lacks, with every row of the tables in the slots `whole`.

        It fails with `DamagedRows` where some do not fit their digests.
        """

    def standing(self, policy: Policy) -> Standing:
        """Where it stands to a consumer with this policy, for those who ask how far replicas are behind."""

    def changed(self) -> Awaitable[object]:
        """To be awaited: another position, other tables or other trouble, from this call on."""

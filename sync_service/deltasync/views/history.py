"""The history of a view: of which version each release was made, and from which positions replicas can go on."""

import uuid
from collections import deque
from collections.abc import Iterable
from dataclasses import replace

from deltasync.core.position import NOWHERE, Decision, Position, resume
from deltasync.core.seal import Seal, release_checksum
from deltasync.core.steady_clock import Succession
from deltasync.feeds.frozen_release import Head

# Of releases older than these it is no longer known which version they were made of, nor what their seals are.
KEPT_HEADS = 10_000


class ReleaseHistory:
    """The releases of one view. Added to by one call at a time, read on any thread.

    Releases are numbered from `first_version` on. Numbers up to it are versions of the model, older than the view.

    Attributes:
        id: the id of the view's history.
        first_version: the version at which the view began; 0 = it has no tables yet.
        succession: when each release became the newest.
    """

    def __init__(self, history_id: str | None = None, first_version: int = 0, heads: Iterable[Head] = ()) -> None:
        """Begin with the releases that are known, oldest first; without an id, a new history."""
        self.id = history_id or uuid.uuid4().hex
        self.first_version = first_version
        self.succession = Succession()
        self._heads: deque[Head] = deque(heads, maxlen=KEPT_HEADS)

    def add(self, head: Head, at_ns: int) -> None:
        """Note that a release is the newest one, since a time by `steady_ns`."""
        self._heads.append(head)
        self.succession.add(head.number, at_ns)

    @property
    def _newest(self) -> Head | None:
        return self._heads[-1] if self._heads else None

    def sealed(self, head: Head, of: Seal, made_unix_ns: int) -> Head:
        """The head of the next release, which is made of a version, with its seal."""
        before = self._newest.seal if self._newest else self.id
        return replace(head, seal=release_checksum(before, head.number, of, made_unix_ns))

    def version_of(self, number: int) -> int:
        """The version of the rows that a replica at `number` holds.

        Of releases that are no longer known, nothing is but that they are not older than the view.
        """
        newest = self._newest
        head = newest if newest and number >= newest.number else self._head(number)
        known = head.version if head else self.first_version
        return min(number, known) if number <= self.first_version else known

    def seal_of(self, number: int) -> int:
        """The checksum of a release's seal; 0 where it is not known."""
        head = self._head(number)
        return head.seal if head else 0

    def _head(self, number: int) -> Head | None:
        """The head of a release, if it is known. All that are known have successive numbers."""
        while newest := self._newest:
            back = newest.number - number
            found = self._heads[-1 - back] if 0 <= back < len(self._heads) else None
            if found is None or found.number == number:
                return found
            if newest is self._newest:  # Otherwise, one was added meanwhile.
                return None
        return None

    def resume(
        self, held: Position, newest: int, of_model: Decision, acknowledged: Position = NOWHERE
    ) -> tuple[Decision, Position]:
        """Whether a replica that holds `held` can go on from there, and what that position is in this history.

        Args:
            held: what the replica says that it holds.
            newest: the number of the newest release; 0 = there is none.
            of_model: whether `held` is a version of the model, of its past. One from after the view began is no
                number of the view's.
            acknowledged: the replica's offset.
        """
        seal = self.seal_of(held.number)
        if of_model.yes and held.number <= self.first_version:
            decision = Decision(True, f"the replica holds version {held.number}, from before the policy")
            return decision, Position(self.id, held.number, seal)
        decision = resume(held, self.id, newest, seal, unit="release", acknowledged=acknowledged)
        return decision, Position(self.id, held.number, held.seal) if decision.yes else Position(self.id)

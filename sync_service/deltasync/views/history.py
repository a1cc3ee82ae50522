"""The history of a view: of which version each release was made, and from which positions replicas can go on."""

import uuid
from collections import deque

from deltasync.core.position import Decision, Position, resume
from deltasync.core.steady_clock import Succession
from deltasync.feeds.frozen_release import Head

# Of releases older than these, which version they were made of is no longer known.
_REMEMBERED_RELEASES = 10_000


class ReleaseHistory:
    """The releases of one view. Added to by one call at a time, read on any thread.

    Releases are numbered from `first_version` on. Numbers up to it are versions of the model, older than the view.

    Attributes:
        id: the id of the view's history.
        first_version: the version at which the view began; 0 = it has no tables yet.
        succession: when each release became the newest.
    """

    def __init__(self, history_id: str | None = None, first_version: int = 0) -> None:
        self.id = history_id or uuid.uuid4().hex
        self.first_version = first_version
        self.succession = Succession()
        self._heads: deque[Head] = deque(maxlen=_REMEMBERED_RELEASES)

    def add(self, head: Head, at_ns: int) -> None:
        """Note that a release is the newest one, since a time by `steady_ns`."""
        self._heads.append(head)
        self.succession.add(head.number, at_ns)

    def version_of(self, number: int) -> int:
        """The version of the rows that a replica at `number` holds.

        Of releases made before a restart nothing is known but that they are not older than the view.
        """
        newest_first = reversed(tuple(self._heads))  # A copy: more may be added meanwhile.
        known = next((head.version for head in newest_first if head.number <= number), self.first_version)
        return min(number, known) if number <= self.first_version else known

    def resume(self, held: Position, newest: int, model_history: str) -> tuple[Decision, Position]:
        """Whether a replica that holds `held` can go on from there, and what that position is in this history.

        Args:
            held: what the replica says that it holds.
            newest: the number of the newest release; 0 = there is none.
            model_history: the id of the history of the view's model.
        """
        if held.history == model_history and 0 < held.number <= self.first_version:
            decision = Decision(True, f"the replica holds version {held.number}, from before the policy")
            return decision, Position(self.id, held.number)
        decision = resume(held, self.id, newest, unit="release")
        return decision, held if decision.yes else Position(self.id)

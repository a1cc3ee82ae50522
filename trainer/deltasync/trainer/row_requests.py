"""What the service asks of this rank with its answers, as far as that is met. In the thread that trains.

Operators want rows deleted. All ranks meet the same requests after the same step: a column or a copy of a row that
one rank resets a step later than another would be that of another row. The service itself wants rows again that it
has lost; each rank gives those that it holds.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from deltasync.core.delete_request import DeleteRequest
from deltasync.core.rows import Ids
from deltasync.trainer.tracking.tracker import Tracker

_NONE = np.empty(0, np.int64)


class RowRequests:
    """Which of the requests that the service hands to this rank are met.

    Attributes:
        met: numbers of those that are, of those that it was last handed; the service forgets them with a cut.
    """

    def __init__(self) -> None:
        self.met: set[int] = set()

    def newest(self, handed: Sequence[DeleteRequest]) -> int:
        """The largest number of those that are not met; 0 if all are."""
        self.met &= {request.number for request in handed}
        return max((request.number for request in handed if request.number not in self.met), default=0)

    def meet(self, handed: Sequence[DeleteRequest], upto: int) -> list[DeleteRequest]:
        """Those up to a number that are not met, which are from here on."""
        due = [request for request in handed if request.number <= upto and request.number not in self.met]
        self.met |= {request.number for request in due}
        return due


class WantedRows:
    """Which of the rows that the service wants again are to be published again."""

    def __init__(self) -> None:
        self._answer: Sequence[tuple[str, Ids]] = ()
        self._taken = dict[str, Ids]()

    def take(self, answer: Sequence[tuple[str, Ids]], *, again: bool) -> dict[str, Ids]:
        """Those of the service's newest answer that are due, by table.

        It wants rows with the answer to the very cut that has brought them, too, before that is applied. Whoever
        waits until nothing is due takes none `again`, since each cut would be followed by another.
        """
        if again and answer is self._answer:
            return {}
        if again:
            self._answer, self._taken = answer, {}
        due = {table: np.setdiff1d(ids, self._taken.get(table, _NONE)) for table, ids in answer}
        due = {table: ids for table, ids in due.items() if len(ids)}
        self._taken |= {table: np.union1d(ids, self._taken.get(table, _NONE)) for table, ids in due.items()}
        return due


def mark_held(tracker: Tracker, rows: Mapping[str, Ids]) -> dict[str, Ids]:
    """Have rows published again that this rank holds now, which may have been resharded; by table, these."""
    tracked = {table.name for table in tracker.tables} if rows else set()
    held = {table: ids for table, ids in rows.items() if table in tracked}
    for table, ids in held.items():
        tracker.mark_held(table, torch.from_numpy(ids))
    return held

"""What the service asks of this rank with its answers, as far as that is met. In the thread that trains.

Operators want rows deleted. All ranks meet the same requests after the same step: a column or a copy of a row that
one rank resets a step later than another would be that of another row. A run that goes on from an older version
publishes again the rows that changed since; each rank gives those that it holds.
"""

from collections.abc import Mapping, Sequence

import torch

from deltasync.core.delete_request import DeleteRequest
from deltasync.core.rows import Ids
from deltasync.trainer.tracking.tracker import Tracker


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


def mark_held(tracker: Tracker, rows: Mapping[str, Ids]) -> dict[str, Ids]:
    """Have rows published again that this rank holds now, which may have been resharded; by table, these."""
    tracked = {table.name for table in tracker.tables} if rows else set()
    held = {table: ids for table, ids in rows.items() if table in tracked}
    for table, ids in held.items():
        tracker.mark_held(table, torch.from_numpy(ids))
    return held

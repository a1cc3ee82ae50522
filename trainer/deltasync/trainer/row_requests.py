"""Requests of operators to delete rows, as far as this rank has met them. In the thread that trains.

All ranks meet the same requests after the same step: a column or a copy of a row that one rank resets a step later
than another would be that of another row.
"""

from collections.abc import Sequence

from deltasync.core.delete_request import DeleteRequest


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

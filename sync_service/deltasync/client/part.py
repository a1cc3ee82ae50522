"""One rank's share of a cut."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from deltasync.core.event_time import check_event_time
from deltasync.core.rows import RowBatch


@dataclass(frozen=True, kw_only=True)
class Part:
    """This rank's share of a cut.

    Attributes:
        step: the optimizer step after which the rows were read; later than that of the last part that was
            sealed.
        step_end_unix_ns: when the step ended on this rank, nanoseconds since 1970.
        rows: the rows; may be empty.
        full: whether these are all rows of all shards of this rank.
        deletes: numbers of the requests that this rank has met by now, of those in `Publisher.deletes`.
        event_time_unix_ns: the time of the newest event that this rank has trained on, nanoseconds since 1970;
            None where it does not know.
        differing: names of the tables of which other ranks have other rows than this one, which publishes its own.
        made_unix_ns: when the rows had been read, nanoseconds since 1970: when the part is made, unless given.

    Raises:
        InvalidInput: the event time is no whole number from 1 on.
    """

    step: int
    step_end_unix_ns: int
    rows: list[RowBatch] = field(default_factory=list)
    full: bool = False
    deletes: Sequence[int] = ()
    event_time_unix_ns: int | None = None
    differing: Sequence[str] = ()
    made_unix_ns: int = field(default_factory=time.time_ns)

    def __post_init__(self) -> None:
        check_event_time(self.event_time_unix_ns)

    @property
    def nbytes(self) -> int:
        """Bytes of ids and values, as they are sent."""
        return sum(rows.nbytes for rows in self.rows)

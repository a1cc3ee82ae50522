"""A request to delete rows, from an operator to the ranks that have them."""

from dataclasses import dataclass

from deltasync.core.rows import Ids


@dataclass(frozen=True, eq=False)
class DeleteRequest:
    """Rows to be deleted by all ranks that have some of them, after the same step.

    Attributes:
        number: nanoseconds since 1970 when it was asked for, made later than that of any other that is pending.
        table: the table's name.
        ids: [n] int64, global row ids, strictly ascending.
    """

    number: int
    table: str
    ids: Ids

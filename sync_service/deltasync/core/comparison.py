"""Results of comparing a replica's rows with the service's."""

from dataclasses import dataclass
from enum import Enum


class ComparisonStatus(Enum):
    """The result of comparing a replica's table."""

    EQUAL = "equal"
    """Every row is equal."""
    DIFFERS = "differs"
    """Some rows differ."""
    NOT_HELD = "not held"
    """The replica does not have the table."""
    NOT_SHOWN = "not shown"
    """The replica's rows cannot be read back."""


@dataclass(frozen=True)
class TableComparison:
    """The comparison of one table.

    Attributes:
        table: the table's name.
        rows: number of compared rows.
        status: the result.
        checksum: the expected checksum of these rows, 16 hexadecimal digits; empty if unknown.
        held: the replica's checksum; empty if unknown.
        reason: the result in words; empty if the rows are equal.
    """

    table: str
    rows: int
    status: ComparisonStatus
    checksum: str = ""
    held: str = ""
    reason: str = ""

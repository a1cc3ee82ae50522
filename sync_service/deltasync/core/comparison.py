"""Results of comparing the rows of a replica or copy with the service's."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from deltasync.base.words import counted
from deltasync.core.rows import Ids, ranges

# Maximum number of differing rows to name.
MOST_NAMED = 1_000


class ComparisonStatus(Enum):
    """The result of comparing a copy of a table."""

    EQUAL = "equal"
    """Every row is equal."""
    DIFFERS = "differs"
    """Some rows differ."""
    NOT_HELD = "not held"
    """The copy does not have the table."""
    NOT_SHOWN = "not shown"
    """The copy's rows cannot be read back."""


def _no_ids() -> Ids:
    return np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class TableComparison:
    """The comparison of one table's copy.

    Attributes:
        table: the table's name.
        rows: number of compared rows.
        status: the result.
        checksum: the expected checksum of these rows.
        held: the checksum of the copy; 0 if unknown.
        ids: rows that differ, int64 [n], ascending: the first 1,000, as far as known.
        differing: number of rows that differ; 0 if unknown.
        changed: number of other rows left out because they changed after the copy was made.
    """

    table: str
    rows: int
    status: ComparisonStatus
    checksum: int = 0
    held: int = 0
    ids: Ids = field(default_factory=_no_ids)
    differing: int = 0
    changed: int = 0

    @property
    def reason(self) -> str:
        """The result in words; empty if the rows are equal."""
        if self.status is ComparisonStatus.DIFFERS:
            if not self.differing:
                return "its checksum differs; the rows that differ are unknown"
            some = ", among them" if self.differing > len(self.ids) else ":"
            verb = "differs" if self.differing == 1 else "differ"
            return f"{counted(self.differing, 'row')} {verb}{some} {ranges(self.ids)}"
        return {
            ComparisonStatus.NOT_HELD: "the copy does not have this table",
            ComparisonStatus.NOT_SHOWN: "the copy's rows cannot be read back",
        }.get(self.status, "")


@dataclass(frozen=True)
class ComparisonLine:
    """A `TableComparison` in JSON. Checksums are 16 hexadecimal digits, or empty if nothing was compared.

    `rows` were compared, the first 1,000 of `differing` rows are in `ids`, and `changed` others were left out.
    """

    table: str
    rows: int
    status: str
    checksum: str
    held: str
    differing: int
    ids: list[int]
    changed: int
    reason: str

    @classmethod
    def of(cls, table: TableComparison) -> "ComparisonLine":
        """The line for a table."""
        compared = table.status in (ComparisonStatus.EQUAL, ComparisonStatus.DIFFERS)
        return cls(
            table=table.table,
            rows=table.rows,
            status=table.status.value,
            checksum=f"{table.checksum:016x}" if compared or table.checksum else "",
            held=f"{table.held:016x}" if compared else "",
            differing=table.differing,
            ids=table.ids.tolist(),
            changed=table.changed,
            reason=table.reason,
        )

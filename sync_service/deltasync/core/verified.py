"""How rows that somebody holds compare with the service's."""

from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from deltasync.base.words import counted
from deltasync.core.rows import Ids, ranges

# Of the rows that differ, so many are named.
MOST_NAMED = 1_000


class VerifiedStatus(Enum):
    """How what is held of a table compares."""

    EQUAL = "equal"
    """Every row is what it should be."""
    DIFFERS = "differs"
    """Some rows are not."""
    NOT_HELD = "not held"
    """The table is not there."""
    NOT_SHOWN = "not shown"
    """It cannot be said what is held."""


@dataclass(frozen=True, eq=False)
class VerifiedTable:
    """How what is held of one table compares.

    Attributes:
        table: its name.
        rows: so many were compared.
        status: how they compare.
        checksum: what that of all these rows should be.
        held: what it is; 0 where none is shown.
        ids: rows that differ, int64 [n], ascending: the first 1,000, as far as it is known which.
        differing: how many there are; 0 where that is not known.
        changed: so many others were left out, since they have changed after what is compared was made.
    """

    table: str
    rows: int
    status: VerifiedStatus
    checksum: int = 0
    held: int = 0
    ids: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    differing: int = 0
    changed: int = 0

    @property
    def reason(self) -> str:
        """The same in words; empty where they are equal."""
        if self.status is VerifiedStatus.DIFFERS:
            if not self.differing:
                return "its checksum is another; which rows differ is not known"
            some = ", among them" if self.differing > len(self.ids) else ":"
            verb = "differs" if self.differing == 1 else "differ"
            return f"{counted(self.differing, 'row')} {verb}{some} {ranges(self.ids)}"
        return {
            VerifiedStatus.NOT_HELD: "it is not held",
            VerifiedStatus.NOT_SHOWN: "its rows cannot be read back",
        }.get(self.status, "")


@dataclass(frozen=True)
class VerifiedLine:
    """A `VerifiedTable` in JSON: checksums are 16 digits of base 16, or empty where there is none to compare.

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
    def of(cls, table: VerifiedTable) -> "VerifiedLine":
        """The line that describes a table."""
        compared = table.status in (VerifiedStatus.EQUAL, VerifiedStatus.DIFFERS)
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

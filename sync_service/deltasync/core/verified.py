"""How rows that somebody holds compare with the service's."""

from dataclasses import dataclass, field

import numpy as np

from deltasync.core.damage import ranges
from deltasync.core.numbered import Numbered
from deltasync.core.rows import Ids
from deltasync.core.words import counted

# Of the rows that differ, so many are named.
MOST_NAMED = 1_000


class VerifiedStatus(Numbered):
    """How what is held of a table compares."""

    EQUAL = "equal", 1
    """Every row is what it should be."""
    DIFFERS = "differs", 2
    """Some rows are not."""
    NOT_HELD = "not held", 3
    """The table is not there."""
    NOT_SHOWN = "not shown", 4
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

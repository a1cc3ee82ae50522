"""What a replica is sent although it does not lack it: it holds other bits of it than it was sent."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from deltasync.core.rows import Ids


@dataclass(frozen=True, eq=False)
class Repair:
    """Tables by slot: whole, or some rows.

    Attributes:
        whole: slots of the tables of which every row is sent, and that are reset before.
        rows: ids [n], strictly ascending, by slot, of other tables.
    """

    whole: frozenset[int] = frozenset()
    rows: Mapping[int, Ids] = field(default_factory=dict)

    @property
    def slots(self) -> frozenset[int]:
        """Of all tables that it repairs."""
        return self.whole | self.rows.keys()


NO_REPAIR = Repair()

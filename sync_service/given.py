"""What replicas are given of a table."""

from dataclasses import dataclass
from enum import Enum

from sync_service.tables import Table
from sync_service.value_types import ValueType, encoded_table, own_type


class Mode(Enum):
    """What is sent of a row: its values, or only that it has changed, and by how much."""

    EMBEDDINGS = "embeddings"
    IDS = "ids"


@dataclass(frozen=True)
class Given:
    """What replicas are given of a table: rows in a value type, or the norms of what has changed in them."""

    table: Table
    value_type: ValueType
    mode: Mode

    @classmethod
    def as_it_is(cls, table: Table) -> "Given":
        """Rows in the table's own type."""
        return cls(table, own_type(table), Mode.EMBEDDINGS)

    @property
    def sent(self) -> Table:
        """The table as it travels."""
        if self.mode is Mode.IDS:
            return Table(self.table.name, self.table.rows, 1)
        return encoded_table(self.table, self.value_type)

"""What replicas are sent of a table."""

from dataclasses import dataclass

from deltasync.core.mode import Mode
from deltasync.core.tables import TableSpec
from deltasync.core.value_types import ValueType, own_type


@dataclass(frozen=True)
class Delivery:
    """What replicas are sent of a table: rows in a value type, or the norms of what has changed in them."""

    spec: TableSpec
    value_type: ValueType
    mode: Mode

    @classmethod
    def unchanged(cls, spec: TableSpec) -> "Delivery":
        """Rows in the table's own type."""
        return cls(spec, own_type(spec), Mode.EMBEDDINGS)

    @property
    def wire_spec(self) -> TableSpec:
        """The shape and type in which its rows travel."""
        if self.mode is Mode.IDS:
            return TableSpec(self.spec.name, self.spec.rows, 1)
        return self.value_type.encoded_spec(self.spec)

"""What replicas are sent of a table."""

from dataclasses import dataclass

import numpy as np

from deltasync.core.mode import Mode
from deltasync.core.rows import Values
from deltasync.core.tables import EncodedSpec, TableSpec
from deltasync.core.value_types import Distances, Encoded, ValueType, own_type


@dataclass(frozen=True)
class Delivery:
    """What replicas are sent of a table: its rows, or the norms of what has changed in them.

    Attributes:
        spec: the table.
        value_type: in which rows are held and sent; None = bit by bit in the table's own type, as all are that are
            no embedding table's.
        mode: what is sent.
    """

    spec: TableSpec
    value_type: ValueType | None
    mode: Mode

    @classmethod
    def unchanged(cls, spec: TableSpec) -> "Delivery":
        """Rows in the table's own type."""
        return cls(spec, own_type(spec) if spec.kind.ranked else None, Mode.EMBEDDINGS)

    @property
    def encoded_spec(self) -> TableSpec:
        """The shape and type in which its rows are held."""
        if self.value_type:
            return self.value_type.encoded_spec(self.spec)
        return EncodedSpec(**vars(self.spec))

    @property
    def wire_spec(self) -> TableSpec:
        """The shape and type in which its rows travel."""
        if self.mode is Mode.IDS:
            return TableSpec(self.spec.name, self.spec.rows, 1)
        return self.encoded_spec

    def encode(self, values: Values) -> Encoded:
        """Rows ([n, D]) as they are held and sent: [n, width]."""
        return self.value_type.encode(values) if self.value_type else values

    def decode(self, encoded: Encoded) -> Values:
        """The rows ([n, D], of the table's type) that encoded ones ([n, width]) stand for."""
        return self.value_type.decode(encoded, self.spec.dtype) if self.value_type else encoded

    def largest_distances(self, encoded: Encoded, decoded: Values) -> Distances:
        """An upper bound of how far (L2) each row lies from what it is encoded as: see `ValueType`."""
        return self.value_type.largest_distances(encoded, decoded) if self.value_type else np.zeros(len(decoded))

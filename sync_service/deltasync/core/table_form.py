"""The form in which replicas of a consumer get a table."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deltasync.core.digests import RowDigests, row_digests
from deltasync.core.rows import Ids, Mask, Values
from deltasync.core.tables import EncodedSpec, Numbered, TableKind, TableSpec
from deltasync.core.value_types import Distances, Encoded, ValueType, compare_bits, compare_values, own_type


class Mode(Numbered):
    """What is sent of a row: its values, or only its id and the norm of its change."""

    EMBEDDINGS = "embeddings", 1
    IDS = "ids", 2


@dataclass(frozen=True, kw_only=True)
class ReplicaSpec(EncodedSpec):
    """A table as replicas hold it if its rows are sent in another type than their own.

    For an inference TBE, replicas hold rows as sent, and `dim` is their width in bytes.

    Attributes:
        value_type: the type in which the rows are sent.
        table_dim: number of values in a row.
    """

    value_type: ValueType
    table_dim: int


def value_type_of(table: TableSpec) -> ValueType:
    """The type in which a holder of an embedding table receives its rows."""
    return table.value_type if isinstance(table, ReplicaSpec) else own_type(table)


@dataclass(frozen=True)
class TableForm:
    """The form in which replicas get a table: its rows, or the norms of their changes.

    Attributes:
        value_type: type in which rows are kept and sent; None = bit by bit in the table's own type, for all
            tables except embedding tables.
        mode: what is sent.
    """

    spec: TableSpec
    value_type: ValueType | None
    mode: Mode

    @classmethod
    def unchanged(cls, spec: TableSpec) -> "TableForm":
        """The form with rows in the table's own type."""
        return cls(spec, own_type(spec) if spec.kind.ranked else None, Mode.EMBEDDINGS)

    def check(self) -> None:
        """Check that the table's rows can be sent in this form."""
        if self.value_type:
            self.value_type.check(self.spec)

    @property
    def encoded_spec(self) -> TableSpec:
        """The shape and type in which the service keeps its rows."""
        if self.value_type:
            return self.value_type.encoded_spec(self.spec)
        return EncodedSpec(**vars(self.spec))

    @property
    def replica_spec(self) -> TableSpec:
        """The table as replicas hold it, with decoded rows, or encoded ones for an inference TBE."""
        if self.value_type is None or self.mode is Mode.IDS or self.value_type is own_type(self.spec):
            return self.spec
        held = self.encoded_spec if self.held_as_sent else self.spec
        return ReplicaSpec(**vars(held), value_type=self.value_type, table_dim=self.spec.dim)

    @property
    def wire_spec(self) -> TableSpec:
        """The shape and type in which its rows are sent."""
        if self.mode is Mode.IDS:
            return TableSpec(self.spec.name, self.spec.rows, 1)
        return self.encoded_spec

    def encode(self, values: Values) -> Encoded:
        """Encode rows ([n, D]) for keeping and sending: [n, width]."""
        return self.value_type.encode(values) if self.value_type else values

    def decode(self, encoded: Encoded) -> Values:
        """Decode rows ([n, width]) to values of the table's type ([n, D])."""
        return self.value_type.decode(encoded, self.spec.dtype) if self.value_type else encoded

    def held(self, encoded: Encoded) -> Values:
        """The rows ([n, dim of `replica_spec`]) that replicas hold after receiving encoded rows ([n, width])."""
        return encoded if self.held_as_sent else self.decode(encoded)

    def compare(self, rows: Values, held: Encoded, ids: Ids) -> tuple[Distances, Mask]:
        """Compare the rows `ids` ([n]) of a table ([N, D]) with the encoded rows that replicas hold ([M, width]).

        Returns their distances (L2 norms [n] float64, never infinite; 0 for rows that are not trained), and
        whether each would be encoded with other bits ([n] bool).
        """
        if self.value_type:
            return self.value_type.compare(rows, held, ids)
        if self.spec.kind.trained:
            return compare_values(rows, held, ids)
        return np.zeros(len(ids)), compare_bits(rows, held, ids)

    def held_digests(self, encoded: Encoded) -> RowDigests:
        """The digests [n] of the rows that replicas hold after receiving encoded rows ([n, width])."""
        if self.value_type is None or self.held_as_encoded:
            return row_digests(encoded)
        return self.value_type.decoded_digests(encoded, self.spec.dtype)

    @property
    def bitwise(self) -> bool:
        """Whether encoded rows have the bits of the table's rows."""
        return self.value_type is None or self.value_type.dtype == self.spec.dtype

    @property
    def held_as_encoded(self) -> bool:
        """Whether replicas hold the bits of encoded rows."""
        return self.bitwise or self.held_as_sent

    @property
    def held_as_sent(self) -> bool:
        """Whether replicas hold rows as sent, in another type than the table's."""
        return bool(self.value_type and self.value_type.tbe_bits)


def spec_record(spec: TableSpec) -> dict[str, Any]:
    """The record of a table's spec."""
    return {
        "name": spec.name,
        "rows": spec.rows,
        "dim": spec.dim,
        "dtype": spec.dtype.str,
        "kind": spec.kind.value,
        "of": spec.of,
        "sizes": None if spec.sizes is None else list(spec.sizes),
        "aliases": list(spec.aliases),
    }


def spec_of_record(record: Mapping[str, Any]) -> TableSpec:
    """The table spec in a record."""
    kind = TableKind(record["kind"])
    dtype = np.dtype(record["dtype"])
    sizes, aliases = record["sizes"], tuple(record["aliases"])
    return TableSpec(
        record["name"],
        record["rows"],
        record["dim"],
        dtype,
        kind,
        record["of"],
        None if sizes is None else tuple(sizes),
        aliases,
    )


def form_of_record(record: Mapping[str, Any], spec: TableSpec) -> TableForm:
    """The form in a record, for table `spec`, which may have grown since."""
    spec = replace(spec, rows=record["rows"])
    value_type = ValueType(record["value_type"]) if record["value_type"] else None
    return TableForm(spec, value_type, Mode(record["mode"]))

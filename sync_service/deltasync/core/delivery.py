"""In which form a table is sent to the replicas of a consumer."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from deltasync.core.digests import RowDigests, row_digests
from deltasync.core.rows import Ids, Mask, Values
from deltasync.core.tables import EncodedSpec, Numbered, TableKind, TableSpec
from deltasync.core.value_types import Distances, Encoded, ValueType, compare_bits, compare_values, own_type


class Mode(Numbered):
    """What is sent of a row: its values, or only that it has changed, and by how much."""

    EMBEDDINGS = "embeddings", 1
    IDS = "ids", 2


@dataclass(frozen=True, kw_only=True)
class HeldSpec(EncodedSpec):
    """A table as replicas hold it whose rows are sent in another type than their own.

    Made for an inference TBE, rows are held as they are sent: `dim` is their width in bytes.

    Attributes:
        value_type: in which they are sent.
        table_dim: values of a row.
    """

    value_type: ValueType
    table_dim: int


def value_type_of(table: TableSpec) -> ValueType:
    """The type in which the rows of an embedding table come to who holds it."""
    return table.value_type if isinstance(table, HeldSpec) else own_type(table)


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

    def check(self) -> None:
        """Check that the table's rows can be sent so.

        Raises:
            InvalidInput: they cannot.
        """
        if self.value_type:
            self.value_type.check(self.spec)

    @property
    def encoded_spec(self) -> TableSpec:
        """The shape and type in which its rows are held."""
        if self.value_type:
            return self.value_type.encoded_spec(self.spec)
        return EncodedSpec(**vars(self.spec))

    @property
    def held_spec(self) -> TableSpec:
        """The table as replicas hold it: its rows decoded, but for those made for an inference TBE."""
        if self.value_type is None or self.mode is Mode.IDS or self.value_type is own_type(self.spec):
            return self.spec
        held = self.encoded_spec if self.held_as_sent else self.spec
        return HeldSpec(**vars(held), value_type=self.value_type, table_dim=self.spec.dim)

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

    def held(self, encoded: Encoded) -> Values:
        """The rows ([n, dim of `held_spec`]) that replicas hold which are sent encoded ones ([n, width])."""
        return encoded if self.held_as_sent else self.decode(encoded)

    def compare(self, rows: Values, held: Encoded, ids: Ids) -> tuple[Distances, Mask]:
        """How far rows of a table are from what replicas hold of it.

        Args:
            rows: [N, D] rows of the table.
            held: [M, width] rows as they are held and sent.
            ids: [n] which rows of both to compare.

        Returns:
            The L2 norms ([n] float64, never infinite) of the rows less what those held stand for, 0 where rows are
            not trained; and which rows ([n] bool) would be encoded as other bits than those held.
        """
        if self.value_type:
            return self.value_type.compare(rows, held, ids)
        if self.spec.kind.trained:
            return compare_values(rows, held, ids)
        return np.zeros(len(ids)), compare_bits(rows, held, ids)

    def held_digests(self, encoded: Encoded) -> RowDigests:
        """The digests [n] of the rows that replicas hold which are sent encoded ones ([n, width])."""
        if self.value_type is None or self.held_as_encoded:
            return row_digests(encoded)
        return self.value_type.decoded_digests(encoded, self.spec.dtype)

    @property
    def bitwise(self) -> bool:
        """Whether rows are encoded as the bits that they are in the table."""
        return self.value_type is None or self.value_type.dtype == self.spec.dtype

    @property
    def held_as_encoded(self) -> bool:
        """Whether replicas hold the bits that rows are encoded as."""
        return self.bitwise or self.held_as_sent

    @property
    def held_as_sent(self) -> bool:
        """Whether replicas hold rows as they are sent, in another type than the table's."""
        return bool(self.value_type and self.value_type.tbe_bits)


def spec_record(spec: TableSpec) -> dict[str, Any]:
    """The record of what a table is."""
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
    """What the table is that a record describes."""
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


def delivery_of_record(record: Mapping[str, Any], spec: TableSpec) -> Delivery:
    """What was written down that replicas are sent of a table, which is `spec`, or was before it has grown."""
    spec = replace(spec, rows=record["rows"])
    value_type = ValueType(record["value_type"]) if record["value_type"] else None
    return Delivery(spec, value_type, Mode(record["mode"]))

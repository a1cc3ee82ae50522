"""What a replica says with an acknowledgement, of tables by slot."""

from collections.abc import Sequence

import numpy as np

from deltasync.core.delivery import Delivery
from deltasync.core.errors import InvalidInput
from deltasync.core.id_sets import distinct
from deltasync.core.rows import Ids
from deltasync.core.tables import ID_TYPE
from deltasync.v1 import subscribe_pb2, tables_pb2
from deltasync.wire.id_messages import MOST_IDS


def check_ack(ack: subscribe_pb2.Ack, deliveries: Sequence[Delivery]) -> None:
    """Check that an ack is of tables that there are, each once at most, and of no more rows than are asked for at
    once.

    Raises:
        InvalidInput: it is not.
    """
    tables, rows = len(deliveries), sum(len(each.ids) for each in ack.wanted)
    if rows > MOST_IDS:
        raise InvalidInput(f"an ack that wants {rows} rows, at most {MOST_IDS} are allowed")
    if (most := max(len(ack.sums), len(ack.wanted), len(ack.unbound))) > tables:
        raise InvalidInput(f"an ack of {most} tables, but there are only {tables}")
    slots = [*(each.slot for each in ack.sums), *(each.table for each in ack.wanted), *ack.unbound]
    if unknown := [slot for slot in slots if slot >= tables]:
        raise InvalidInput(f"an ack of table {unknown[0]}, but there are only {tables}")


def unbound(ack: subscribe_pb2.Ack, deliveries: Sequence[Delivery]) -> tuple[str, ...]:
    """Names of the tables that a replica does not hold: those it names, and those alone without a checksum."""
    everything = range(len(deliveries))
    shown = {each.slot for each in ack.sums} or everything
    lacking = {*ack.unbound, *set(everything).difference(shown)}
    return tuple(deliveries[slot].spec.name for slot in sorted(lacking))


def rows_of(wanted: tables_pb2.WantedRows, deliveries: Sequence[Delivery]) -> Ids:
    """The rows that a replica wants again, as far as its table has them."""
    ids = np.array(wanted.ids, np.uint64)
    return distinct(ids[ids < deliveries[wanted.table].spec.rows]).astype(ID_TYPE)

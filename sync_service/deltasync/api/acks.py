"""What a replica says with an acknowledgement, of tables by slot."""

from collections.abc import Sequence

from deltasync.core.delivery import Delivery
from deltasync.core.errors import InvalidInput
from deltasync.v1 import subscribe_pb2


def check_ack(ack: subscribe_pb2.Ack, deliveries: Sequence[Delivery]) -> None:
    """Check that an ack is of tables that there are, each once at most.

    Raises:
        InvalidInput: it is not.
    """
    tables = len(deliveries)
    if (most := max(len(ack.sums), len(ack.unbound))) > tables:
        raise InvalidInput(f"an ack of {most} tables, but there are only {tables}")
    slots = [*(each.slot for each in ack.sums), *ack.unbound]
    if unknown := [slot for slot in slots if slot >= tables]:
        raise InvalidInput(f"an ack of table {unknown[0]}, but there are only {tables}")


def unbound(ack: subscribe_pb2.Ack, deliveries: Sequence[Delivery]) -> tuple[str, ...]:
    """Names of the tables that a replica does not hold: those it names, and those alone without a checksum."""
    everything = range(len(deliveries))
    shown = {each.slot for each in ack.sums} or everything
    lacking = {*ack.unbound, *set(everything).difference(shown)}
    return tuple(deliveries[slot].spec.name for slot in sorted(lacking))

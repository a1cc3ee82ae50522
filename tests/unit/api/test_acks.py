"""What an ack may say: a message of the largest size is to take no time."""

from typing import Any

import pytest

from deltasync.api.acks import check_ack
from deltasync.core.delivery import Delivery
from deltasync.core.errors import InvalidInput
from deltasync.core.tables import TableSpec
from deltasync.v1 import subscribe_pb2, tables_pb2

DELIVERIES = [Delivery.unchanged(TableSpec(name, 10, 2)) for name in ("user", "item")]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"unbound": [0, 1, 0]}, "3 tables, but there are only 2"),
        ({"sums": [tables_pb2.Checksum(slot=1)] * 3}, "3 tables, but there are only 2"),
        ({"wanted": [tables_pb2.WantedRows()] * 3}, "3 tables, but there are only 2"),
        ({"unbound": [2]}, "table 2, but there are only 2"),
        ({"wanted": [tables_pb2.WantedRows(ids=[1] * 131_073)]}, "131073 rows, at most 131072"),
    ],
)
def test_one_of_too_much_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        check_ack(subscribe_pb2.Ack(**fields), DELIVERIES)


def test_one_of_every_table_is_not() -> None:
    wanted = [tables_pb2.WantedRows(table=0, ids=[1] * 131_072), tables_pb2.WantedRows(table=1)]
    sums = [tables_pb2.Checksum(slot=1), tables_pb2.Checksum(slot=0)]
    check_ack(subscribe_pb2.Ack(wanted=wanted, sums=sums, unbound=[0, 1]), DELIVERIES)

"""What a replica asks for."""

import numpy as np
import pytest

from deltasync.client import assembler
from deltasync.client.assembler import ReleaseAssembler
from deltasync.core.delivery import Delivery
from deltasync.core.tables import TableSpec
from deltasync.v1 import subscribe_pb2
from deltasync.wire.messages import delivery_to_message


@pytest.mark.parametrize(
    ("damaged", "wanted"),
    [
        ({"a": 0, "c": 3}, {0: 0, 2: 3}),
        ({"a": 11, "b": 10}, {1: 10}),
        ({"a": 10, "b": 6, "c": 5}, {0: 10, 2: 5}),
        ({"gone": 10, "a": 10, "b": 5, "c": 1}, {0: 10, 1: 5}),
    ],
)
def test_damaged_rows_are_asked_for_as_long_as_a_message_can_hold_them(
    damaged: dict[str, int], wanted: dict[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assembler, "_WANTED_ROWS", 10)
    monkeypatch.setattr(assembler, "_WANTED_IN_ALL", 15)
    tables = [delivery_to_message(Delivery.unchanged(TableSpec(name, 100, 2))) for name in "abc"]
    arriving = ReleaseAssembler(1 << 20, set())
    arriving.begin(subscribe_pb2.SubscribeOpened(model="clicks", tables=tables))
    found = arriving.wanted({name: np.arange(rows) for name, rows in damaged.items()})
    assert {each.table: list(each.ids) for each in found} == {
        slot: list(range(rows)) for slot, rows in wanted.items()
    }

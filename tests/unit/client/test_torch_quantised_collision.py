"""Managed collision in quantised models: rows and map of a version, as in the trainer's model."""

import dataclasses
import logging
from typing import Any

import numpy as np
import pytest
from tests.support.quantised_model import TYPES, quantised, tbe_bytes
from tests.unit.client.test_torch_collision import (
    FREE,
    MAP,
    ROWS,
    USER,
    as_sequences,
    embeddings_of,
    hashed_to,
    hashing,
    model_of,
    ranges_of,
    release_of,
    rows_for,
    sorting,
)

from deltasync.client import Release, RowBatch
from deltasync.client.checksums import TargetChecksums
from deltasync.client.torch_target import TorchTarget
from deltasync.core.delivery import Delivery
from deltasync.core.digests import checksum_of
from deltasync.core.errors import Contradiction, NotFound
from deltasync.core.mode import Mode
from deltasync.core.value_types import ValueType

pytestmark = pytest.mark.filterwarnings(
    "ignore:torch.ao.quantization is deprecated", "ignore:To copy construct from a tensor"
)


def encoded(release: Release, value_type: ValueType = ValueType.INT8_TBE) -> Release:
    """The same with the embeddings as a service sends them to a consumer of quantised tables."""
    deliveries = {
        table.name: Delivery(table, value_type, Mode.EMBEDDINGS) for table in release.tables if table.kind.ranked
    }
    rows = [
        RowBatch.of_table(to.held_spec, each.ids, to.held(to.encode(each.values)))
        if (to := deliveries.get(each.table.name))
        else each
        for each in release.rows
    ]
    tables = [deliveries[each.name].held_spec if each.name in deliveries else each for each in release.tables]
    return dataclasses.replace(release, rows=rows, tables=tables)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("sequences", [False, True], ids=["bags", "sequences"])
@pytest.mark.parametrize("hashes", [False, True], ids=["sorted", "hashed"])
def test_ids_take_the_rows_and_the_values_of_the_model_quantised_anew(
    hashes: bool, sequences: bool, bits: int
) -> None:
    model = model_of(hashing() if hashes else sorting(), sequences=sequences)
    module = quantised(model, bits)
    form = as_sequences if sequences else lambda release: release
    plain, target = TorchTarget(model), TorchTarget(module)
    first = {row: hashed_to(row) if hashes else 1000 - row for row in (3, 5, 11)}
    second = {row: hashed_to(row, first[row]) if hashes else 2000 - row for row in (3, 5)}
    ranges = {} if hashes else ranges_of(2, 4000)
    releases = [
        release_of(1, resync=True, ids=first, rows={3: 1.0, 5: -2.0, 11: 0.3}, ranges=ranges),
        release_of(2, ids=second, rows={3: 2.0, 5: 3.0}),
        release_of(3, ids={3: FREE}, rows={3: 0.0}),
    ]
    known = [*first.values(), *second.values(), 3999, 77, 123456]
    for release in map(form, releases):
        plain.apply(release)
        target.apply(encoded(release, TYPES[bits][0]))
        fresh = quantised(model, bits)
        assert tbe_bytes(module) == tbe_bytes(fresh)
        assert rows_for(module, *known) == rows_for(model, *known)
        assert embeddings_of(module, *known) == embeddings_of(fresh, *known)
    assert target.bound() == {table.name for table in form(releases[0]).tables}


def test_nothing_of_a_quantised_model_stays_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    target = TorchTarget(quantised(model_of(sorting())))
    with caplog.at_level(logging.WARNING):
        target.apply(encoded(release_of(1, resync=True)))
    assert [record.message for record in caplog.records] == []


def test_without_the_map_quantised_rows_are_refused() -> None:
    module = quantised(model_of(sorting()))
    with pytest.raises(NotFound, match=f"no table brings the map {MAP.name}"):
        TorchTarget(module).apply(encoded(release_of(1, resync=True, tables=[USER])))


def test_what_a_quantised_model_holds_is_proven() -> None:
    target = TorchTarget(quantised(model_of(sorting())))
    held = TargetChecksums(target)
    release = encoded(release_of(1, resync=True, ids={1: 40, 4: 44}, rows={1: 1.0, 4: 4.0}))
    target.apply(release)
    rows: Any = np.zeros((ROWS, release.tables[0].dim), np.uint8)
    rows[release.rows[0].ids] = release.rows[0].values
    assert held.after(release)[USER.name] == checksum_of(np.arange(ROWS), rows)


def test_a_policy_that_comes_to_send_another_type_is_told_what_it_should_say() -> None:
    """It was only told that the map is of no use without its table, and not why that has no place any more."""
    target = TorchTarget(quantised(model_of(sorting())))
    target.apply(encoded(release_of(1, resync=True, ids={1: 40}, rows={1: 1.0})))
    with pytest.raises(Contradiction, match="let the consumer's policy say value_type int8-tbe"):
        target.apply(release_of(2, resync=True, ids={1: 40}, rows={1: 1.0}))

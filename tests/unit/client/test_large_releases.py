"""Large releases at their receivers: rows come several times, and changed or deleted in between."""

import asyncio
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.support.keyed_model import CHANGES, TABLES, Change, KeyedModel
from tests.support.releases import ChangingTables

from deltasync.base.errors import Damaged
from deltasync.client import CallbackTarget, NumpyTarget, Release, RowBatch, Shard, TableSpec
from deltasync.client.assembler import ReleaseAssembler, latest_rows
from deltasync.client.targets.checksums import TargetChecksums
from deltasync.client.targets.keyed_target import KeyedTarget
from deltasync.core.table_form import Mode, TableForm
from deltasync.core.value_types import ValueType
from deltasync.model.releases import FrozenRelease, ReleaseChunk
from deltasync.v1 import subscribe_pb2, tables_pb2
from deltasync.wire.messages import form_to_message
from deltasync.wire.row_messages import Columns, ReceivedRows, read_response, rows_pieces

BUDGET = 1 << 20


class Replica:
    """A target of a subscriber, without the subscriber.

    Attributes:
        target: the target.
        held: the number that it is at.
        parts: parts of first copies that it was given.
    """

    def __init__(self, made: ChangingTables, target: Any) -> None:
        self._made, self.target = made, target
        self.held = self.parts = 0
        self._checksums = None if isinstance(target, CallbackTarget) else TargetChecksums(target)
        self._assembler = ReleaseAssembler(BUDGET)

    def begin(self) -> None:
        """A new stream."""
        self._assembler = ReleaseAssembler(BUDGET, part_bytes=100)
        tables = [form_to_message(TableForm.unchanged(table.spec)) for table in self._made.tables]
        opened = subscribe_pb2.SubscribeOpened(model="clicks", tables=tables, resync=not self.held)
        self._assembler.begin(opened, in_parts=not self.held and getattr(self.target, "takes_parts", False))

    def take(self, chunks: list[ReleaseChunk]) -> None:
        for chunk in chunks:
            received = read_response(chunk.message)
            assert isinstance(received, ReceivedRows)
            for slot, columns in received.rows:
                self._assembler.add(slot, columns)
            if part := self._assembler.part():
                self.parts += 1
                self._apply(part)

    def end(self, release: FrozenRelease) -> None:
        self.take(release.chunks)
        assert release.head
        sums = [tables_pb2.Checksum(slot=slot, sum=each) for slot, each in enumerate(release.checksums)]
        end = subscribe_pb2.ReleaseEnd(rows=release.rows, whole=sorted(release.whole), sums=sums)
        end.position.history, end.position.version, end.version = "h", release.head.number, release.head.number
        checksums = self._apply(self._assembler.end(end, [table.spec for table in self._made.tables]))
        assert not self._assembler.wrong(checksums)
        self.held = release.head.number

    def _apply(self, release: Release) -> dict[str, int]:
        named = [(rows.table.name, row) for rows in release.rows for row in rows.ids.tolist()]
        assert len(named) == len(set(named))
        self.target.apply(release)
        return self._checksums.after(release) if self._checksums else {}


async def sent(made: ChangingTables, replica: Replica, meanwhile: Callable[[], None]) -> None:
    """Send a replica all that it lacks."""
    replica.begin()
    release = await made.get(replica.held)
    copying = None if isinstance(release, FrozenRelease) else release.begin()
    while copying and not isinstance(piece := await copying.next(), FrozenRelease):
        replica.take(piece)
        meanwhile()
    replica.end(piece if copying else release)  # type: ignore[arg-type]


class Dictionary:
    """What a function makes of releases: the rows of each table."""

    def __init__(self) -> None:
        self.tables: dict[str, Any] = {}

    def apply(self, release: Release) -> None:
        assert not release.more
        for table in release.tables:
            if release.resets(table) or table.name not in self.tables:
                self.tables[table.name] = np.zeros((table.rows, table.dim), table.dtype)
        for rows in release.rows:
            self.tables[rows.table.name][rows.ids] = rows.values


TARGETS: dict[str, Callable[[], Any]] = {
    "numpy": NumpyTarget,
    "numpy copies": lambda: NumpyTarget(reads="copies"),
    "keyed": KeyedTarget,
    "keyed copies": lambda: KeyedTarget(reads="copies"),
    "callback": lambda: CallbackTarget(Dictionary().apply),
}


def check(replica: Replica, made: ChangingTables, model: KeyedModel) -> None:
    """Check that a replica holds the tables as they are."""
    target = replica.target
    if isinstance(target, KeyedTarget):
        with target.reading() as now:
            for name, expected in model.expected().items():
                keys = now.tables[name].keys()
                values, _ = now.tables[name].lookup(keys)
                assert dict(zip(keys.tolist(), values[:, 0].tolist(), strict=True)) == expected
    else:
        owner: Any = getattr(target.apply, "__self__", target)
        for table in made.tables:
            assert owner.tables[table.spec.name].tobytes() == table.rows.tobytes()


@pytest.mark.parametrize("kind", TARGETS)
@given(
    before=st.lists(CHANGES, min_size=1, max_size=3),
    meanwhile=st.lists(CHANGES, max_size=8),
    block_bytes=st.integers(1, 150),
)
def test_a_target_holds_the_head_whatever_changes_while_it_is_sent(
    kind: str, before: list[Change], meanwhile: list[Change], block_bytes: int
) -> None:
    model, made = KeyedModel(), ChangingTables(TABLES, memory_bytes=0, block_bytes=block_bytes)
    replica, changes = Replica(made, TARGETS[kind]()), iter(meanwhile)

    def change(what: Change | None) -> None:
        if what:
            model.change(what)
            made.change(*model.release(model.version - 1).rows)

    async def scenario() -> None:
        for each in before:
            change(each)
        await sent(made, replica, lambda: change(next(changes, None)))
        for each in changes:  # Those that are left.
            change(each)
        await sent(made, replica, lambda: None)
        assert replica.held == made.head
        check(replica, made, model)

    asyncio.run(asyncio.wait_for(scenario(), 20))


def test_parts_of_a_first_copy_may_have_rows_again() -> None:
    table = TableSpec("user", 40, 3)
    made = ChangingTables([table], memory_bytes=0, block_bytes=5 * table.row_bytes)
    replica = Replica(made, NumpyTarget())

    def change() -> None:
        if made.head < 8:
            made.write(0, [0, 1, 2, 39])
            made.delete(0, [3, made.head % 40])

    async def scenario() -> None:
        made.write(0, range(40))
        await sent(made, replica, change)
        assert replica.parts > 3
        assert replica.target.tables["user"].tobytes() == made.tables[0].rows.tobytes()

    asyncio.run(asyncio.wait_for(scenario(), 20))


USER, ITEM = TableSpec("user", 10, 2), TableSpec("item", 10, 1)


def batch(table: TableSpec, ids: list[int], value: float | None) -> RowBatch:
    if value is None:
        return RowBatch.deletes(Shard.whole(table), ids)
    return RowBatch.of_table(table, ids, np.full((len(ids), table.dim), value, "<f4"))


def test_rows_that_come_once_need_no_memory_for_the_rest_of_their_table() -> None:
    vast = TableSpec("vast", 1 << 30, 1)
    batches = [batch(vast, [1, 2], 1.0), batch(vast, [8, 9], 2.0), batch(vast, [3, 7], None), batch(vast, [], 3.0)]
    arrived = list(batches)
    tracemalloc.start()
    try:
        assert latest_rows(arrived) == batches[:3]
        assert tracemalloc.get_traced_memory()[1] < vast.rows
    finally:
        tracemalloc.stop()


@given(st.lists(st.tuples(st.sets(st.integers(0, 9)), st.booleans()), max_size=6))
def test_each_row_is_kept_as_it_came_last_and_in_that_order(arrived: list[tuple[set[int], bool]]) -> None:
    numbered = [(sorted(ids), None if deleted else float(at)) for at, (ids, deleted) in enumerate(arrived)]
    expected = dict[int, float | None]()
    for ids, value in numbered:
        for row in ids:
            expected.pop(row, None)
            expected[row] = value  # Rows keep the order in which they came last.
    latest = latest_rows([batch(USER, ids, value) for ids, value in numbered])
    found = {row: None if each.deleted else each.values[0, 0] for each in latest for row in each.ids.tolist()}
    assert list(found.items()) == list(expected.items())
    assert sum(map(len, latest)) == len(found)


def test_norms_go_with_their_rows() -> None:
    norms = np.array([1, 2], np.float32)
    first = RowBatch.of_table(USER, [1, 2], np.empty((2, 0), np.float32), norms)
    again = RowBatch.of_table(USER, [2], np.empty((1, 0), np.float32), norms[:1] + 4)
    found = [
        (each.ids.tolist(), each.norms is not None and each.norms.tolist()) for each in latest_rows([first, again])
    ]
    assert found == [([1], [1.0]), ([2], [5.0])]


def test_rows_are_checked_against_the_digests_that_they_came_with() -> None:
    table = TableSpec("a", 9, 3)
    assembler = ReleaseAssembler(BUDGET)
    message = form_to_message(TableForm.unchanged(table))
    assembler.begin(subscribe_pb2.SubscribeOpened(model="clicks", tables=[message]))
    rows = RowBatch.of_table(table, np.arange(9), np.ones((9, 3), "<f4")).digested()
    sent = b"".join(rows_pieces(rows))
    assembler.add(0, Columns.read(memoryview(sent)))
    (found,) = assembler.end(subscribe_pb2.ReleaseEnd(rows=9)).rows
    assert found.digests is not None
    assert rows.digests is not None
    assert found.digests.tolist() == rows.digests.tolist()
    with pytest.raises(Damaged, match="1 of 9 rows do not match their digests, first row id 8"):
        assembler.add(0, Columns.read(memoryview(sent[:-1] + b"\0")))


def test_decoded_rows_keep_no_message_in_memory() -> None:
    table = TableSpec("a", 9, 4)
    for value_type in ValueType:
        form = TableForm(table, value_type, Mode.EMBEDDINGS)
        assembler = ReleaseAssembler(BUDGET)
        opened = subscribe_pb2.SubscribeOpened(model="clicks", tables=[form_to_message(form)])
        assembler.begin(opened)
        encoded = form.encode(np.ones((9, 4), "<f4"))
        sent = b"".join(rows_pieces(RowBatch.of_table(form.wire_spec, np.arange(9), encoded).digested()))
        assembler.add(0, Columns.read(memoryview(sent)))
        (rows,) = assembler.end(subscribe_pb2.ReleaseEnd(rows=9)).rows
        views = [np.may_share_memory(each, np.frombuffer(sent, np.uint8)) for each in (rows.ids, rows.values)]
        assert views[0] == views[1], value_type

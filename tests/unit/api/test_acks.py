"""What an ack may say, which of the releases under way it is of, and what it says of what a replica holds."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tests.support.local_model import LocalModel
from tests.support.view_scenarios import USER, changed, run

from deltasync.api.acks import AHEAD, Acked, Credit, DeliveryTimes, SentRelease, SentReleases, check_ack
from deltasync.base.clock import steady_ns
from deltasync.base.errors import InvalidInput
from deltasync.consumers.consumer import Consumer, Replica
from deltasync.core.table_form import TableForm
from deltasync.core.tables import TableSpec
from deltasync.model.releases import NO_TABLES, FrozenRelease, Head
from deltasync.v1 import subscribe_pb2, tables_pb2

DELIVERIES = [TableForm.unchanged(TableSpec(name, 10, 2)) for name in ("user", "item")]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"unbound": [0, 1, 0]}, "3 tables, but there are only 2"),
        ({"sums": [tables_pb2.Checksum(slot=1)] * 3}, "3 tables, but there are only 2"),
        ({"unbound": [2]}, "table 2, but there are only 2"),
    ],
)
def test_an_ack_of_too_much_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidInput, match=said):
        check_ack(subscribe_pb2.Ack(**fields), DELIVERIES)


def test_an_ack_of_every_table_is_taken() -> None:
    sums = [tables_pb2.Checksum(slot=1), tables_pb2.Checksum(slot=0)]
    check_ack(subscribe_pb2.Ack(sums=sums, unbound=[0, 1]), DELIVERIES)


def send(sent: SentReleases, number: int, end_bytes: int) -> None:
    head = Head(number, number + 100, 0, 0)
    sent.record(FrozenRelease(head, checksums=(number, end_bytes)), head, end_bytes, 0.0)


def test_so_many_are_under_way_until_the_first_is_acknowledged() -> None:
    replica = Replica("a")
    sent = SentReleases(replica)
    for number in range(1, AHEAD + 1):
        assert not sent.full
        send(sent, number, 10 * number)
    assert (sent.full, replica.unacked, replica.unacked_ns > 0) == (True, AHEAD, True)
    assert sent.take(1, 10, {}).sent
    assert (sent.full, replica.unacked) == (False, AHEAD - 1)
    assert sent.take(AHEAD, 10 * AHEAD, {}).sent
    assert (replica.unacked, replica.unacked_ns) == (0, 0)


def test_an_ack_is_of_the_last_release_of_its_number_that_its_bytes_hold() -> None:
    """A release that repairs another one has its number."""
    replica = Replica("a")
    sent = SentReleases(replica)
    for number, end_bytes in ((1, 10), (2, 20), (2, 50), (2, 60)):
        send(sent, number, end_bytes)
    assert sent.take(2, 19, {}) == Acked(None)
    assert replica.unacked == 3
    expected: list[tuple[int, int | None, int]] = [(20, 20, 2), (49, None, 2), (60, 60, 0), (60, None, 0)]
    for received, found, left in expected:
        taken = sent.take(2, received, {}).sent
        assert (taken and taken.end_bytes) == found
        assert replica.unacked == left
    assert sent.checksums == (2, 60)


RIGHT = {0: 10, 1: 20}
WRONG = {0: 11, 1: 20}
WHOLE = frozenset({0})


class Stream:
    """What one replica is sent, and says."""

    def __init__(self) -> None:
        self._sent = SentReleases(Replica("a"))
        self._bytes = 0

    def send(self, number: int, whole: frozenset[int] = NO_TABLES, *, now: float = 0.0) -> tuple[int, int]:
        """Send a release of 50 bytes; returns its number, and how many the stream has carried with it."""
        self._bytes, head = self._bytes + 50, Head(number, number, 0, 0)
        self._sent.record(FrozenRelease(head, whole=whole, checksums=(10, 20)), head, self._bytes, now)
        return number, self._bytes

    def ack(self, release: tuple[int, int], checksums: Mapping[int, int]) -> frozenset[int]:
        """What differs, where the replica holds a release with such checksums."""
        return self.taken(release, checksums).wrong

    def taken(self, release: tuple[int, int], checksums: Mapping[int, int]) -> Acked:
        return self._sent.take(*release, checksums)

    def due(self, now: float = 0.0) -> frozenset[int]:
        """The slots of tables that are to be sent again."""
        return self._sent.due(now)


def test_a_repair_is_due_until_it_was_sent() -> None:
    """It may be dropped before: the consumer was paused."""
    stream = Stream()
    first = stream.send(1)
    taken = stream.taken(first, RIGHT)
    assert (taken.compared, taken.wrong, stream.due()) == (True, frozenset(), frozenset())
    stream.ack(stream.send(2), WRONG)
    assert [stream.due(), stream.due()] == [{0}, {0}]
    repair = stream.send(2, WHOLE)
    assert stream.due(1e9) == frozenset()
    assert [stream.ack(repair, RIGHT) for _ in range(2)] == [frozenset(), frozenset()]


def test_what_was_sent_before_the_repair_asks_for_no_other() -> None:
    stream = Stream()
    first, second = stream.send(1), stream.send(2)
    assert stream.ack(first, WRONG) == {0}
    repair = stream.send(2, WHOLE)
    assert stream.ack(second, WRONG) == {0}
    assert stream.due() == frozenset()
    assert stream.ack(repair, RIGHT) == frozenset()


def test_an_ack_that_comes_while_the_repair_is_sent_asks_for_no_other() -> None:
    stream = Stream()
    first, second = stream.send(1), stream.send(2)
    assert stream.ack(first, WRONG) == {0}
    repair = stream.due()
    assert stream.ack(second, WRONG) == {0}
    stream.send(2, repair)
    assert stream.due() == frozenset()


def test_an_ack_that_is_repeated_while_the_repair_is_sent_proves_nothing() -> None:
    stream = Stream()
    first = stream.send(1)
    assert stream.ack(first, WRONG) == {0}
    assert stream.ack(first, RIGHT) == {0}
    repair = stream.send(1, WHOLE)
    assert stream.ack(first, RIGHT) == {0}
    assert stream.ack(repair, RIGHT) == frozenset()


def test_a_repair_that_did_not_help_is_made_again_later() -> None:
    stream = Stream()
    assert stream.ack(stream.send(1), WRONG) == {0}
    assert stream.ack(stream.send(1, WHOLE), {0: 10, 1: 5}) == {1}
    assert stream.due(4.9) == frozenset()
    assert stream.due(5.0) == {1}
    assert stream.ack(stream.send(1, frozenset({1}), now=5.0), WRONG) == {0}
    assert stream.due(14.9) == frozenset()
    assert stream.due(15.0) == {0}


def test_a_repair_that_helped_makes_the_next_one_immediate() -> None:
    stream = Stream()
    for number in (1, 2):
        assert stream.ack(stream.send(number), WRONG) == {0}
        assert stream.due() == {0}
        assert stream.ack(stream.send(number, WHOLE), RIGHT) == frozenset()


def test_an_ack_of_a_later_release_stands_for_those_before() -> None:
    stream = Stream()
    first, second, third = (stream.send(number) for number in (1, 2, 3))
    assert stream.ack(second, RIGHT) == frozenset()
    assert stream.ack(first, WRONG) == frozenset()
    assert stream.ack(third, WRONG) == {0}


def test_an_ack_from_before_a_repair_does_not_acknowledge_the_repair() -> None:
    stream = Stream()
    first = stream.send(1)
    assert stream.ack(first, WRONG) == {0}
    repair = stream.send(1, WHOLE)
    for _ in range(3):
        stream.ack(first, WRONG)
    assert stream.due(1e9) == frozenset()
    assert stream.ack(repair, RIGHT) == frozenset()


def test_what_a_later_release_has_put_right_is_damaged_no_more() -> None:
    """The damaged rows were in it, and the replica shows the same again while it is kept from more."""
    stream = Stream()
    first, second = stream.send(1), stream.send(2)
    assert stream.ack(first, WRONG) == {0}
    assert stream.ack(second, RIGHT) == frozenset()
    assert stream.ack(second, RIGHT) == frozenset()
    assert stream.due() == frozenset()


def test_what_is_right_is_not_damaged_because_a_repair_is_under_way() -> None:
    stream = Stream()
    first, second = stream.send(1), stream.send(2)
    assert stream.ack(first, WRONG) == {0}
    repair = stream.send(2, WHOLE)
    for _ in range(2):
        assert stream.ack(second, RIGHT) == frozenset()
    assert stream.ack(repair, RIGHT) == frozenset()


def test_an_ack_without_checksums_makes_no_repair_immediate() -> None:
    stream = Stream()
    assert stream.ack(stream.send(1), WRONG) == {0}
    assert stream.ack(stream.send(1, WHOLE), WRONG) == {0}
    stream.ack(stream.send(2), {})
    assert stream.due(4.9) == frozenset()
    assert stream.due(5.0) == {0}


def test_of_a_table_that_came_after_a_release_was_frozen_there_are_no_rows() -> None:
    for last, wrong in ((0, frozenset()), (5, {2})):
        stream = Stream()
        assert stream.ack(stream.send(1), {**RIGHT, 2: last}) == wrong


def test_delivery_time_counts_each_release_once_and_ignores_guests(
    tmp_path: Path,
) -> None:
    """Of a trainer that has been idle for an hour a new replica would count as one that took an hour."""
    consumer, found = Consumer("predictors", "clicks", 0), list[tuple[int, int]]()

    def deliver(times: DeliveryTimes, local: LocalModel, version: int) -> None:
        times.record(SentRelease(version, version, (), frozenset(), 0, steady_ns()), local.model)
        found.append((sum(consumer.durations.ack.read()[0]), len(consumer.durations.recent)))

    async def scenario(local: LocalModel) -> None:
        times, of_a_guest = DeliveryTimes(consumer, guest=False), DeliveryTimes(consumer, guest=True)
        deliver(times, local, 1)
        await local.cut(changed(1, USER, 3))
        deliver(of_a_guest, local, 2)
        for _ in range(2):  # What repairs a release brings no other version.
            deliver(times, local, 2)
        assert times.held == 2

    run(tmp_path, scenario)
    assert found == [(0, 0), (0, 0), (1, 1), (1, 1)]


# Whether a replica still takes what it is sent.


def test_one_that_takes_nothing_of_a_release_is_given_up() -> None:
    patient, sending = Credit(1), Credit(1, quiet_seconds=-1.0)
    with patient.going_on(), sending.going_on():
        assert patient.decision.yes
        assert not sending.decision.yes
        assert sending.decision.reason == "it has received nothing of its release for 0 s"


def test_one_that_is_sent_nothing_may_be_quiet() -> None:
    """While its target applies a release, say, or while nothing is new."""
    sending = Credit(1, quiet_seconds=-1.0)
    sending.restart()
    assert sending.decision.yes
    with sending.going_on():
        assert not sending.decision.yes
    assert sending.decision.yes

"""What is under way to a replica, and what its acks are of."""

from deltasync.api.sent_releases import AHEAD, SentReleases
from deltasync.consumers.consumer import Replica
from deltasync.feeds.frozen_release import FrozenRelease, Head


def send(sent: SentReleases, number: int, end_bytes: int) -> None:
    head = Head(number, number + 100, 0, 0)
    sent.note(FrozenRelease(head, checksums=(number, end_bytes)), head, end_bytes)


def test_so_many_are_under_way_until_the_first_is_acknowledged() -> None:
    replica = Replica("a")
    sent = SentReleases(replica)
    for number in range(1, AHEAD + 1):
        assert not sent.full
        send(sent, number, 10 * number)
    assert (sent.full, replica.unacked, replica.unacked_ns > 0) == (True, AHEAD, True)
    assert sent.take(1, 10)
    assert (sent.full, replica.unacked) == (False, AHEAD - 1)
    assert sent.take(AHEAD, 10 * AHEAD)
    assert (replica.unacked, replica.unacked_ns) == (0, 0)


def test_an_ack_is_of_the_last_release_of_its_number_that_its_bytes_hold() -> None:
    """What repairs a release has its number."""
    replica = Replica("a")
    sent = SentReleases(replica)
    for number, end_bytes in ((1, 10), (2, 20), (2, 50), (2, 60)):
        send(sent, number, end_bytes)
    assert sent.take(2, 19) is None
    assert replica.unacked == 3
    expected: list[tuple[int, int | None, int]] = [(20, 20, 2), (49, None, 2), (60, 60, 0), (60, None, 0)]
    for received, found, left in expected:
        taken = sent.take(2, received)
        assert (taken and taken.end_bytes) == found
        assert replica.unacked == left
    assert sent.acknowledged
    assert sent.acknowledged.end_bytes == 60


def test_the_checksums_are_those_of_what_was_sent_last() -> None:
    sent = SentReleases(Replica("a"))
    found = [sent.checksums]
    for number in (1, 2):
        send(sent, number, 10 * number)
        found.append(sent.checksums)
    sent.take(2, 20)
    assert [*found, sent.checksums] == [(), (1, 10), (2, 20), (2, 20)]


def test_another_stream_of_the_replica_begins_with_nothing_under_way() -> None:
    replica = Replica("a")
    send(SentReleases(replica), 1, 10)
    SentReleases(replica)
    assert (replica.unacked, replica.unacked_ns) == (0, 0)

"""What a replica is told on its stream, but for the rows themselves."""

from collections.abc import Sequence

from deltasync.consumers.consumer import Consumer
from deltasync.core.delivery import Delivery
from deltasync.core.position import Decision, Position
from deltasync.feeds.feed import Feed
from deltasync.feeds.frozen_release import FrozenRelease, Head
from deltasync.v1 import subscribe_pb2
from deltasync.wire.messages import (
    checksums_to_message,
    delivery_to_message,
    mode_to_message,
    position_to_message,
)
from deltasync.wire.row_messages import fits_message


def opened(
    consumer: Consumer, feed: Feed, deliveries: Sequence[Delivery], decision: Decision
) -> subscribe_pb2.SubscribeResponse:
    """What it will be sent, and whether it goes on from what it holds."""
    message = subscribe_pb2.SubscribeOpened(
        model=consumer.model,
        head=position_to_message(feed.position),
        tables=[delivery_to_message(each) for each in deliveries],
        resync=not decision.yes,
        reason=decision.reason,
        mode=mode_to_message(deliveries[0].mode),
        model_history=feed.model_history,
        ready_within_seconds=consumer.policy.ready_within_seconds or 0,
    )
    return subscribe_pb2.SubscribeResponse(opened=message)


def no_news(
    feed: Feed, consumer: Consumer, held: Position, token: int, read_again: int = 0
) -> subscribe_pb2.SubscribeResponse:
    """That nothing is sent now to who holds what it was sent last; and what it is to read again."""
    version = feed.version_of(held.number)
    progress = subscribe_pb2.Progress(
        head=position_to_message(held),
        version=version,
        event_time_unix_ns=feed.event_time_of(version) or 0,
        token=token,
        behind_ns=_behind_ns(feed, consumer, held.number),
        version_seal=feed.model_position(version).seal,
        read_again=read_again,
    )
    return subscribe_pb2.SubscribeResponse(progress=progress)


def goes_whole(release: FrozenRelease, budget: int) -> bool:
    """Whether a release still has rows to send, and so few that they go with its end within such a budget."""
    return bool(release.chunks) and release.nbytes <= budget and fits_message(release.nbytes)


def release_end(
    feed: Feed, consumer: Consumer, release: FrozenRelease, head: Head, token: int
) -> subscribe_pb2.ReleaseEnd:
    """The end of a release that leads to `head`."""
    return subscribe_pb2.ReleaseEnd(
        position=position_to_message(Position(feed.history, head.number, head.seal)),
        step=head.step,
        step_end_unix_ns=head.step_end_unix_ns,
        rows=release.rows,
        version=head.version,
        whole=sorted(release.whole),
        sums=checksums_to_message(dict(enumerate(release.checksums))),
        event_time_unix_ns=head.event_time_unix_ns or 0,
        token=token,
        behind_ns=_behind_ns(feed, consumer, head.number),
        version_seal=feed.model_position(head.version).seal,
    )


def _behind_ns(feed: Feed, consumer: Consumer, number: int) -> int:
    """For how long a number has not been the newest that replicas are given: a pause does not count."""
    policy, pause = consumer.policy, consumer.pause
    if pause:
        return pause.behind_ns(feed.outdated(number), policy.min_interval_seconds)
    return feed.behind_ns(number, policy)

"""Reading messages of a stream."""

import base64
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deltasync.storage.brokers import Brokers
from deltasync.storage.jetstream_errors import LOOK_AT_BROKERS, refused_by_brokers
from deltasync.storage.log_store import LogUnavailable

if TYPE_CHECKING:
    from nats.aio.msg import Msg

_BATCH = 500
_SECONDS = 3
# Without a message, each by another broker maybe.
_TRIES = 10


async def read_message(brokers: Brokers, stream: str, sequence: int) -> bytes | None:
    """What a message has; None if there is none of that sequence.

    Raises:
        LogUnavailable: brokers do not answer.
    """
    # The stream's leader answers. Any broker that has a copy would answer `DIRECT.GET`: also one that has not got
    # the message yet, or one that the leader cannot reach any more, of which no answer comes.
    found = await brokers.ask(f"STREAM.MSG.GET.{stream}", {"seq": sequence})
    if "error" in found:
        if found["error"].get("code") == 404:
            return None
        raise LogUnavailable(refused_by_brokers(stream, found["error"]))
    return base64.b64decode(found["message"].get("data", ""))


@dataclass(frozen=True)
class StoredMessage:
    """A message of a stream.

    Attributes:
        sequence: its place.
        subject: what it is.
        session: of the process that has appended it, see `Fence`.
        payload: what it has; empty where only its headers were asked for.
        size: bytes of that.
    """

    sequence: int
    subject: str
    session: str
    payload: bytes
    size: int


async def messages(
    brokers: Brokers, stream: str, subjects: Sequence[str], last: int, *, headers_only: bool = False
) -> AsyncGenerator[StoredMessage]:
    """The messages of some subjects up to message `last`, in order; `headers_only` without what they have.

    The broker that sends them may lag behind the others, or go away meanwhile. So `last` has to be of one of these
    subjects: all have come once it has.

    Raises:
        LogUnavailable: brokers do not send them all.
    """
    reached, tries = 0, 0
    while reached < last:
        try:
            async with aclosing(_sent(brokers, stream, subjects, reached + 1, headers_only=headers_only)) as sent:
                async for each in sent:
                    if each.sequence > reached:
                        reached, tries = each.sequence, 0
                        yield each
                    if reached >= last:
                        return
        except LogUnavailable:
            tries += 1
            if tries == _TRIES:
                raise


async def _sent(
    brokers: Brokers, stream: str, subjects: Sequence[str], first: int, *, headers_only: bool
) -> AsyncGenerator[StoredMessage]:
    """What one broker sends, without an end; there may be some from before `first`, where it lags behind.

    Raises:
        LogUnavailable: it sends no more, or has left some out.
    """
    from nats.errors import Error

    try:
        subscription = await _subscription(brokers, stream, subjects, first, headers_only=headers_only)
        try:
            count, wanted = 0, 1
            while True:
                for each in await subscription.fetch(wanted, timeout=_SECONDS):
                    count, wanted = count + 1, max(1, min(each.metadata.num_pending, _BATCH))
                    if each.metadata.sequence.consumer != count:
                        raise LogUnavailable(f"stream {stream}: a message was lost on its way")
                    yield _stored(each)
        finally:
            await subscription.unsubscribe()
    except (Error, OSError) as error:
        raise LogUnavailable(
            f"brokers do not send what stream {stream} has: {error!r}: {LOOK_AT_BROKERS}"
        ) from error


def _stored(message: "Msg") -> StoredMessage:
    headers = message.headers or {}
    size = int(headers.get("Nats-Msg-Size", len(message.data)))
    session = headers.get("Nats-Msg-Id", "").partition(".")[0]
    return StoredMessage(int(message.metadata.sequence.stream), message.subject, session, message.data, size)


async def _subscription(
    brokers: Brokers, stream: str, subjects: Sequence[str], first: int, *, headers_only: bool
) -> Any:
    from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

    config = ConsumerConfig(
        ack_policy=AckPolicy.NONE,
        deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=first,
        filter_subjects=list(subjects),
        headers_only=headers_only,
        inactive_threshold=60,
        mem_storage=True,
        num_replicas=1,
    )
    return await brokers.client.jetstream().pull_subscribe("", stream=stream, config=config)

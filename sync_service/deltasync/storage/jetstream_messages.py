"""Reading messages of a stream."""

import base64
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deltasync.core.errors import StorageFailed
from deltasync.storage.brokers import Brokers

if TYPE_CHECKING:
    from nats.aio.msg import Msg

_BATCH = 500
_SECONDS = 10


async def read_message(brokers: Brokers, stream: str, sequence: int) -> bytes | None:
    """What a message has; None if there is none of that sequence.

    Raises:
        StorageFailed: brokers do not answer.
    """
    question = json.dumps({"seq": sequence}).encode()
    answer = await brokers.request(f"$JS.API.DIRECT.GET.{stream}", question)
    if answer.headers and answer.headers.get("Nats-Sequence") == str(sequence):
        return answer.data
    # A broker that has not got it yet may have answered: the stream's leader has.
    found = await brokers.ask(f"STREAM.MSG.GET.{stream}", {"seq": sequence})
    if "error" in found:
        if found["error"].get("code") == 404:
            return None
        raise StorageFailed(f"message {sequence} of stream {stream}: {found['error'].get('description')}")
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
    brokers: Brokers, stream: str, subject: str, *, headers_only: bool = False
) -> AsyncIterator[StoredMessage]:
    """The messages of a subject that there are, in order; `headers_only` without what they have.

    Raises:
        StorageFailed: brokers do not answer.
    """
    subscription = await _subscription(brokers, stream, subject, headers_only=headers_only)
    try:
        left = (await subscription.consumer_info()).num_pending
        while left:
            for each in await _fetch(subscription, left):
                yield _stored(each)
                left -= 1
    finally:
        await subscription.unsubscribe()


def _stored(message: "Msg") -> StoredMessage:
    headers = message.headers or {}
    size = int(headers.get("Nats-Msg-Size", len(message.data)))
    session = headers.get("Nats-Msg-Id", "").partition(".")[0]
    return StoredMessage(int(message.metadata.sequence.stream), message.subject, session, message.data, size)


async def _subscription(brokers: Brokers, stream: str, subject: str, *, headers_only: bool) -> Any:
    from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

    config = ConsumerConfig(
        ack_policy=AckPolicy.NONE,
        deliver_policy=DeliverPolicy.ALL,
        headers_only=headers_only,
        inactive_threshold=60,
        mem_storage=True,
        num_replicas=1,
    )
    return await brokers.client.jetstream().pull_subscribe(subject, stream=stream, config=config)


async def _fetch(subscription: Any, left: int) -> "list[Msg]":
    try:
        found: list[Msg] = await subscription.fetch(min(left, _BATCH), timeout=_SECONDS)
    except Exception as error:
        raise StorageFailed(f"brokers do not send what the log has: {error!r}") from error
    return found

"""Appending messages to a stream, in order, each only after the one that it follows: in the brokers' event loop.

Every message carries the sequence of the one before it, and is refused if that is not the stream's last. Several
are under way at once; where one is refused, or not acknowledged, it is looked at what the stream has since, and
what has not landed is sent again. A fence of another there ends it. What is no fence is of an owner before, of
which a message under way was refused, and a later one then happened to fit: nobody counts those, see `Index`.
"""

import asyncio
import base64
import json
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deltasync.base.backoff import backoff
from deltasync.base.errors import StorageFailed
from deltasync.log.brokers import Brokers, Fenced, LogWentBack, refused_by_brokers
from deltasync.log.jetstream_index import Names

if TYPE_CHECKING:
    from nats.aio.msg import Msg

_WINDOW_MESSAGES, _WINDOW_BYTES = 256, 16 << 20
# Without an acknowledgement for so long, it is asked what has landed.
_SILENCE_SECONDS = 3.0
ID, EXPECTED = "Nats-Msg-Id", "Nats-Expected-Last-Sequence"


@dataclass
class Message:
    """One to be appended."""

    subject: str
    payload: bytes
    landed: Callable[[int], None]
    id: str = ""
    sequence: int = 0
    failed: Callable[[StorageFailed], None] = field(default=lambda _: None)


@dataclass(frozen=True)
class Fence:
    """The message from which on a process is the owner.

    Attributes:
        session: by which all that it appends from there on is known.
        created: when the stream was made, as brokers say it: of another stream of that name it is another.
        sequence: of the message.
    """

    session: str
    created: str
    sequence: int


class Sender:
    """Appends to one stream. In the brokers' event loop, but for `trouble` and `lost`, which any thread reads.

    Attributes:
        trouble: why nothing is acknowledged now; empty if it is.
        lost: why nothing is appended ever again; None while it is.
        acknowledged: the last message that has landed.
    """

    def __init__(self, brokers: Brokers, names: Names, fence: "Fence") -> None:
        self._brokers, self._stream, self._fences = brokers, names.stream, names.fences
        self._session, self._created = fence.session, fence.created
        self.trouble = ""
        self.lost: StorageFailed | None = None
        self.acknowledged = self._next = fence.sequence
        self._last_id, self._count = message_id(fence.session, 0), 0
        self._waiting, self._under_way = deque[Message](), deque[Message]()
        self._bytes = 0
        self._inbox = f"_INBOX.{uuid.uuid4().hex}"
        self._attempt = 0
        self._moved, self._room = asyncio.Event(), asyncio.Event()
        self._broken = False
        self._sound = asyncio.Event()
        self._sound.set()

    async def run(self) -> None:
        """Append what comes, until it is lost or cancelled."""
        subscription = await self._brokers.client.subscribe(f"{self._inbox}.*", cb=self._take_answer)
        try:
            while self.lost is None:
                await self._send_what_fits()
                await self._wait()
                if self._broken:
                    await self._find_out()
        finally:
            await subscription.unsubscribe()

    def append(self, message: Message) -> None:
        """Have a message appended, after all before it."""
        if self.lost:
            message.failed(self.lost)
            return
        self._count += 1
        message.id = message_id(self._session, self._count)
        self._waiting.append(message)
        self._moved.set()

    def lose(self, error: StorageFailed) -> None:
        """Append nothing any more; who waits is told why."""
        self.lost = self.lost or error
        for each in (*self._under_way, *self._waiting):
            each.failed(self.lost)
        self._under_way.clear()
        self._waiting.clear()
        self._moved.set()
        self._sound.set()

    async def check(self) -> None:
        """See whether the stream has what it has acknowledged, and nothing of anybody else."""
        if self.lost or self._under_way or self._waiting or self._broken:
            return  # Who appends sees it.
        expected, landed = self.acknowledged, await self._landed()
        found = await self._message(landed) if landed == expected else None
        if self._under_way or self._waiting or self.acknowledged != expected:
            return  # Meanwhile somebody has.
        if landed != expected or (found and found.id != self._last_id):
            self._break("")
            await self._sound.wait()

    async def _send_what_fits(self) -> None:
        while self._waiting and not self._broken and self._fits():
            message = self._waiting.popleft()
            message.sequence = self._next + 1
            self._next += 1
            self._under_way.append(message)
            self._bytes += len(message.payload)
            await self._publish(message)

    def _fits(self) -> bool:
        return not self._under_way or (len(self._under_way) < _WINDOW_MESSAGES and self._bytes < _WINDOW_BYTES)

    async def _publish(self, message: Message) -> None:
        headers = {ID: message.id, EXPECTED: str(message.sequence - 1)}
        reply = f"{self._inbox}.{self._attempt}"
        try:
            await self._brokers.client.publish(message.subject, message.payload, reply, headers)
        except Exception as error:  # noqa: BLE001  # whatever it is, it is asked what has landed
            self._break(f"brokers take nothing: {error!r}")

    async def _wait(self) -> None:
        self._moved.clear()
        if self._broken or self.lost or (self._waiting and self._fits()):
            return
        before = self.acknowledged
        try:
            await asyncio.wait_for(self._moved.wait(), _SILENCE_SECONDS if self._under_way else None)
        except TimeoutError:
            if self._under_way and self.acknowledged == before:
                self._break("brokers do not acknowledge what they are sent")

    async def _take_answer(self, answer: "Msg") -> None:
        if answer.subject != f"{self._inbox}.{self._attempt}":
            return  # Of an earlier attempt: what has landed is known by now.
        found = _parsed(answer)
        self._moved.set()
        if not found.get("seq"):
            self._break(f"a broker refuses messages: {found.get('error', {}).get('description', 'no answer')}")
        elif self._under_way and found["seq"] == self._under_way[0].sequence:
            self._land()
        else:
            self._break("")

    def _break(self, trouble: str) -> None:
        """Have it looked at what the stream has."""
        self._broken, self.trouble = True, trouble or self.trouble
        self._sound.clear()
        self._moved.set()

    def _land(self) -> None:
        message = self._under_way.popleft()
        self._bytes -= len(message.payload)
        self.acknowledged, self._last_id, self.trouble = message.sequence, message.id, ""
        message.landed(message.sequence)

    async def _find_out(self) -> None:
        """Look at what has landed, until it is known; send again what has not."""
        for pause in backoff():
            if self.lost:
                return
            try:
                await self._settle(await self._landed())
            except StorageFailed as error:
                self.trouble = str(error)
                await asyncio.sleep(pause)
            else:
                break
        self._attempt += 1
        self._waiting.extendleft(reversed(self._under_way))
        self._under_way.clear()
        self._bytes, self._next, self._broken = 0, self.acknowledged, False
        self._sound.set()

    async def _settle(self, landed: int) -> None:
        """Have what has landed, up to this message, or lose the stream."""
        if landed < self.acknowledged:
            self.lose(self._went_back(landed))
            return
        last = await self._message(self.acknowledged)
        if last and last.id != self._last_id:
            self.lose(self._went_back(landed))
            return
        for sequence in range(self.acknowledged + 1, landed + 1):
            found = await self._message(sequence)
            if found and self._under_way and found.id == self._under_way[0].id:
                self._under_way[0].sequence = sequence
                self._land()
            elif found and found.subject == self._fences:
                self.lose(Fenced(f"another process has appended to stream {self._stream}: it is the owner now"))
                return
            else:
                self.acknowledged, self._last_id = sequence, found.id if found else ""

    async def _landed(self) -> int:
        """The stream's last message; -1 where the stream is gone.

        Raises:
            StorageFailed: nobody can say.
        """
        found = await self._brokers.ask(f"STREAM.INFO.{self._stream}")
        if "error" in found:
            if found["error"].get("code") == 404:
                return -1
            raise StorageFailed(refused_by_brokers(self._stream, found["error"]))
        return int(found["state"]["last_seq"]) if found["created"] == self._created else -1

    async def _message(self, sequence: int) -> "Found | None":
        """A message of the stream; None if it was purged.

        Raises:
            StorageFailed: nobody can say.
        """
        found = await self._brokers.ask(f"STREAM.MSG.GET.{self._stream}", {"seq": sequence})
        if "error" in found:
            if found["error"].get("code") == 404:
                return None
            raise StorageFailed(refused_by_brokers(self._stream, found["error"]))
        headers = base64.b64decode(found["message"].get("hdrs", "")).decode(errors="replace")
        return Found(found["message"]["subject"], _header(headers, ID))

    def _went_back(self, landed: int) -> LogWentBack:
        what = "is gone" if landed < 0 else f"has others than the {self.acknowledged} messages it had acknowledged"
        return LogWentBack(
            f"stream {self._stream} {what}: brokers have lost what they had acknowledged: what is missing comes "
            "from a checkpoint and the trainer"
        )


@dataclass(frozen=True)
class Found:
    """A message of a stream."""

    subject: str
    id: str


def _header(headers: str, name: str) -> str:
    lines = (line.partition(":") for line in headers.split("\r\n"))
    return next((value.strip() for key, _, value in lines if key == name), "")


def message_id(session: str, number: int) -> str:
    """By which a message is known, however often it is sent."""
    return f"{session}.{number}"


def _parsed(answer: "Msg") -> dict[str, Any]:
    try:
        found = json.loads(answer.data or b"{}")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}

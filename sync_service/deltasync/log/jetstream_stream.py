"""One JetStream stream: subjects of its messages, appending in order, and reading."""

import asyncio
import base64
import json
import uuid
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deltasync.base.errors import StorageFailed
from deltasync.base.waiting import backoff
from deltasync.log.brokers import LOOK_AT_BROKERS, Brokers, Fenced, LogWentBack, refused_by_brokers
from deltasync.log.log_store import Address, LogUnavailable

if TYPE_CHECKING:
    from nats.aio.msg import Msg

_WINDOW_MESSAGES, _WINDOW_BYTES = 256, 16 << 20
# After this time without an acknowledgement, the sender reads from the stream which messages arrived.
_SILENCE_SECONDS = 3.0
ID, EXPECTED = "Nats-Msg-Id", "Nats-Expected-Last-Sequence"


class Sender:
    """Appends to one stream in order. Runs in the brokers' event loop; any thread may read `trouble` and `lost`.

    Every message carries the sequence of the one before it, and brokers refuse a message that does not follow the
    last one of the stream. Several messages are under way at once. If one is refused or not acknowledged, the
    sender reads which arrived, and sends the others again. It stops at the fence of another process. Other foreign
    messages come from an earlier owner, whose message happened to fit after brokers had refused the one before it.
    They are ignored; see `JetStreamLogs`.

    Attributes:
        lost: why the sender has stopped; None while it runs.
        acknowledged: the sequence of the last acknowledged message.
    """

    def __init__(self, brokers: Brokers, subjects: "LogSubjects", fence: "Fence") -> None:
        self._brokers, self._fence = brokers, fence
        self._stream, self._fences = subjects.stream, subjects.fences
        self._silence = self._unsafe = ""  # Why no message is acknowledged, and why none is sent.
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

    @property
    def trouble(self) -> str:
        """Why no message is acknowledged at present; empty if all is well."""
        return self._unsafe or self._silence

    async def run(self) -> None:
        """Append messages as they arrive, until the stream is lost or the task is cancelled."""
        subscription = await self._brokers.client.subscribe(f"{self._inbox}.*", cb=self._take_answer)
        try:
            while self.lost is None:
                await self._send_what_fits()
                await self._wait()
                if self._broken:
                    await self._find_out()
        finally:
            await subscription.unsubscribe()

    def append(self, message: "Message") -> None:
        """Append a message after all earlier ones."""
        if self.lost:
            message.failed(self.lost)
            return
        self._count += 1
        message.id = message_id(self._fence.session, self._count)
        self._waiting.append(message)
        self._moved.set()

    def lose(self, error: StorageFailed) -> None:
        """Stop appending, and fail all pending messages."""
        self.lost = self.lost or error
        for each in (*self._under_way, *self._waiting):
            each.failed(self.lost)
        self._under_way.clear()
        self._waiting.clear()
        self._moved.set()
        self._sound.set()

    async def check(self) -> None:
        """Check that the stream has all acknowledged messages and no foreign ones; if not, set `lost`.

        While the stream discards messages or may do so, send none: see `unsafe`.
        """
        if not self.lost and (info := await self._info()):
            self._unsafe = unsafe(info, self._brokers.options.replicas)
            self._moved.set()
        if self.lost or self._under_way or self._waiting or self._broken:
            return  # Appending checks it too.
        expected, landed = self.acknowledged, await self._landed()
        message = await self._read(landed) if landed == expected else None
        if self._under_way or self._waiting or self.acknowledged != expected:
            return  # Something was appended meanwhile.
        if landed != expected or (message and message.id != self._last_id):
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
        if self._unsafe:
            return False
        return not self._under_way or (len(self._under_way) < _WINDOW_MESSAGES and self._bytes < _WINDOW_BYTES)

    async def _publish(self, message: "Message") -> None:
        headers = {ID: message.id, EXPECTED: str(message.sequence - 1)}
        reply = f"{self._inbox}.{self._attempt}"
        try:
            await self._brokers.client.publish(message.subject, message.payload, reply, headers)
        except Exception as error:  # noqa: BLE001  # `_find_out` reads which messages arrived.
            self._break(f"brokers accept no message: {error!r}")

    async def _wait(self) -> None:
        self._moved.clear()
        if self._broken or self.lost or (self._waiting and self._fits()):
            return
        before = self.acknowledged
        try:
            await asyncio.wait_for(self._moved.wait(), _SILENCE_SECONDS if self._under_way else None)
        except TimeoutError:
            if self._under_way and self.acknowledged == before:
                self._break("brokers do not acknowledge messages")

    async def _take_answer(self, answer: "Msg") -> None:
        if answer.subject != f"{self._inbox}.{self._attempt}":
            return  # It answers an earlier attempt, whose result `_find_out` has read.
        try:
            fields = json.loads(answer.data or b"{}")
        except ValueError:
            fields = {}
        fields = fields if isinstance(fields, dict) else {}
        self._moved.set()
        if not fields.get("seq"):
            self._break(f"a broker refuses messages: {fields.get('error', {}).get('description', 'no answer')}")
        elif self._under_way and fields["seq"] == self._under_way[0].sequence:
            self._land()
        else:
            self._break("")

    def _break(self, trouble: str) -> None:
        """Stop sending until `_find_out` has read the stream."""
        self._broken, self._silence = True, trouble or self._silence
        self._sound.clear()
        self._moved.set()

    def _land(self) -> None:
        message = self._under_way.popleft()
        self._bytes -= len(message.payload)
        self.acknowledged, self._last_id, self._silence = message.sequence, message.id, ""
        message.landed(message.sequence)

    async def _find_out(self) -> None:
        """Read which messages arrived, retrying until brokers answer, and queue the others again."""
        for pause in backoff():
            if self.lost:
                return
            try:
                await self._settle(await self._landed())
            except StorageFailed as error:
                self._silence = str(error)
                await asyncio.sleep(pause)
            else:
                break
        self._attempt += 1
        self._waiting.extendleft(reversed(self._under_way))
        self._under_way.clear()
        self._bytes, self._next, self._broken = 0, self.acknowledged, False
        self._sound.set()

    async def _settle(self, landed: int) -> None:
        """Acknowledge the messages that arrived, up to sequence `landed`, or lose the stream."""
        if landed < self.acknowledged:
            self.lose(self._went_back(landed))
            return
        last = await self._read(self.acknowledged)
        if last and last.id != self._last_id:
            self.lose(self._went_back(landed))
            return
        for sequence in range(self.acknowledged + 1, landed + 1):
            message = await self._read(sequence)
            if message and self._under_way and message.id == self._under_way[0].id:
                self._under_way[0].sequence = sequence
                self._land()
            elif message and message.subject == self._fences:
                self.lose(Fenced(f"another process has appended to stream {self._stream}: it is the owner now"))
                return
            else:
                self.acknowledged, self._last_id = sequence, message.id if message else ""

    async def _landed(self) -> int:
        """The sequence of the stream's last message; -1 if the stream no longer exists."""
        info = await self._info()
        return int(info["state"]["last_seq"]) if info else -1

    async def _info(self) -> dict[str, Any] | None:
        """Settings and state of the stream; None if it no longer exists."""
        answer = await self._brokers.ask(f"STREAM.INFO.{self._stream}")
        if "error" in answer:
            if answer["error"].get("code") == 404:
                return None
            raise StorageFailed(refused_by_brokers(self._stream, answer["error"]))
        return answer if answer["created"] == self._fence.created else None

    async def _read(self, sequence: int) -> "StoredMessage | None":
        return await read_message(self._brokers, self._stream, sequence)

    def _went_back(self, landed: int) -> LogWentBack:
        what = "no longer exists" if landed < 0 else f"no longer has all messages up to {self.acknowledged}"
        return LogWentBack(
            f"stream {self._stream} {what}: the brokers lost acknowledged writes; a checkpoint and the trainer "
            "supply the missing rows"
        )


# Settings that make a stream discard messages, with the values that do not, and the flags that set these.
_LIMITS = {
    "max_msgs": ((None, 0, -1), "--max-msgs=-1"),
    "max_bytes": ((None, 0, -1), "--max-bytes=-1"),
    "max_age": ((None, 0), "--max-age=0s"),
    "max_msgs_per_subject": ((None, 0, -1), "--max-msgs-per-subject=-1"),
    "discard": (("new",), "--discard=new"),
    "retention": (("limits",), "--retention=limits"),
}


def unsafe(info: dict[str, Any], replicas: int) -> str:
    """How a stream has lost acknowledged messages or could lose them, and what to do; empty if neither."""
    config = info["config"]
    name = config["name"]
    # The first message is the first owner's fence, which no owner removes.
    if info["state"]["first_seq"] > int(config.get("first_seq") or 1):
        return (
            f"stream {name} has lost acknowledged writes: its first messages were discarded: restore it from a "
            f"backup of the brokers; or stop the services, and remove it (nats stream rm {name}): they start from "
            "the newest checkpoint, and the trainer sends later rows"
        )
    wrong = {each: flag for each, (right, flag) in _LIMITS.items() if config.get(each) not in right}
    if config["num_replicas"] < replicas:
        wrong["num_replicas"] = f"--replicas={replicas}"
    if config["storage"] != "file":
        wrong = {"storage": ""}
    if not wrong:
        return ""
    remedy = f"nats stream edit {name} {' '.join(wrong.values())}"
    if "storage" in wrong:
        remedy = "give the service another --log-prefix"
    settings = ", ".join(f"{each} {config.get(each)}" for each in wrong)
    return f"stream {name} could lose acknowledged writes: {settings}: {remedy}"


@dataclass
class Message:
    """A message to append.

    Attributes:
        landed: called with its sequence once brokers acknowledge it.
        failed: called instead if it cannot be appended.
    """

    subject: str
    payload: bytes
    landed: Callable[[int], None]
    id: str = ""
    sequence: int = 0
    failed: Callable[[StorageFailed], None] = field(default=lambda _: None)


@dataclass(frozen=True)
class Fence:
    """The message by which a process becomes the owner.

    Attributes:
        session: prefix of the ids of all messages that the process appends after it.
        created: creation time of the stream, which differs if a stream of the same name is made again.
        sequence: the sequence of the fence itself.
    """

    session: str
    created: str
    sequence: int


def message_id(session: str, number: int) -> str:
    """The id of a message, which stays the same when it is sent again."""
    return f"{session}.{number}"


_DOT = "~"  # Names of models and consumers never contain it.


class LogSubjects:
    """The stream of a model's log, and the subjects of its messages."""

    def __init__(self, prefix: str, model: str) -> None:
        self.stream = f"{prefix}_{_written(model)}"
        self._root = f"{prefix}.{_written(model)}"
        self.subjects = f"{self._root}.>"
        self.rows, self.notes = f"{self._root}.rows.>", f"{self._root}.notes"
        self.fences = f"{self._root}.fences"

    def piece(self, address: Address, piece: int, pieces: int) -> str:
        """The subject of one piece of a record."""
        return f"{self._rows_of(address.stream)}.{'.'.join(map(str, address[1:]))}.{piece}.{pieces}"

    def records(self, stream: str, number: int | None = None, part: int | None = None) -> str:
        """The subjects of all records of a stream, of one number, or of one part of a number."""
        path = [str(each) for each in (number, part) if each is not None]
        return ".".join([self._rows_of(stream), *path, ">"])

    def parsed(self, subject: str) -> tuple[Address, int, int]:
        """The record, the number of the piece and the count of pieces from a subject."""
        try:
            kind, *numbers = subject.removeprefix(f"{self._root}.rows.").split(".")
            number, part, index, piece, pieces = map(int, numbers)
        except ValueError as error:
            raise StorageFailed(
                f"stream {self.stream} has a message that is not part of the log: {subject}: give the service "
                "another --log-prefix"
            ) from error
        return Address(_read(kind), number, part, index), piece, pieces

    def _rows_of(self, stream: str) -> str:
        return f"{self._root}.rows.{_written(stream)}"


def model_of(prefix: str, stream: str) -> str | None:
    """The model whose log a stream is; None if the stream is not a log."""
    before, _, name = stream.partition("_")
    return _read(name) if before == prefix and name else None


def _written(name: str) -> str:
    return name.replace(".", _DOT)


def _read(name: str) -> str:
    return name.replace(_DOT, ".")


@dataclass(frozen=True)
class StoredMessage:
    """A message of a stream. `payload` is empty if only headers were requested; `size` is that of the content."""

    sequence: int
    subject: str
    id: str
    payload: bytes
    size: int

    @property
    def session(self) -> str:
        """The session of the process that appended it, see `Fence`."""
        return self.id.partition(".")[0]


async def read_message(brokers: Brokers, stream: str, sequence: int) -> StoredMessage | None:
    """Read a message; None if no message has that sequence."""
    # The stream's leader answers this request. Any broker with a copy may answer `DIRECT.GET`, even one that still
    # lacks the message, and none does if the leader cannot reach it.
    answer = await brokers.ask(f"STREAM.MSG.GET.{stream}", {"seq": sequence})
    if "error" in answer:
        if answer["error"].get("code") == 404:
            return None
        raise LogUnavailable(refused_by_brokers(stream, answer["error"]))
    message = answer["message"]
    headers = base64.b64decode(message.get("hdrs", "")).decode(errors="replace")
    lines = (line.partition(":") for line in headers.split("\r\n"))
    payload = base64.b64decode(message.get("data", ""))
    found = next((value.strip() for key, _, value in lines if key == ID), "")
    return StoredMessage(sequence, message["subject"], found, payload, len(payload))


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How a stream is read."""

    headers_only: bool = False
    batch: int = 500  # Most messages that are asked for at once.
    seconds: float = 3  # Within which the next message arrives.
    tries: int = 10  # Attempts without a new message. Each may reach another broker.


async def messages(
    brokers: Brokers, stream: str, subjects: Sequence[str], last: int, options: ReadOptions = ReadOptions()
) -> AsyncGenerator[StoredMessage]:
    """Read the messages of some subjects up to message `last`, in order.

    The sending broker may lag behind the others, or go away meanwhile. Message `last` must have one of these
    subjects: once it has arrived, all have.
    """
    reached, tries = 0, 0
    while reached < last:
        try:
            async with aclosing(_sent(brokers, stream, subjects, reached + 1, options)) as sent:
                async for each in sent:
                    if each.sequence > reached:
                        reached, tries = each.sequence, 0
                        yield each
                    if reached >= last:
                        return
        except LogUnavailable:
            tries += 1
            if tries == options.tries:
                raise


async def _sent(
    brokers: Brokers, stream: str, subjects: Sequence[str], first: int, options: ReadOptions
) -> AsyncGenerator[StoredMessage]:
    """Read messages from one broker, without an end. If it lags behind, some may be from before `first`."""
    from nats.errors import Error
    from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy

    config = ConsumerConfig(
        ack_policy=AckPolicy.NONE,
        deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
        opt_start_seq=first,
        filter_subjects=list(subjects),
        headers_only=options.headers_only,
        inactive_threshold=60,
        mem_storage=True,
        num_replicas=1,
    )
    try:
        subscription = await brokers.client.jetstream().pull_subscribe("", stream=stream, config=config)
        try:
            count, size = 0, 1
            while True:
                for each in await subscription.fetch(size, timeout=options.seconds):
                    count, size = count + 1, max(1, min(each.metadata.num_pending, options.batch))
                    if each.metadata.sequence.consumer != count:
                        raise LogUnavailable(f"stream {stream}: a message was lost on the way")
                    yield _stored(each)
        finally:
            await subscription.unsubscribe()
    except (Error, OSError) as error:
        raise LogUnavailable(
            f"brokers do not send the messages of stream {stream}: {error!r}: {LOOK_AT_BROKERS}"
        ) from error


def _stored(message: "Msg") -> StoredMessage:
    headers = message.headers or {}
    size = int(headers.get("Nats-Msg-Size", len(message.data)))
    sequence, number = int(message.metadata.sequence.stream), headers.get(ID, "")
    return StoredMessage(sequence, message.subject, number, message.data, size)

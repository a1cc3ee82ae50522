"""Connection to the brokers that several processes share, and its errors."""

import asyncio
import contextlib
import json
import ssl
import threading
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from deltasync.base.clock import Durations
from deltasync.base.errors import InvalidInput, StorageFailed
from deltasync.log.log_store import LogUnavailable
from deltasync.log.volume import Refusal, Volume

if TYPE_CHECKING:
    from nats.aio.client import Client
    from nats.aio.msg import Msg

LOOK_AT_BROKERS = "check the brokers"


class Fenced(StorageFailed):
    """Another owner has appended to the log; this process can no longer write to it."""


class LogWentBack(StorageFailed):
    """The log lost acknowledged writes, or no longer exists."""


def refused_by_brokers(stream: str, error: dict[str, Any]) -> str:
    """The text and the remedy for an error in a broker's answer."""
    return f"stream {stream}: {error.get('description')}: {LOOK_AT_BROKERS}"


T = TypeVar("T")

_SCHEMES = ("nats", "tls")
_CONNECT_SECONDS, _ANSWER_SECONDS = 5.0, 5.0
_PING_SECONDS, _PINGS = 2, 3


@dataclass(frozen=True, kw_only=True)
class BrokerOptions:
    """Which brokers keep the logs, and how to reach them.

    Attributes:
        urls: brokers of one cluster, each nats://HOST:PORT or tls://HOST:PORT.
        prefix: begins the names of all streams and buckets. Services with different prefixes share nothing.
        replicas: number of brokers that keep each log.
        max_bytes: largest size of the rows in a model's log.
        credentials: file with a JWT and a key; None = the brokers need none.
        ca: PEM file of the brokers' CA; None = the CAs of this machine.
        cert: PEM file of the service's certificate; None = no certificate.
        key: PEM file of the certificate's key.
        monitors: URLs of the brokers' monitoring ports, which report whether brokers sync each write to disk.
        notes_bytes: above this size, and several times that of the small records, their messages are compacted.
        note_bytes: size of a message of compacted small records.
    """

    urls: tuple[str, ...]
    prefix: str
    replicas: int
    max_bytes: int
    credentials: Path | None = None
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    monitors: tuple[str, ...] = ()
    notes_bytes: int = 4 << 20
    note_bytes: int = 32 << 10

    def __post_init__(self) -> None:
        if not self.urls:
            raise InvalidInput("--log: no URL of a broker, expected nats://HOST:PORT")
        for url in self.urls:
            if urlsplit(url).scheme not in _SCHEMES or not urlsplit(url).hostname:
                raise InvalidInput(f"--log: {without_secrets(url)!r}, expected nats://HOST:PORT")
        if not self.prefix.isalnum() or not self.prefix.isascii():
            raise InvalidInput(f"--log-prefix: {self.prefix!r}, expected letters and digits")
        if self.replicas not in (1, 3, 5):
            raise InvalidInput(f"--log-replicas: {self.replicas}, expected 1, 3 or 5")
        if (self.cert is None) != (self.key is None):
            raise InvalidInput("--log-cert, --log-key: one is missing, expected both or neither")

    @property
    def description(self) -> str:
        """The URLs of the brokers, without secrets."""
        return ",".join(map(without_secrets, self.urls))


def without_secrets(url: str) -> str:
    """A URL without user and password."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}"


async def connect(options: BrokerOptions, name: str) -> "Client":
    """Connect to the brokers. The client reconnects by itself, however long they are away."""
    try:
        import nats
    except ModuleNotFoundError as error:
        raise StorageFailed("the NATS client is not installed: pip install 'deltasync[jetstream]'") from error
    settings: dict[str, Any] = {"user_credentials": str(options.credentials)} if options.credentials else {}
    if options.ca or options.cert or any(url.startswith("tls:") for url in options.urls):
        settings["tls"] = _tls(options)
    try:
        return await asyncio.wait_for(
            nats.connect(
                list(options.urls),
                name=name,
                max_reconnect_attempts=-1,
                reconnect_time_wait=0.2,
                connect_timeout=2,
                ping_interval=_PING_SECONDS,
                max_outstanding_pings=_PINGS,
                allow_reconnect=True,
                error_cb=_passed_over,
                **settings,
            ),
            _CONNECT_SECONDS,
        )
    except Exception as error:
        raise StorageFailed(
            f"cannot connect to any broker of {options.description}: {error!r}: check that they run, and "
            "check --log and its credentials"
        ) from error


async def _passed_over(_error: Exception) -> None:
    """Ignore the error, which also reaches the request that waits for the answer."""


def _tls(options: BrokerOptions) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=str(options.ca) if options.ca else None)
        if options.cert and options.key:
            context.load_cert_chain(options.cert, options.key)
    except (OSError, ssl.SSLError) as error:
        raise InvalidInput(f"--log-ca, --log-cert, --log-key: {error}") from error
    return context


class Brokers:
    """The brokers, usable from any thread. A thread of its own runs the event loop in which logs write."""

    def __init__(self, options: BrokerOptions, name: str) -> None:
        """Connect under `name`, which the brokers show."""
        self.options = options
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, name="brokers", daemon=True)
        self._thread.start()
        try:
            self.client = self.run(connect(options, name))
        except BaseException:
            self._stop()
            raise

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine in the thread, and wait for its result."""
        return asyncio.run_coroutine_threadsafe(what, self.loop).result()

    async def ask(self, subject: str, question: dict[str, Any] | None = None) -> dict[str, Any]:
        """Ask JetStream; its answer may be an `error`."""
        payload = json.dumps(question).encode() if question is not None else b""
        answer: dict[str, Any] = json.loads((await self.request(f"$JS.API.{subject}", payload)).data)
        return answer

    async def request(self, subject: str, payload: bytes = b"") -> "Msg":
        """Send a message, and return its answer."""
        try:
            return await self.client.request(subject, payload, timeout=_ANSWER_SECONDS)
        except Exception as error:
            raise LogUnavailable(
                f"brokers {self.options.description} do not answer: {error!r}: {LOOK_AT_BROKERS}"
            ) from error

    def close(self) -> None:
        """End the connection and the thread."""
        with contextlib.suppress(Exception):  # The connection may be in any state.
            self.run(asyncio.wait_for(self.client.close(), _ANSWER_SECONDS))
        self._stop()

    def _stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


class BrokerVolume(Volume):
    """A `Volume` without a folder, whose problems the logs report.

    Attributes:
        commits: time from each write to its acknowledgement.
        troubles: the problem of each log, by model.
    """

    def __init__(self, brokers: str) -> None:
        super().__init__("log", Path("/"))
        self._brokers = brokers
        self.commits = Durations()
        self.troubles = dict[str, str]()

    @property
    def trouble(self) -> str:
        """The problems with their remedy; empty if there are none."""
        troubles = {each.removesuffix(f": {LOOK_AT_BROKERS}") for each in self.troubles.values() if each}
        if not troubles:
            return ""
        return f"log of {self._brokers}: {'; '.join(sorted(troubles))}: {LOOK_AT_BROKERS}; writes wait meanwhile"

    @property
    def free_bytes(self) -> None:
        """None: each broker has a disk of its own."""

    def has_file(self, _path: Path) -> bool:
        """Return False, because the service has no files there."""
        return False

    def probe(self, _refusal: Refusal) -> bool:
        """Return True, because the logs retry by themselves."""
        return True

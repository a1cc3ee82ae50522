"""The bucket on brokers: JetStream's key-value store. Needs `deltasync[jetstream]`."""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from nats.aio.client import Client
from nats.errors import Error, NoRespondersError
from nats.js.api import KeyValueConfig, StorageType
from nats.js.errors import BucketNotFoundError, KeyWrongLastSequenceError, NoStreamResponseError
from nats.js.kv import KeyValue

from deltasync.base.errors import ServiceUnavailable
from deltasync.cluster.bucket import Changed, Entry


@dataclass(frozen=True, kw_only=True)
class BucketOptions:
    """Which bucket.

    Attributes:
        name: of letters, digits, `_` and `-`; the processes of one service have the same.
        replicas: on how many brokers it is, from 1 to 5, where it has to be made.
        timeout_seconds: how long brokers may take to answer; less than the lease.
    """

    name: str = "deltasync_owners"
    replicas: int = 1
    timeout_seconds: float = 2.0


class NatsBucket:
    """A bucket on brokers: a `Bucket`. The connection stays that of who made it."""

    def __init__(self, client: Client, options: BucketOptions) -> None:
        self._options = options
        self._js = client.jetstream(timeout=options.timeout_seconds)
        self._bucket: KeyValue | None = None
        self._watcher: KeyValue.KeyWatcher | None = None
        self._following: asyncio.Task[None] | None = None

    async def put(self, key: str, value: bytes, revision: int) -> int:
        """Write a key that is at a revision, 0 if it never was written; answers with the new one.

        Raises:
            Changed: it is at another one, or the bucket is gone.
            ServiceUnavailable: brokers do not answer.
        """
        try:
            bucket = self._bucket or await self._open()
            return await bucket.update(key, value, last=revision)
        except (KeyWrongLastSequenceError, NoStreamResponseError, NoRespondersError) as error:
            raise Changed(f"{key} is not at revision {revision}") from error
        except (Error, TimeoutError) as error:
            raise self._unavailable(error) from error

    async def follow(self, seen: Callable[[Entry], None]) -> None:
        """Have `seen` called with all entries before this returns; from then on with each change.

        Raises:
            ServiceUnavailable: brokers do not answer.
        """
        await self.close()
        try:
            async with asyncio.timeout(2 * self._options.timeout_seconds):
                bucket = await self._open()
                watcher = self._watcher = await bucket.watchall()
                while (entry := await watcher.updates(self._options.timeout_seconds)) is not None:  # type: ignore[no-untyped-call]
                    seen(_entry(entry))
        except (Error, TimeoutError) as error:
            raise self._unavailable(error) from error
        self._following = asyncio.create_task(_pass_on(watcher, seen))

    async def close(self) -> None:
        """Follow it no more."""
        task, self._following = self._following, None
        if task:
            task.cancel()
            await asyncio.wait([task])
        watcher, self._watcher = self._watcher, None
        if watcher:
            with suppress(Error):  # The connection is gone, or what was followed.
                await watcher.stop()  # type: ignore[no-untyped-call]

    async def _open(self) -> KeyValue:
        try:
            self._bucket = await self._js.key_value(self._options.name)
        except BucketNotFoundError:
            self._bucket = await self._js.create_key_value(self._made())
        return self._bucket

    def _made(self) -> KeyValueConfig:
        return KeyValueConfig(
            bucket=self._options.name,
            description="who owns which model of deltasync",
            history=1,
            storage=StorageType.FILE,
            replicas=self._options.replicas,
        )

    def _unavailable(self, error: Exception) -> ServiceUnavailable:
        words = f"{type(error).__name__}: {error}".rstrip(": ")
        return ServiceUnavailable(f"brokers do not answer for the bucket {self._options.name!r}: {words}")


async def _pass_on(watcher: KeyValue.KeyWatcher, seen: Callable[[Entry], None]) -> None:
    async for entry in watcher:
        if entry is not None:
            seen(_entry(entry))


def _entry(entry: KeyValue.Entry) -> Entry:
    deleted = entry.operation is not None
    return Entry(entry.key, b"" if deleted else entry.value or b"", entry.revision or 0)

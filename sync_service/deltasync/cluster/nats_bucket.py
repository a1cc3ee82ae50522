"""A bucket in JetStream's key-value store. Needs `deltasync[jetstream]`."""

import asyncio
from collections.abc import Callable
from contextlib import suppress

from nats.aio.client import Client
from nats.errors import Error, NoRespondersError
from nats.js.api import KeyValueConfig, StorageType
from nats.js.errors import BucketNotFoundError, KeyWrongLastSequenceError, NoStreamResponseError
from nats.js.kv import KeyValue

from deltasync.base.errors import ServiceUnavailable
from deltasync.cluster.bucket import Changed, Entry


class NatsBucket:
    """A `Bucket` on brokers. It does not close the connection."""

    def __init__(self, client: Client, name: str, *, replicas: int = 1, timeout_seconds: float = 2.0) -> None:
        """Use bucket `name`, on `replicas` brokers if it is new, with a timeout that is shorter than the lease."""
        self._name, self._replicas, self._timeout = name, replicas, timeout_seconds
        self._js = client.jetstream(timeout=timeout_seconds)
        self._bucket: KeyValue | None = None
        self._watcher: KeyValue.KeyWatcher | None = None
        self._following: asyncio.Task[None] | None = None

    async def put(self, key: str, value: bytes, revision: int) -> int:
        """Write a key if its revision is still `revision`, 0 for a new key; return the new revision."""
        try:
            bucket = self._bucket or await self._open()
            return await bucket.update(key, value, last=revision)
        # Without a bucket there is no response.
        except (KeyWrongLastSequenceError, NoStreamResponseError, NoRespondersError) as error:
            raise Changed(f"{key} is not at revision {revision}") from error
        except (Error, TimeoutError) as error:
            raise self._unavailable(error) from error

    async def follow(self, seen: Callable[[Entry], None]) -> None:
        """Call `seen` with all entries before this returns, and from then on with each change."""
        await self.close()
        try:
            async with asyncio.timeout(2 * self._timeout):
                bucket = await self._open()
                watcher = self._watcher = await bucket.watchall()
                while (entry := await watcher.updates(self._timeout)) is not None:  # type: ignore[no-untyped-call]
                    seen(_entry(entry))
        except (Error, TimeoutError) as error:
            raise self._unavailable(error) from error
        self._following = asyncio.create_task(_pass_on(watcher, seen))

    async def close(self) -> None:
        """Stop following."""
        task, self._following = self._following, None
        if task:
            task.cancel()
            await asyncio.wait([task])
        watcher, self._watcher = self._watcher, None
        if watcher:
            with suppress(Error):  # The connection or the subscription may be gone.
                await watcher.stop()  # type: ignore[no-untyped-call]

    async def _open(self) -> KeyValue:
        try:
            self._bucket = await self._js.key_value(self._name)
        except BucketNotFoundError:
            config = KeyValueConfig(
                bucket=self._name,
                description="owners of deltasync models",
                history=1,
                storage=StorageType.FILE,
                replicas=self._replicas,
            )
            self._bucket = await self._js.create_key_value(config)
        return self._bucket

    def _unavailable(self, error: Exception) -> ServiceUnavailable:
        words = f"{type(error).__name__}: {error}".rstrip(": ")
        return ServiceUnavailable(f"brokers do not answer for the bucket {self._name!r}: {words}")


async def _pass_on(watcher: KeyValue.KeyWatcher, seen: Callable[[Entry], None]) -> None:
    async for entry in watcher:
        if entry is not None:
            seen(_entry(entry))


def _entry(entry: KeyValue.Entry) -> Entry:
    deleted = entry.operation is not None
    return Entry(entry.key, b"" if deleted else entry.value or b"", entry.revision or 0)

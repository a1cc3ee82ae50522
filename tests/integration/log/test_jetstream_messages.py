"""Reading a stream: all of it, whatever becomes of who sends it, or an error."""

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.js.client import JetStreamContext
from tests.support.brokers import Brokers
from tests.unit.log.test_log_store import TIMEOUT, content

from deltasync.base.errors import Owner
from deltasync.log import jetstream_stream
from deltasync.log.brokers import BrokerOptions
from deltasync.log.jetstream_logs import JetStreamLogs
from deltasync.log.log_store import LogUnavailable

RECORDS = 30
Subscription = JetStreamContext.PullSubscription
Fetch = Callable[..., Awaitable[list[Any]]]


@pytest.fixture(scope="module")
def brokers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Brokers]:
    with Brokers(tmp_path_factory.mktemp("brokers")) as brokers:
        yield brokers


@pytest.fixture
def options(brokers: Brokers, tmp_path: Path) -> BrokerOptions:
    """Of brokers that have a log of records and a small one."""
    options = BrokerOptions(urls=brokers.urls, prefix=f"test{abs(hash(tmp_path))}", replicas=1, max_bytes=1 << 30)
    logs = JetStreamLogs(options, "a")
    log = logs.open("clicks", Owner("a", "a:1", "http://a:2", 1))
    for number in range(RECORDS):
        log.append("cuts/m", number, 0, 0, b"rows")
    log.put("small", b"record").result(TIMEOUT)
    logs.close()
    return options


def opened(options: BrokerOptions) -> tuple[list[int], dict[str, bytes]]:
    """What another process finds that opens the log."""
    logs = JetStreamLogs(options, "b")
    try:
        log = logs.open("clicks", Owner("b", "b:1", "http://b:2", 2))
        return [number for number, *_ in content(log, "cuts/m")], log.items("")
    finally:
        logs.close()


ALL = list(range(RECORDS)), {"small": b"record"}


def test_a_broker_that_lags_behind_says_there_is_less(
    options: BrokerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    info, fetch = Subscription.consumer_info, Subscription.fetch

    async def lagging_info(self: Any) -> Any:
        found = await info(self)
        found.num_pending = max(0, (found.num_pending or 0) - 20)
        return found

    async def lagging(self: Any, batch: int = 1, timeout: float | None = 5) -> list[Any]:
        return await fetch(self, 1, timeout)

    monkeypatch.setattr(Subscription, "consumer_info", lagging_info)
    monkeypatch.setattr(Subscription, "fetch", lagging)
    assert opened(options) == ALL


@pytest.mark.parametrize("times", [1, 5])
def test_a_broker_that_goes_away_leaves_another_to_go_on(
    options: BrokerOptions, monkeypatch: pytest.MonkeyPatch, times: int
) -> None:
    """A reader is gone where its broker is, which kept it in memory."""
    fetch, fetches = Subscription.fetch, 0
    monkeypatch.setattr(jetstream_stream, "_SECONDS", 0.2)

    async def fetch_from_another(self: Any, batch: int = 1, timeout: float | None = 5) -> list[Any]:
        nonlocal fetches
        fetches += 1
        if fetches % 2 == 0 and fetches <= 2 * times:
            await self._js._jsm.delete_consumer(self._stream, self._consumer)
        return await fetch(self, batch, timeout)

    monkeypatch.setattr(Subscription, "fetch", fetch_from_another)
    monkeypatch.setattr(jetstream_stream, "_BATCH", 7)
    assert opened(options) == ALL
    assert fetches > 2 * times


def test_a_message_that_is_lost_on_its_way_is_asked_for_again(
    options: BrokerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch, fetches = Subscription.fetch, 0
    monkeypatch.setattr(jetstream_stream, "_BATCH", 7)

    async def losing(self: Any, batch: int = 1, timeout: float | None = 5) -> list[Any]:
        nonlocal fetches
        fetches += 1
        found = await fetch(self, batch, timeout)
        return found[:3] + found[4:] if fetches in (2, 5) else found

    monkeypatch.setattr(Subscription, "fetch", losing)
    assert opened(options) == ALL


def test_a_log_that_nobody_sends_whole_is_not_opened(
    options: BrokerOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch = Subscription.fetch
    monkeypatch.setattr(jetstream_stream, "_TRIES", 3)

    async def silent_at_the_end(self: Any, batch: int = 1, timeout: float | None = 5) -> list[Any]:
        found = [each for each in await fetch(self, batch, timeout) if each.metadata.num_pending]
        if not found:
            raise TimeoutError
        return found

    monkeypatch.setattr(Subscription, "fetch", silent_at_the_end)
    with pytest.raises(LogUnavailable, match="do not send the messages of stream"):
        opened(options)

"""Reading a stream: all of it, whatever becomes of who sends it, or an error."""

from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import pytest
from tests.support.brokers import Brokers as RunningBrokers
from tests.unit.log.test_log_store import TIMEOUT

from deltasync.base.errors import Owner
from deltasync.log.brokers import BrokerOptions, Brokers
from deltasync.log.jetstream_logs import JetStreamLogs
from deltasync.log.jetstream_stream import LogSubjects, ReadOptions, messages
from deltasync.log.log_store import LogUnavailable

RECORDS = 30
# With its fence and the small record.
ALL = RECORDS + 2


class Reader:
    """A process that reads a log, in which `fetch` takes the place of each request for messages.

    It gets the number of the request, the subscription, and how many messages are asked for.
    """

    def __init__(self, brokers: Brokers) -> None:
        self._brokers, self.client = brokers, self
        self.fetch: Callable[[int, Any, int], Awaitable[list[Any]]] = fetched
        self.requests = 0

    def read(self, **options: Any) -> int:
        """How many messages it finds, which are in order."""

        async def found() -> list[int]:
            names = LogSubjects(self._brokers.options.prefix, "clicks")
            last = (await self._brokers.ask(f"STREAM.INFO.{names.stream}"))["state"]["last_seq"]
            brokers, read = cast("Brokers", self), ReadOptions(seconds=0.5, **options)
            subjects = (names.rows, names.notes, names.fences)
            return [each.sequence async for each in messages(brokers, names.stream, subjects, last, read)]

        sequences = self._brokers.run(found())
        assert sequences == list(range(sequences[0], sequences[0] + len(sequences)))
        return len(sequences)

    def jetstream(self) -> "Reader":
        return self

    async def pull_subscribe(self, *arguments: Any, **named: Any) -> "Subscription":
        return Subscription(self, await self._brokers.client.jetstream().pull_subscribe(*arguments, **named))


class Subscription:
    def __init__(self, reader: Reader, subscription: Any) -> None:
        self._reader, self._subscription = reader, subscription
        self.unsubscribe = subscription.unsubscribe

    async def fetch(self, count: int, timeout: float) -> list[Any]:
        self._reader.requests += 1
        return await self._reader.fetch(self._reader.requests, self._subscription, count)


async def fetched(_: int, subscription: Any, count: int) -> list[Any]:
    return cast("list[Any]", await subscription.fetch(count, timeout=0.5))


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    """Of brokers that have a log of records and a small one."""
    with RunningBrokers(tmp_path_factory.mktemp("brokers")) as running:
        options = BrokerOptions(urls=running.urls, prefix="test", replicas=1, max_bytes=1 << 30)
        logs = JetStreamLogs(options, "a")
        log = logs.open("clicks", Owner("a", "a:1", "http://a:2", 1))
        for number in range(RECORDS):
            log.append("cuts/m", number, 0, 0, b"rows")
        log.put("small", b"record").result(TIMEOUT)
        logs.close()
        brokers = Brokers(options, "b")
        yield Reader(brokers)
        brokers.close()


@pytest.fixture(autouse=True)
def _as_new(reader: Reader) -> None:
    reader.requests = 0


@pytest.mark.parametrize("missing", [1, 20, RECORDS])
def test_a_broker_that_understates_what_is_pending_costs_nothing(reader: Reader, missing: int) -> None:
    """It lags behind the others."""

    async def lagging(_: int, subscription: Any, count: int) -> list[Any]:
        found = await fetched(0, subscription, count)
        for each in found:
            each._metadata = replace(each.metadata, num_pending=max(0, each.metadata.num_pending - missing))
        return found

    reader.fetch = lagging
    assert reader.read() == ALL


@pytest.mark.parametrize("times", [1, 5])
def test_a_broker_that_goes_away_leaves_another_to_go_on(reader: Reader, times: int) -> None:
    """A reader is gone where its broker is, which kept it in memory."""

    async def from_another(number: int, subscription: Any, count: int) -> list[Any]:
        if number % 2 == 0 and number <= 2 * times:
            await subscription._js._jsm.delete_consumer(subscription._stream, subscription._consumer)
        return await fetched(number, subscription, count)

    reader.fetch = from_another
    assert reader.read(batch=7) == ALL
    assert reader.requests > 2 * times


def test_a_message_that_is_lost_on_its_way_is_asked_for_again(reader: Reader) -> None:
    async def losing(number: int, subscription: Any, count: int) -> list[Any]:
        found = await fetched(number, subscription, count)
        return found[:3] + found[4:] if number in (2, 5) else found

    reader.fetch = losing
    assert reader.read(batch=7) == ALL


def test_a_log_that_nobody_sends_whole_is_not_read(reader: Reader) -> None:
    async def silent_at_the_end(number: int, subscription: Any, count: int) -> list[Any]:
        found = [each for each in await fetched(number, subscription, count) if each.metadata.num_pending]
        if not found:
            raise TimeoutError
        return found

    reader.fetch = silent_at_the_end
    with pytest.raises(LogUnavailable, match="do not send the messages of stream"):
        reader.read(tries=3)

"""A network that cuts, stalls, delays and repeats: no row is lost, and no half of a release is seen."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest
from tests.support.fleet import WAIT, Recorder, Trainer, follow, wait_until_in_sync
from tests.support.proxy import Proxy
from tests.support.server import RunningService

from deltasync.client import Part, Position, Publisher, PublisherOptions, ResyncRequired, Shard, TableSpec

# Several messages for each part and each release.
TABLE = TableSpec("user", 40_000, 16)


@pytest.fixture
def proxy(running: RunningService) -> Iterator[Proxy]:
    with Proxy(running.grpc) as proxy:
        yield proxy


class Followed:
    """A trainer and a replica that reach the service through a proxy; `checked` compares what both hold."""

    def __init__(self, running: RunningService, proxy: Proxy, stack: ExitStack) -> None:
        self._running = running
        self.trainer = stack.enter_context(Trainer(proxy.address, [TABLE]))
        self.target = Recorder()
        self.expected: dict[int, dict[str, bytes]] = {}
        proxied = type("Proxied", (), {"grpc": proxy.address})()
        self.replica = stack.enter_context(follow(proxied, "predictors", "p", self.target))
        self.check(self.note(self.trainer.publish_all()))

    def note(self, head: Position) -> Position:
        self.expected[head.number] = self.trainer.expected()
        return head

    def change(self, count: int) -> Position:
        return self.note(self.trainer.change(count))

    def check(self, head: Position) -> None:
        """The replica has the newest version, and every version that it ever showed was a whole one."""
        self.replica.wait_for(head, 3 * WAIT)
        wait_until_in_sync(self._running, "predictors", head)
        assert self.target.bytes() == self.expected[head.number]
        assert all(held == self.expected[at.number] for at, held in self.target.held.items())


@pytest.fixture
def followed(running: RunningService, proxy: Proxy) -> Iterator[Followed]:
    with ExitStack() as stack:
        yield Followed(running, proxy, stack)


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_connection_is_cut_anywhere_in_a_message(followed: Followed, proxy: Proxy, direction: Any) -> None:
    """Of the trainer's or the replica's, or both: what was sent is sent again, whether or not it had arrived."""
    random = np.random.default_rng(0)
    for size in (1, *random.integers(10, 200, 3), *random.integers(200, 2_000_000, 4)):
        proxy.cut_after(direction, int(size))
        head = followed.change(20_000)
        followed.check(head)
    proxy.cut()
    followed.check(followed.change(5))
    assert sorted(followed.expected) == [*range(1, 11)], "each cut was sealed once"


def test_a_cut_connection_loses_no_ids_of_rows_to_publish_again(running: RunningService, proxy: Proxy) -> None:
    with Trainer(running.grpc, [TABLE]) as trainer:
        claim = trainer.publish_all()
        before = trainer.rows["user"].copy()
        for _ in range(2):
            trainer.change(20_000)
        came = np.flatnonzero((trainer.rows["user"] != before).any(axis=1))
    options = PublisherOptions(
        service=proxy.address, model="clicks", run="again", run_started_unix_ns=2, continues=claim
    )
    for size in (10, 1_000, 100_000, 8 * len(came)):
        connections = proxy.connections
        proxy.cut_after("down", size)
        with Publisher(options, [TABLE], [Shard.whole(TABLE)]) as publisher:
            with pytest.raises(ResyncRequired, match="also publish the rows that the service names") as told:
                publisher.publish(Part(step=1, step_end_unix_ns=1)).result(WAIT)
            assert told.value.changed
            ((name, ids),) = told.value.changed
            assert (name, ids.tolist()) == ("user", came.tolist())
        assert proxy.connections == connections + 2


@pytest.mark.nightly
def test_a_delay_is_nothing_but_slow(followed: Followed, proxy: Proxy) -> None:
    """Also connections are made, however long a handshake takes."""
    proxy.delay_seconds = 0.3
    proxy.cut()
    followed.check(followed.change(100))
    assert followed.replica.connection.connected


def test_what_a_connection_begins_with_comes_twice(followed: Followed, proxy: Proxy) -> None:
    """A rank and a replica seem to come twice: the later of both is the one, and it is gone again."""
    for size in (300, 1_000, 100_000):
        proxy.twice = size
        proxy.cut()
        followed.check(followed.change(20_000))

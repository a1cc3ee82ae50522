"""Brokers and services as processes on loopback, a trainer that publishes through them, and replicas."""

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from tests.support.brokers import Broker, Brokers
from tests.support.fleet import Recorder
from tests.support.process import ServiceProcess
from tests.support.proxy import Proxy
from tests.support.waiting import wait_for

from deltasync.base.errors import DeltasyncError, ResyncRequired
from deltasync.client.publisher import Part, Publisher, PublisherOptions
from deltasync.client.subscriber import Subscriber, SubscriberOptions
from deltasync.client.targets.numpy_target import NumpyTarget
from deltasync.core.position import Position
from deltasync.core.rows import RowBatch
from deltasync.core.tables import Shard, TableSpec

TABLE = TableSpec("user", 500, 8, np.dtype(np.float32))
MODEL, CONSUMER = "clicks", "predictors"
_TIMEOUT = 60.0


class Trainer:
    """One rank that publishes changes of a table and remembers them.

    Like a user's trainer, it sends rows again if a service lacks them.
    """

    def __init__(self, address: str, run: str = "run-1", started: int = 1) -> None:
        self.rows = np.zeros((TABLE.rows, TABLE.dim), np.float32)
        self._changed_at = np.zeros(TABLE.rows, np.int64)
        self._positions = dict[tuple[int, int], int]()  # The step of each position, by number and seal.
        self._random = np.random.default_rng(0)
        self.head, self.step = Position(), 0
        self._options = PublisherOptions(service=address, model=MODEL, run=run, run_started_unix_ns=started)
        self._publisher = Publisher(self._options, [TABLE], [Shard.whole(TABLE)])

    def publish(self, count: int = 5) -> Position:
        """Change some rows and retry until they are sealed."""
        self.step += 1
        ids = np.sort(self._random.choice(TABLE.rows, count, replace=False))
        self.rows[ids] = self._random.random((count, TABLE.dim), np.float32)
        self._changed_at[ids] = self.step
        since = self._positions.get((self.head.number, self.head.seal), 0)
        while True:
            try:
                self.head = self._send(since)
            except ResyncRequired as error:
                since = self._since(error)
            else:
                self._positions[self.head.number, self.head.seal] = self.step
                return self.head

    def close(self) -> None:
        self._publisher.close()

    def _send(self, since: int) -> Position:
        full = since == 0
        ids = np.arange(TABLE.rows) if full else np.flatnonzero(self._changed_at > since)
        rows = [RowBatch.of_table(TABLE, ids, self.rows[ids])]
        part = Part(step=self.step, step_end_unix_ns=time.time_ns(), rows=rows, full=full)
        return self._publisher.publish(part).result(_TIMEOUT)

    def _since(self, error: ResyncRequired) -> int:
        """The step whose later changes the service lacks; 0 if it lacks everything."""
        head = error.head
        if head is None or (step := self._positions.get((head.number, head.seal))) is None:
            return 0
        self._publisher.close()
        options = PublisherOptions(
            service=self._options.service,
            model=MODEL,
            run=self._options.run,
            run_started_unix_ns=self._options.run_started_unix_ns,
            continues=head,
        )
        self._publisher = Publisher(options, [TABLE], [Shard.whole(TABLE)])
        return step


class Cluster:
    """Brokers, and services that share their log. They run while the block runs."""

    def __init__(
        self,
        folder: Path,
        services: int = 3,
        brokers: int = 3,
        *,
        proxies: bool = False,
        lease_seconds: float = 1.5,
        arguments: Sequence[str] = (),
    ) -> None:
        """With `proxies`, services and brokers reach brokers through proxies, each through its own.
        `lease_seconds` is short where a process is to take over, and long where a busy machine must not make one
        do so. `arguments` are further ones of the services.
        """
        self._lease_seconds = lease_seconds
        self.folder, self._arguments = folder, arguments
        self._through_proxies, self.proxies = proxies, dict[str, list[Proxy]]()
        self.brokers = Brokers(folder / "brokers", brokers)
        if proxies:
            for each in self.brokers.brokers:
                self.proxies[each.name] = [
                    Proxy(f"127.0.0.1:{other.cluster_port}") for other in self.brokers.brokers
                ]
            self.brokers.route = self._route
            self.brokers.advertised = "127.0.0.1:1"  # Nobody: else they would find each other past the proxies.
        self._brokers, self._count = brokers, services
        self.services = list[ServiceProcess]()
        self._closing = list[Any]()

    def __enter__(self) -> Self:
        self.brokers.__enter__()
        try:
            self.services = [self._service(number) for number in range(self._count)]
            for each in self.services:
                each.start(announced=False)
            for each in self.services:
                each.wait_until_announced()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for each in self._closing:
            each.close()
        for service in self.services:
            if service.process and service.process.poll() is None:
                service.kill()
        for proxy in (proxy for proxies in self.proxies.values() for proxy in proxies):
            proxy.__exit__(None, None, None)
        self.brokers.__exit__()

    def cut(self, service: ServiceProcess, broker: Broker) -> None:
        """Cut the network in two: one service and one broker on one side, all others on the other."""
        for proxy in self._across(service, broker):
            proxy.stall()

    def heal(self, service: ServiceProcess, broker: Broker) -> None:
        """Join the network again."""
        for proxy in self._across(service, broker):
            proxy.go_on()

    def _across(self, service: ServiceProcess, broker: Broker) -> Iterator[Proxy]:
        inside = {self.name_of(service), broker.name}
        for name, proxies in self.proxies.items():
            for other, proxy in zip(self.brokers.brokers, proxies, strict=True):
                if (name in inside) != (other.name in inside):
                    yield proxy

    def _route(self, broker: Broker, other: Broker) -> str:
        return f"nats://{self.proxies[broker.name][self.brokers.brokers.index(other)].address}"

    @property
    def address(self) -> str:
        """The addresses of all services, for clients."""
        return ",".join(each.grpc for each in self.services)

    def trainer(self, **settings: Any) -> Trainer:
        trainer = Trainer(self.address, **settings)
        self._closing.append(trainer)
        return trainer

    def replica(self, name: str, consumer: str = CONSUMER) -> tuple[Subscriber, Recorder]:
        target = Recorder()
        options = SubscriberOptions(service=self.address, consumer=consumer, replica=name)
        subscriber = Subscriber(options, target)
        self._closing.append(subscriber)
        return subscriber, target

    def owner(self) -> ServiceProcess:
        """The process that owns the model."""
        owner = wait_for(lambda: next(filter(self._has, self.services), None), "nobody has the model", _TIMEOUT)
        assert owner
        return owner

    def _has(self, service: ServiceProcess) -> bool:
        if not service.process or service.process.poll() is not None:
            return False
        try:
            lines = service.get_json("/processes")
        except (OSError, DeltasyncError, ValueError):
            return False
        return any(line["here"] and MODEL in line["models"] for line in lines)

    def name_of(self, service: ServiceProcess) -> str:
        return f"service-{self.services.index(service)}"

    def _urls(self, name: str) -> list[str]:
        if not self._through_proxies:
            return list(self.brokers.urls)
        proxies = self.proxies[name] = [Proxy(f"127.0.0.1:{each.port}") for each in self.brokers.brokers]
        return [f"nats://{each.address}" for each in proxies]

    def _service(self, number: int) -> ServiceProcess:
        return ServiceProcess(
            self.folder / f"service-{number}",
            *("--log", ",".join(self._urls(f"service-{number}"))),
            *("--log-monitor", ",".join(self.brokers.monitors)),
            *("--log-replicas", str(min(3, self._brokers))),
            *(["--accept-log-risk"] if self._brokers < 3 else []),
            *("--checkpoints", str(self.folder / "checkpoints")),
            *("--checkpoint-seconds", "1"),
            *("--process", f"service-{number}"),
            *("--lease-seconds", str(self._lease_seconds)),
            *("--consumer", f"{CONSUMER}={MODEL}"),
            *self._arguments,
        )


def same(target: NumpyTarget, rows: np.ndarray[Any, Any]) -> bool:
    return np.array_equal(target.tables[TABLE.name], rows)

"""Several processes of one service, in a thread of the test's process and without brokers.

Their bucket is in memory, their logs are in a folder. They answer HTTP.
"""

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Self, TypeVar

import uvicorn
from tests.support.http import HttpStatus
from tests.support.local_service import publish, sources
from tests.support.many_logs import ManyLogs
from tests.support.memory_bucket import MemoryBucket, MemoryStore
from tests.support.waiting import wait_for

from deltasync.access.audit import Audit
from deltasync.access.rights import Access
from deltasync.access.roles import Roles
from deltasync.api.application import create_app
from deltasync.api.process import routes_of
from deltasync.base.process import listening_socket
from deltasync.cluster.bucket import ClusterOptions, Member
from deltasync.cluster.placement import heir_of
from deltasync.cluster.shared_owners import SharedOwners
from deltasync.core.policy import Policy
from deltasync.service.options import ServiceOptions
from deltasync.service.service import Service
from deltasync.status.answers import Sampler

T = TypeVar("T")
ADMIN_TOKEN = "secret"  # noqa: S105
_TIMEOUT = 30.0


class LocalProcess(HttpStatus):
    """One of these processes."""

    def __init__(self, service: Service, bucket: MemoryBucket, server: uvicorn.Server) -> None:
        self.service, self.bucket, self.server = service, bucket, server
        self.me = service.models.owners.me
        self.name, self.http = self.me.name, self.me.http


class LocalCluster:
    """Processes a, b and so on. They run while the block runs."""

    def __init__(
        self, folder: Path, names: str = "ab", roles: Roles | None = None, lease_seconds: float = 6.0
    ) -> None:
        self.folder, self._names, self._roles, self._lease_seconds = folder, names, roles, lease_seconds
        self.processes = list[LocalProcess]()
        self._store = MemoryStore()
        self._ready = threading.Event()
        self._failure: BaseException | None = None

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._run, name="cluster", daemon=True)
        self._thread.start()
        assert self._ready.wait(_TIMEOUT)
        if self._failure:
            raise self._failure
        self.wait_until(
            lambda: all(
                each.service.models.owners.confirmed
                and len(each.service.models.owners.processes()) == len(self._names)
                for each in self.processes
            )
        )
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(_TIMEOUT)
        assert not self._thread.is_alive()
        if self._failure:
            raise self._failure

    def run(self, do: Callable[[], Awaitable[T]]) -> T:
        """Run a coroutine in the event loop of the processes."""

        async def done() -> T:
            return await do()

        return asyncio.run_coroutine_threadsafe(done(), self._loop).result(_TIMEOUT)

    def wait_until(self, true: Callable[[], bool]) -> None:
        """Wait until a condition is true, evaluated in the event loop of the processes."""

        async def asked() -> bool:
            return true()

        wait_for(lambda: self.run(asked), seconds=_TIMEOUT)

    def model(self, owner: LocalProcess, consumer: str) -> str:
        """Publish a model that a process owns, with a consumer; waits until every process knows both."""
        members = [each.me for each in self.processes]
        names = (f"model-of-{consumer}-{number}" for number in itertools.count())
        name = next(each for each in names if heir_of(each, members) == owner.me)

        async def make() -> None:
            await owner.service.consumers.create(consumer, name, Policy())
            await publish(owner.service, model=name)

        self.run(make)
        self.wait_until(
            lambda: (
                all(each.service.models.owners.model_of(consumer) == name for each in self.processes)
                and all(each.service.models.owners.owner_of(name) for each in self.processes)
            )
        )
        return name

    def kill(self, process: LocalProcess) -> None:
        """Stop a process without telling the others."""

        async def die() -> None:
            process.bucket.cut = True
            process.server.should_exit = process.server.force_exit = True
            for each in list(process.server.server_state.connections):
                each.transport.abort()

        self.run(die)

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except BaseException as error:  # noqa: BLE001  # handed over to the test's thread
            self._failure = error
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop, self._ending = asyncio.get_running_loop(), asyncio.Event()
        async with AsyncExitStack() as stack:
            for name in self._names:
                self.processes.append(await stack.enter_async_context(self._process(name)))
            self._ready.set()
            await self._ending.wait()

    @asynccontextmanager
    async def _process(self, name: str) -> AsyncIterator[LocalProcess]:
        async with asyncio.TaskGroup() as tasks:
            logs, bucket = ManyLogs(self.folder / "logs"), MemoryBucket(self._store)
            url = str(self.folder / "checkpoints")
            service = Service(ServiceOptions(data_dir=self.folder / name, checkpoints=url), tasks, logs)
            hosting = service.hosting(logs)
            listener = listening_socket("127.0.0.1", 0)
            me = Member(name, "127.0.0.1:1", f"http://127.0.0.1:{listener.getsockname()[1]}", run=name)
            options = ClusterOptions(lease_seconds=self._lease_seconds)
            owners = SharedOwners(options, me, bucket, hosting, service.events)
            service.join(owners)
            access = Access(ADMIN_TOKEN, self._roles, Audit(service.events))
            sampler = Sampler(sources(service), service.events, access)
            app = create_app(routes_of(service), access, sampler)
            config = uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none")
            server = uvicorn.Server(config)
            serving = asyncio.create_task(server.serve(sockets=[listener]))
            sampling = asyncio.create_task(sampler.run())
            await owners.start()
            try:
                yield LocalProcess(service, bucket, server)
            finally:
                bucket.cut = False
                await owners.close()
                service.draining.set()
                server.should_exit = True
                await serving
                sampling.cancel()
                await service.drain()

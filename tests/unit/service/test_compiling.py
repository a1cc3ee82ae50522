"""A start that has kernels to compile says so, takes no streams before, and can be ended."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.http import HttpStatus
from tests.support.ports import free_port

from deltasync.api import server
from deltasync.api.server_options import ServerOptions
from deltasync.service.options import ServiceOptions

WAIT = 20


class HeldKernel:
    """Compiles once it is let go."""

    def __init__(self) -> None:
        self.begun, self.let_go = threading.Event(), threading.Event()
        self.compiled = False

    def compile(self) -> None:
        self.begun.set()
        assert self.let_go.wait(WAIT)
        self.compiled = True


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[HeldKernel]]:
    kernels = [HeldKernel(), HeldKernel()]
    monkeypatch.setattr(server, "imported_kernels", lambda: kernels)
    yield kernels
    for each in kernels:
        each.let_go.set()


class Starting(HttpStatus):
    """A service that has no streams yet."""

    def __init__(self, http: str) -> None:
        self.http = http


@pytest.mark.parametrize("stopped", [False, True])
def test_while_kernels_are_compiled_it_lives_and_is_not_ready(
    tmp_path: Path, kernels: list[HeldKernel], stopped: bool
) -> None:
    http = free_port()
    options = ServerOptions(service=ServiceOptions(data_dir=tmp_path / "data"), grpc_port=0, http_port=http)
    service = Starting(f"http://127.0.0.1:{http}")

    async def main() -> None:
        stopping = asyncio.Event()
        serving = asyncio.create_task(server.run(options, stopping))
        assert await asyncio.to_thread(kernels[0].begun.wait, WAIT)
        assert (await asyncio.to_thread(service.get, "/livez"))[0] == 200
        status, said = await asyncio.to_thread(service.get, "/readyz")
        assert status == 503
        assert "still compiling" in said
        if stopped:
            stopping.set()
        kernels[0].let_go.set()
        if not stopped:
            kernels[1].let_go.set()
            while (await asyncio.to_thread(service.get, "/readyz"))[0] != 200:
                await asyncio.sleep(0)
            stopping.set()
        await serving
        assert [each.compiled for each in kernels] == [True, not stopped]

    asyncio.run(asyncio.wait_for(main(), WAIT))

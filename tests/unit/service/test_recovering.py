"""While one model recovers, others are served, and who asks for that one is told so."""

import asyncio
import errno
import json
import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.command import deltasync
from tests.support.local_service import join, publish, run, send
from tests.support.ports import free_port
from tests.support.wire import part
from tests.unit.support.async_tests import in_loop

from deltasync.api import server
from deltasync.api.server_options import ServerOptions
from deltasync.api.subscribe import ReplicaStream
from deltasync.core import progress
from deltasync.core.errors import InvalidInput, ServiceUnavailable, StorageFailed
from deltasync.core.policy import Policy
from deltasync.core.progress import Progress
from deltasync.service.options import ServiceOptions
from deltasync.service.service import Service
from deltasync.status.answers import Answers
from deltasync.storage import volume
from deltasync.storage.model_store import ModelStore
from deltasync.v1 import subscribe_pb2
from deltasync.views.view import View

TOP = Policy(top_k=1)
WAIT = 20


class HeldRecovery:
    """Holds back the recovery of model "slow" until it is let go."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._let_go = threading.Event()
        recover = ModelStore.recover

        def held(store: ModelStore, record: Mapping[str, Any]) -> None:
            if store._model == "slow":
                assert self._let_go.wait(WAIT)
            recover(store, record)

        patch.setattr(ModelStore, "recover", held)

    def let_go(self) -> None:
        self._let_go.set()


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Two models with a cut each, and a consumer with a view of one of them."""

    async def scenario(service: Service) -> None:
        for model in ("slow", "fast"):
            await publish(service, model=model)
            await service.coordinators[model].drain()
        await service.create_consumer("top", "slow", TOP)

    run(tmp_path, scenario)
    return tmp_path


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[HeldRecovery]:
    held = HeldRecovery(monkeypatch)
    yield held
    held.let_go()


async def silence() -> AsyncIterator[subscribe_pb2.SubscribeRequest]:
    await asyncio.Event().wait()
    yield subscribe_pb2.SubscribeRequest()


@in_loop()
async def test_models_that_are_there_do_not_wait_for_another(data_dir: Path, held: HeldRecovery) -> None:
    async with asyncio.timeout(WAIT), asyncio.TaskGroup() as tasks:
        service = Service(ServiceOptions(data_dir=data_dir), tasks)
        recovery = tasks.create_task(service.recover())
        while "fast" not in service.models:
            await service.model_added.changed()
        session = await join(service, model="fast", continues=service.models["fast"].position)
        assert await send(session, part(2, [(0, [3], np.ones((1, 4), "<f4"))]))
        replica = await replica_of(service, "top")
        await refused(service)
        await service.create_consumer("new", "slow", TOP)
        held.let_go()
        await recovery
        assert not service.recovering
        assert await anext(replica)
        await replica.aclose()
        for name in ("top", "new"):
            assert isinstance(service.feed(service.registry.get(name)), View)
            assert await Answers(service).lag(name)
        await service.delete_consumer("new")
        assert await join(service, model="slow", continues=service.models["slow"].position)
        await service.drain()


async def replica_of(service: Service, consumer: str) -> Any:
    """A replica of a model that is recovering: it waits."""
    opening = subscribe_pb2.SubscribeOpen(consumer=consumer, replica="r")
    stream = ReplicaStream(service, opening).run(silence())
    first = await anext(stream)
    assert isinstance(first, subscribe_pb2.SubscribeResponse)
    assert first.WhichOneof("message") == "progress"
    return stream


async def refused(service: Service) -> None:
    calls = [
        join(service, model="slow"),
        service.delete_rows("slow", "user", [1]),
        service.delete_consumer("top"),
        Answers(service).lag("top"),
    ]
    for call in calls:
        with pytest.raises(ServiceUnavailable, match="model 'slow' is still recovering; try again"):
            await call
    with pytest.raises(InvalidInput, match="nothing"):
        await service.create_consumer("wrong", "slow", Policy(tables=("nothing",)))
    assert b'consumer="top"' not in await Answers(service).metrics()


@in_loop()
async def test_one_that_cannot_be_read_ends_the_start_once_nobody_reads_the_log(
    data_dir: Path, held: HeldRecovery, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = list[str]()
    monkeypatch.setattr("deltasync.storage.table_files._damaged", lambda path, *_: _noted(opened, path))
    async with asyncio.timeout(WAIT), asyncio.TaskGroup() as tasks:
        service = Service(ServiceOptions(data_dir=data_dir), tasks)
        (folder,) = (data_dir / "models" / "fast" / "tables").iterdir()
        (folder / "shared").unlink()
        recovery = asyncio.create_task(service.recover())
        while not opened:
            await asyncio.sleep(0)
        assert not recovery.done()
        held.let_go()
        with pytest.raises(StorageFailed, match="shared is missing"):
            await recovery
        assert list(service.models) == ["slow"]
        await service.drain()


def _noted(found: list[str], path: Path) -> StorageFailed:
    found.append(path.name)
    return StorageFailed(f"{path.name} is missing")


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=WAIT) as answer:  # noqa: S310
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


@pytest.mark.parametrize("stopped", [False, True])
def test_the_service_listens_and_is_ready_once_all_are_there(
    data_dir: Path, held: HeldRecovery, monkeypatch: pytest.MonkeyPatch, stopped: bool
) -> None:
    monkeypatch.setattr(server, "_SOON_SECONDS", 0)
    listening = asyncio.Event()
    monkeypatch.setattr(server.logger, "info", lambda said, *_: listening.set() if "listening" in said else None)
    http = free_port()
    options = ServerOptions(
        service=ServiceOptions(data_dir=data_dir), grpc_port=0, http_port=http, drain_seconds=0.1
    )

    async def main() -> None:
        stopping = asyncio.Event()
        serving = asyncio.create_task(server.run(options, stopping))
        await listening.wait()
        url = f"http://127.0.0.1:{http}"
        status, said = await asyncio.to_thread(get, f"{url}/readyz")
        assert (status, json.loads(said)["message"]) == (503, "still recovering: slow")
        assert (await asyncio.to_thread(get, f"{url}/livez"))[0] == 200
        assert not (data_dir / "endpoints.json").exists()
        if stopped:
            stopping.set()
        held.let_go()
        while not stopped and (await asyncio.to_thread(get, f"{url}/readyz"))[0] != 200:
            await asyncio.sleep(0)
        stopping.set()
        await serving

    asyncio.run(asyncio.wait_for(main(), WAIT))


def test_one_that_waits_for_its_volume_says_so_and_keeps_no_service_from_ending(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recover, path = ModelStore.recover, data_dir / "models" / "slow"

    def refusing(store: ModelStore, record: Mapping[str, Any]) -> None:
        if store._model == "slow":
            raise volume.refused("no room", path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 1 << 60)
        recover(store, record)

    monkeypatch.setattr(ModelStore, "recover", refusing)
    monkeypatch.setattr(server, "_SOON_SECONDS", 0)
    http = free_port()
    options = ServerOptions(service=ServiceOptions(data_dir=data_dir), grpc_port=0, http_port=http)
    listening = asyncio.Event()
    monkeypatch.setattr(server.logger, "info", lambda said, *_: listening.set() if "listening" in said else None)

    async def main() -> None:
        stopping = asyncio.Event()
        serving = asyncio.create_task(server.run(options, stopping))
        await listening.wait()
        trouble = rf"{path} on volume 'models': No space left on device .* make room on it"
        for where, said in (
            ("/readyz", "still recovering: slow; nothing new can be written"),
            ("/consumers/top/lag", "model 'slow' is still recovering; try again"),
        ):
            status, answer = await asyncio.to_thread(get, f"http://127.0.0.1:{http}{where}")
            assert status == 503
            assert re.fullmatch(f"{said}: {trouble}", json.loads(answer)["message"])
        lags = json.loads((await asyncio.to_thread(get, f"http://127.0.0.1:{http}/lag"))[1])
        shown = json.loads((await asyncio.to_thread(get, f"http://127.0.0.1:{http}/status"))[1])
        (top,) = (each for each in lags if each["consumer"] == "top")
        assert (top["state"], top["model"], top["versions"], top["seconds"]) == ("failed", "slow", None, None)
        assert re.fullmatch(f"nobody answers for model 'slow': still recovering: {trouble}", top["reason"])
        assert shown["consumers"] == lags
        (slow,) = (each for each in shown["models"] if each["model"] == "slow")
        assert (slow["head"], slow["bytes"]) == (None, None)
        assert slow["trouble"].startswith("still recovering: ")
        address = ("--service", f"http://127.0.0.1:{http}")
        for command, wanted in ((("lag",), 0), (("status",), 0), (("lag", "--max-seconds", "3600"), 3)):
            code, said, _ = await asyncio.to_thread(deltasync, *command, *address)
            assert "nobody answers for model 'slow'" in said
            assert code == wanted
        assert (await asyncio.to_thread(get, f"http://127.0.0.1:{http}/tables"))[1].count('"model":"fast"')
        stopping.set()
        await serving

    asyncio.run(asyncio.wait_for(main(), WAIT))


def test_progress_is_said_now_and_then(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    caplog.set_level("INFO")
    quick = Progress("model 'm': opening tables", 10)
    quick.add(10)
    assert not caplog.text
    monkeypatch.setattr(progress, "_EVERY_SECONDS", 0)
    slow = Progress("model 'm': reading the log", 4000)
    slow.add(1000)
    slow.add(2000)
    assert [each.message for each in caplog.records] == [
        "model 'm': reading the log: 1000 of 4000 rows",
        "model 'm': reading the log: 3000 of 4000 rows",
    ]

"""A start: kernels are compiled and models recover. Who is there is served, and who asks for others is told so."""

import asyncio
import errno
import json
import os
import re
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.command import deltasync
from tests.support.faults import Faults, Held, Hook, failing
from tests.support.http import HttpStatus
from tests.support.local_service import join, opened, publish, run, send, sources
from tests.support.log import log_of
from tests.support.ports import free_port
from tests.support.wire import part

from deltasync.api import process
from deltasync.api.process import streams_of
from deltasync.api.subscribe import ReplicaStream
from deltasync.base.errors import InvalidInput, ServiceUnavailable, StorageFailed
from deltasync.checkpoints.file_storage import Place, PlaceFailed
from deltasync.core.policy import Policy
from deltasync.core.table_memory import NoTableMemory
from deltasync.log import volume
from deltasync.log.log_store import LogUnavailable
from deltasync.model.model import Model
from deltasync.model.model_store import note_removal
from deltasync.service.models import Models
from deltasync.service.options import ServiceOptions
from deltasync.service.service import Service
from deltasync.status.answers import Answers
from deltasync.status.overview import consumer_statuses, model_statuses
from deltasync.status.process import checks, not_ready
from deltasync.v1 import subscribe_pb2
from deltasync.views.view import View

TOP = Policy(top_k=1)
WAIT = 20


@pytest.fixture
def data_dir(tmp_path: Path) -> Path:
    """Two models with a cut each, and a consumer with a view of one of them."""

    async def scenario(service: Service) -> None:
        for model in ("slow", "fast"):
            await publish(service, model=model)
            await service.models.coordinators[model].drain()
        await service.consumers.create("top", "slow", TOP)

    run(tmp_path, scenario)
    return tmp_path


@pytest.fixture
def faults() -> Faults:
    return Faults()


@pytest.fixture
def held(faults: Faults) -> Iterator[Held]:
    """Holds up the recovery of model "slow"."""
    held = faults.log.hooks["items"] = Held("cut/slow")
    yield held
    held.let_go()


@asynccontextmanager
async def starting(data_dir: Path, faults: Faults) -> AsyncIterator[Service]:
    """A service that recovers nothing yet, and drains at the end."""
    async with asyncio.timeout(WAIT), asyncio.TaskGroup() as tasks:
        service = Service(ServiceOptions(data_dir=data_dir), tasks, **faults.collaborators)
        yield service
        await service.drain()


async def silence() -> AsyncIterator[subscribe_pb2.SubscribeRequest]:
    await asyncio.Event().wait()
    yield subscribe_pb2.SubscribeRequest()


async def test_models_that_are_there_do_not_wait_for_another(data_dir: Path, faults: Faults, held: Held) -> None:
    async with starting(data_dir, faults) as service:
        recovery = asyncio.create_task(service.recovery.all())
        while "fast" not in service.models:
            await service.models.added.changed()
        counted, fast = service.limits.number("bytes_in_all"), service.models["fast"].tables.nbytes
        assert counted == 2 * fast, "the tables of the other one, too"
        session = await join(service, model="fast", continues=service.models["fast"].position)
        assert await send(session, part(2, [(0, [3], np.ones((1, 4), "<f4"))]))
        replica = await replica_of(service, "top")
        await refused(service)
        await service.consumers.create("new", "slow", TOP)
        held.let_go()
        await recovery
        assert not service.models.recovering
        assert service.limits.number("bytes_in_all") == counted
        assert await anext(replica)
        await replica.aclose()
        for name in ("top", "new"):
            assert isinstance(service.consumers.feed(service.registry.get(name)), View)
            assert await Answers(sources(service)).consumer(name)
        await service.consumers.delete("new")
        assert await join(service, model="slow", continues=service.models["slow"].position)


async def replica_of(service: Service, consumer: str) -> Any:
    """A replica of a model that is recovering: it waits."""
    opening = subscribe_pb2.SubscribeOpen(consumer=consumer, replica="r")
    stream = ReplicaStream(streams_of(service), opening).run(silence())
    first = await anext(stream)
    assert isinstance(first, subscribe_pb2.SubscribeResponse)
    assert first.WhichOneof("message") == "progress"
    return stream


async def refused(service: Service) -> None:
    calls = [
        join(service, model="slow"),
        service.removals.delete_rows("slow", "user", [1]),
        service.consumers.delete("top"),
        Answers(sources(service)).consumer("top"),
    ]
    for call in calls:
        with pytest.raises(ServiceUnavailable, match="model 'slow' is still recovering; try again"):
            await call
    with pytest.raises(InvalidInput, match="nothing"):
        await service.consumers.create("wrong", "slow", Policy(tables=("nothing",)))
    assert b'consumer="top"' not in await Answers(sources(service)).metrics()


async def test_one_that_cannot_be_read_ends_the_start_once_nobody_reads_the_log(
    data_dir: Path, faults: Faults, held: Held
) -> None:
    asked = list[str]()

    def unreadable(call: Hook, name: str) -> dict[str, bytes]:
        if name == "cut/fast":
            asked.append("fast")
            raise StorageFailed("the record of fast cannot be read")
        return call(name)  # type: ignore[no-any-return]

    faults.log.hooks["items"] = unreadable
    async with starting(data_dir, faults) as service:
        recovery = asyncio.create_task(service.recovery.all())
        while not asked:
            await asyncio.sleep(0)
        assert not recovery.done()
        held.let_go()
        with pytest.raises(StorageFailed, match="fast cannot be read"):
            await recovery
        assert list(service.models) == ["slow"]


@pytest.mark.parametrize("kind", [PlaceFailed, LogUnavailable, NoTableMemory])
async def test_a_model_waits_for_its_checkpoints_its_log_or_memory_and_says_so(
    data_dir: Path, faults: Faults, kind: type[StorageFailed]
) -> None:
    asked, away, error = list[str](), [True], kind("away")

    def unreachable(call: Hook, name: str) -> Any:
        if name == "cut/slow" and away:
            asked.append("slow")
            raise error
        return call(name)

    faults.log.hooks["items"] = unreachable
    async with starting(data_dir, faults) as service:
        recovery = asyncio.create_task(service.recovery.all())
        while len(asked) < 2 or "fast" not in service.models:
            await asyncio.sleep(0.001)
        assert await join(service, model="fast", continues=service.models["fast"].position)
        assert not_ready(checks(sources(service))) == "model 'slow' is still recovering: away"
        with pytest.raises(ServiceUnavailable) as refusal:
            service.models.model("slow")
        assert str(refusal.value) == "model 'slow' is still recovering; try again: away"
        (top,) = consumer_statuses(service.models, service.registry, await Answers(sources(service)).consumers())
        (slow,) = (each for each in model_statuses(service.models) if each.model == "slow")
        assert (top.state, top.reason) == ("failed", "model 'slow' is not available: still recovering: away")
        assert slow.trouble == "still recovering: away"
        away.clear()
        await recovery
        assert sorted(service.models) == ["fast", "slow"]
        assert not_ready(checks(sources(service))) == ""


@pytest.mark.parametrize("how", ["fails", "is cancelled"])
async def test_a_recovery_that_fails_late_leaves_neither_a_thread_nor_views(
    data_dir: Path, faults: Faults, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    reached, make_views = asyncio.Event(), Models.make_views

    async def made(models: Models, model: Model) -> None:
        await make_views(models, model)
        if model.name == "slow":
            reached.set()
            if how == "fails":
                raise StorageFailed("damaged")
            await asyncio.Event().wait()

    monkeypatch.setattr(Models, "make_views", made)
    async with starting(data_dir, faults) as service:
        recovery = asyncio.create_task(service.recovery.model("slow"))
        await reached.wait()
        if how == "is cancelled":
            recovery.cancel()
        await asyncio.wait([recovery])
        assert service.views.get(service.registry.get("top")) is None
        assert not [each.name for each in threading.enumerate() if each.name.startswith("model-slow")]
        monkeypatch.undo()
        await service.recovery.all()
        assert isinstance(service.consumers.feed(service.registry.get("top")), View)


async def test_where_checkpoints_are_gone_as_a_whole_they_may_be_put_back(tmp_path: Path) -> None:
    """Say, a volume that is not mounted: nothing shows that they are lost."""
    data, away = tmp_path / "data", tmp_path / "away"
    async with opened(data) as service:
        session = await publish(service)
        for step in (2, 3):
            await send(session, part(step, [(0, [3], np.full((1, 4), step, "<f4"))]))
            await session.coordinator.settled()
            await service.checkpoints.make("clicks")
        rows = [table.rows.tobytes() for table in service.models["clicks"].tables]
    (data / "checkpoints").rename(away)
    with pytest.raises(ExceptionGroup) as raised:
        async with opened(data):
            pass
    (error,) = raised.value.exceptions
    assert isinstance(error, StorageFailed)
    assert "no rows of model 'clicks' up to version 2, and it has no checkpoints: put them back" in str(error)
    away.rename(data / "checkpoints")
    async with opened(data) as service:
        assert [table.rows.tobytes() for table in service.models["clicks"].tables] == rows


async def test_checkpoints_that_cannot_be_read_now_are_not_lost(tmp_path: Path, faults: Faults) -> None:
    refused, made = list[str](), []

    def refuse(call: Hook, place: Place, name: str) -> Any:
        if name.rpartition("/")[2] in refused:
            raise OSError(errno.EIO, os.strerror(errno.EIO), name)
        return call(place, name)

    faults.place.hooks |= {"open": refuse, "get": refuse}
    async with opened(tmp_path, faults=faults) as service:
        session = await publish(service)
        for step in (2, 3):
            await send(session, part(step, [(0, [3], np.full((1, 4), step, "<f4"))]))
            await session.coordinator.settled()
            made.append(await service.checkpoints.make("clicks"))
        rows = [table.rows.tobytes() for table in service.models["clicks"].tables]
    refused.append(made[1].layers[-1].files[0].name.rpartition("/")[2])
    async with opened(tmp_path, faults=faults) as service:
        assert [table.rows.tobytes() for table in service.models["clicks"].tables] == rows
        assert refused[0] in "".join(service.models["clicks"].problems)
    refused.append(made[0].layers[0].files[0].name.rpartition("/")[2])
    async with starting(tmp_path, faults) as service:
        recovery = asyncio.create_task(service.recovery.all())
        while not service.models.recovery_failures.get("clicks"):
            await asyncio.sleep(0.001)
        assert re.search("cannot be read: .*system log", service.models.waits_for("clicks"))
        refused.clear()
        await recovery
        assert [table.rows.tobytes() for table in service.models["clicks"].tables] == rows


async def test_copies_of_a_deleted_model_are_removed_once_their_place_answers(
    tmp_path: Path, faults: Faults
) -> None:
    copies = tmp_path / "copies"
    async with opened(tmp_path / "data", checkpoints=str(copies)) as service:
        await publish(service)
        await service.checkpoints.make("clicks")
        await asyncio.wrap_future(note_removal(log_of(service), "clicks"))
    with faults.place.replaced(names=failing(PlaceFailed("it does not answer"), str(copies))):
        async with opened(tmp_path / "data", faults=faults, checkpoints=str(copies)) as service:
            assert not service.models
            with pytest.raises(StorageFailed, match="it does not answer"):  # Else it had the copies of the other.
                await publish(service)
    assert [each for each in copies.rglob("*") if each.is_file()]
    async with opened(tmp_path / "data", checkpoints=str(copies)):
        assert not [each for each in copies.rglob("*") if each.is_file()]


class Starting(HttpStatus):
    """A service that starts in this event loop; it is stopped at the end."""

    def __init__(self, data_dir: Path, faults: Faults | None = None) -> None:
        port, make = free_port(), partial(Service, **(faults or Faults()).collaborators)
        self.http, self.stopping = f"http://127.0.0.1:{port}", asyncio.Event()
        options = ServiceOptions(
            data_dir=data_dir, grpc_port=0, http_port=port, drain_seconds=0.1, early_seconds=0.0
        )
        self._serving = asyncio.create_task(process.run(options, self.stopping, make=make))

    async def ask(self, path: str) -> tuple[int, str]:
        return await asyncio.to_thread(self.get, path)

    async def says(self, text: str) -> None:
        """Wait until /readyz answers with this text."""
        said = ""
        while text not in said:
            with suppress(OSError):  # It does not listen yet.
                said = (await self.ask("/readyz"))[1]

    async def is_ready(self) -> None:
        while (await self.ask("/readyz"))[0] != 200:
            await asyncio.sleep(0)

    async def ended(self) -> None:
        await self._serving

    async def __aenter__(self) -> "Starting":
        return self

    async def __aexit__(self, *_: object) -> None:
        self.stopping.set()
        await self.ended()


@pytest.mark.parametrize("stopped", [False, True])
async def test_the_service_listens_and_is_ready_once_all_are_there(
    data_dir: Path, faults: Faults, held: Held, stopped: bool
) -> None:
    async with Starting(data_dir, faults) as service:
        await service.says("still recovering")
        status, said = await service.ask("/readyz")
        assert (status, json.loads(said)["message"]) == (503, "still recovering: slow")
        assert (await service.ask("/livez"))[0] == 200
        assert not (data_dir / "endpoints.json").exists()
        if stopped:
            service.stopping.set()
        held.let_go()
        if not stopped:
            await service.is_ready()


async def test_one_whose_late_recovery_fails_leaves_its_data_directory_in_order(
    data_dir: Path, faults: Faults, held: Held
) -> None:
    held.error = StorageFailed("the disk is broken")
    service = Starting(data_dir, faults)
    await service.says("still recovering")
    held.let_go()
    with pytest.raises(ExceptionGroup) as raised:
        await service.ended()
    assert raised.group_contains(StorageFailed, match="the disk is broken")
    async with opened(data_dir) as again:  # Which it could not, if the first one still had the directory.
        assert sorted(again.models) == ["fast", "slow"]


async def test_a_model_that_waits_for_its_volume_lets_the_service_end(data_dir: Path, faults: Faults) -> None:
    path = data_dir / "checkpoints" / "slow"
    full = volume.refused("no room", path, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), 1 << 60)
    faults.log.hooks["items"] = failing(full, "cut/slow")
    async with Starting(data_dir, faults) as service:
        await service.says("a volume refuses writes")
        trouble = rf"{path} on volume 'checkpoints': No space left on device .* make room on it"
        for where, said in (
            ("/readyz", "still recovering: slow; a volume refuses writes"),
            ("/consumers/top", "model 'slow' is still recovering; try again"),
        ):
            status, answer = await service.ask(where)
            assert status == 503
            assert re.fullmatch(f"{said}: {trouble}", json.loads(answer)["message"])
        lags = json.loads((await service.ask("/consumers"))[1])
        shown = json.loads((await service.ask("/status"))[1])
        (top,) = (each for each in lags if each["consumer"] == "top")
        assert (top["state"], top["model"], top["lag"]) == ("failed", "slow", None)
        assert re.fullmatch(f"model 'slow' is not available: still recovering: {trouble}", top["reason"])
        assert shown["consumers"] == lags
        (slow,) = (each for each in shown["models"] if each["model"] == "slow")
        assert (slow["head"], slow["bytes"]) == (None, None)
        assert slow["trouble"].startswith("still recovering: ")
        for command, wanted in ((("lag",), 0), (("status",), 0), (("lag", "--max-seconds", "3600"), 3)):
            code, said, _ = await asyncio.to_thread(deltasync, *command, "--service", service.http)
            assert "model 'slow' is not available" in said
            assert code == wanted
        assert (await service.ask("/tables"))[1].count('"model":"fast"')


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
    monkeypatch.setattr(process, "imported_kernels", lambda: kernels)
    yield kernels
    for each in kernels:
        each.let_go.set()


@pytest.mark.parametrize("stopped", [False, True])
async def test_while_kernels_are_compiled_it_lives_and_is_not_ready(
    tmp_path: Path, kernels: list[HeldKernel], stopped: bool
) -> None:
    async with Starting(tmp_path / "data") as service:
        assert await asyncio.to_thread(kernels[0].begun.wait, WAIT)
        assert (await service.ask("/livez"))[0] == 200
        status, said = await service.ask("/readyz")
        assert status == 503
        assert "compiling kernels" in said
        if stopped:
            service.stopping.set()
        kernels[0].let_go.set()
        if not stopped:
            kernels[1].let_go.set()
            await service.is_ready()
    assert [each.compiled for each in kernels] == [True, not stopped]

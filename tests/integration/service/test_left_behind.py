"""What a service leaves behind that ends at any moment: nothing is lost, and the next one removes the rest."""

import asyncio
import errno
import shutil
from pathlib import Path

import numpy as np
from tests.support.crashes import Crashes
from tests.support.faults import Faults, refusing
from tests.support.local_service import join, publish, run, send
from tests.support.log import log_of
from tests.support.wire import USER, WHOLE, full_part, part, random_rows

from deltasync.checkpoints.file_storage import Place
from deltasync.checkpoints.store import CheckpointStore
from deltasync.client import Policy
from deltasync.log import volume
from deltasync.log.data_directory import CHECKPOINTS
from deltasync.model.model_store import note_removal
from deltasync.service.options import ServiceOptions
from deltasync.service.service import Service

WAIT = 20


def files_of(data_dir: Path) -> set[str]:
    """The files of checkpoints that none of them names."""
    store = CheckpointStore("clicks", Place(str(data_dir / CHECKPOINTS)))
    named = {name for each in store.manifests().manifests for name in (each.name, *(f.name for f in each.files))}
    files = (path for path in (data_dir / CHECKPOINTS).rglob("*") if path.is_file())
    return {str(path.relative_to(data_dir / CHECKPOINTS)) for path in files} - named


async def live(service: Service) -> None:
    """Everything that writes files: checkpoints of a model with a view, of which the old ones are removed."""
    session = await join(service)
    await send(session, full_part(1, random_rows(0), WHOLE))
    await service.consumers.create("top", "clicks", Policy(top_k=3))
    consumer = service.registry.get("top")
    service.registry.connect(consumer, "p", asyncio.Event())
    view = service.views.get(consumer)
    assert view
    while view.state.head is None:
        await asyncio.sleep(0.001)
    for step in range(2, 6):
        await send(session, part(step, [(0, [step, 9], np.full((2, USER.dim), step, "<f4"))]))
        await session.coordinator.settled()
        await service.checkpoints.make("clicks")
    await service.consumers.delete("top")


def test_nothing_is_lost_or_left_whenever_it_ends(tmp_path: Path) -> None:
    crashes, faults = Crashes(tmp_path / "data", tmp_path), Faults()
    with crashes.of(faults):
        run(tmp_path / "data", live, faults=faults, keep_checkpoints=2)
    versions, untidy = list[int](), 0

    async def goes_on(service: Service) -> None:
        if not (model := service.models.get("clicks")):
            versions.append(0)
            return
        version = model.position.number
        rows = random_rows(0)[0]
        for step in range(2, version + 1):
            rows[[step, 9]] = step
        assert model.tables[0].rows.tobytes() == rows.tobytes()
        versions.append(version)
        session = await join(service, continues=model.position)
        await send(session, part(9, [(0, [1], np.zeros((1, USER.dim), "<f4"))]))
        await session.coordinator.settled()
        await service.checkpoints.make("clicks")

    assert len(crashes.copies) > 40
    for copy in crashes.copies:
        untidy += bool(files_of(copy))
        run(copy, goes_on, keep_checkpoints=2)
        assert files_of(copy) == set()
        shutil.rmtree(copy)
    assert versions == sorted(versions), "nothing that was acknowledged is lost"
    assert set(versions) == {0, 1, 2, 3, 4, 5}
    assert untidy > 3, "no crash has left anything"


def test_a_model_whose_removal_has_no_room_does_not_come_back(tmp_path: Path) -> None:
    async def cut_and_note(service: Service) -> None:
        await send(await join(service), full_part(1, random_rows(0), WHOLE))
        await asyncio.wrap_future(note_removal(log_of(service), "clicks"))

    run(tmp_path, cut_and_note)

    async def start_without_room() -> None:
        faults = Faults()
        full = refusing(volume.refused("no room", tmp_path / "log" / "data.mdb", OSError(errno.ENOSPC, "full")))
        async with asyncio.timeout(WAIT), asyncio.TaskGroup() as tasks:
            with faults.log.replaced(put=full, put_all=full, append=full, truncate=full):
                service = Service(ServiceOptions(data_dir=tmp_path), tasks, **faults.collaborators)
                await service.recovery.all()
            assert not service.models
            await publish(service, run="run-2", started=2)  # It is made anew.
            assert service.models["clicks"].position.number == 1
            await service.drain()

    asyncio.run(start_without_room())
